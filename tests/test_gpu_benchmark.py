"""`make gpu` in rehearsal: on a CPU, where packages are missing, and where a part fails."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """benchmarks/gpu.py, with the modules beside it within reach."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


def start(*words: str, **variables: str) -> subprocess.CompletedProcess:
    path = {"PYTHONPATH": str(BENCHMARKS.parent), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *words], env=os.environ | path | variables, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def test_the_rehearsal(tmp_path, gpu):
    done = start(str(BENCHMARKS / "gpu.py"), "--smoke", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu-cpu.json").read_text("utf-8"))
    assert list(results["parts"]) == list(gpu.PARTS)
    for name, part in results["parts"].items():
        assert part["status"] == "done" and part["rows"], name
    rows = {name: part["rows"] for name, part in results["parts"].items()}
    assert all(row["ok"] for row in rows["correct"])
    assert {row.get("with") for row in rows["correct"]} >= {"", "mask", "lengths", "gradient"}
    assert {row["what"] for row in rows["correct"]} >= {"decode", "tree_decode"}
    found = {row["implementation"]: "share" in row or row["why not"] for row in rows["local"]}
    assert found["pallas"] is found["blockwise"] is True
    assert "needs CUDA devices" in found["flash"] and "cuDNN" in found["cuDNN"]
    assert {row["what"] for row in rows["verify"]} == {"verify", "packed", "unpacked"}
    table = (tmp_path / "gpu-cpu.md").read_text("utf-8")
    assert all(f"## {name}" in table for name in gpu.PARTS) and "agree with float64" in table
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "gpu-cpu.png").exists() == drawn


def test_a_machine_without_a_gpu_says_so(tmp_path):
    script = str(BENCHMARKS / "gpu.py")
    done = start(script, "device", "--results", str(tmp_path))
    assert "could not run: RuntimeError: JAX finds no GPU here" in done.stdout
    assert "gpu-unknown.json" in [path.name for path in tmp_path.iterdir()]


def test_a_part_that_takes_too_long_is_stopped(gpu):
    rows = []
    end = gpu.run_part("local", smoke=True, seconds=0.5, found=rows.append)
    assert end["status"].startswith("stopped") and end["seconds"] < 30


def test_all_limits_together_are_under_eight_minutes(gpu):
    assert sum(seconds for seconds, _ in gpu.PARTS.values()) + 10 < 8 * 60


def test_nothing_but_jax_and_numpy(tmp_path):
    """A part runs where jaxtyping and the readers of checkpoints are not installed."""
    needed = ("jax", "jaxlib", "numpy", "numpy.libs", "scipy", "scipy.libs", "ml_dtypes",
              "opt_einsum")  # fmt: skip
    site = Path(jax.__file__).parents[1]
    for name in needed:
        if (site / name).exists():
            (tmp_path / name).symlink_to(site / name)
    path = os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)])
    part = str(BENCHMARKS / "gpu_parts.py")
    done = start("-S", part, "device", "--smoke", "--seconds", "99", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    missing = ["jaxtyping", "gguf", "tokenizers", "safetensors", "jinja2", "tqdm"]
    assert rows[0]["stood in for"] == missing
    done = start("-S", part, "large", "--smoke", "--seconds", "99", PYTHONPATH=path)
    assert '"tokens/s"' in done.stdout, done.stderr


def test_what_is_wrong_is_found(gpu):
    import gpu_correct

    x = np.array([1.0, -np.inf])
    assert gpu_correct.difference(x, x) == 0
    for other in ([1.0, 0.0], [np.nan, -np.inf], [-np.inf, -np.inf]):
        assert gpu_correct.difference(np.array(other), x) == np.inf
    assert not gpu_correct.verdict("", 2.0, 1.0)["ok"] and gpu_correct.verdict("", 1.0, 1.0)["ok"]
