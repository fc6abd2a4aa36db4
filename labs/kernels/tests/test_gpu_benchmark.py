"""`make gpu` in rehearsal: on a CPU, where packages are missing, and where a part fails."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import treeattn
from treeattn.kernel import choice, flash, mosaic

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
        [sys.executable, *words],
        env=os.environ | path | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_rehearsal(tmp_path, gpu):
    import gpu_kernels

    done = start(str(BENCHMARKS / "gpu.py"), "--smoke", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu-cpu.json").read_text("utf-8"))
    assert list(results["parts"]) == list(gpu.PARTS)
    for name, part in results["parts"].items():
        assert part["status"] == "done" and part["rows"], name
    rows = {name: part["rows"] for name, part in results["parts"].items()}
    not_run = [row for row in rows["correct"] if "ok" not in row]
    assert all("why not" in row for row in not_run)
    able = {"mosaic": mosaic.missing() is None, "pallas": True}
    cannot = ["flash", *(name for name in able if not able[name])]
    assert sorted(row["implementation"] for row in not_run) == sorted(cannot)
    hard = {row["implementation"] for row in rows["correct"] if row["what"] == "hard"}
    assert hard == {name for name in able if able[name]}
    assert all(row["ok"] for row in rows["correct"] if row not in not_run)
    assert {row.get("with") for row in rows["correct"]} >= {"", "mask", "lengths", "gradient"}
    assert {row["what"] for row in rows["correct"]} >= {"decode", "tree_decode", "hard"}
    found = {row["implementation"]: "share" in row or row["why not"] for row in rows["local"]}
    assert found["pallas"] is found["blockwise"] is True
    assert able["mosaic"] is (found["mosaic"] is True)
    assert "needs CUDA devices" in found["flash"] and "cuDNN" in found["cuDNN"]
    assert "carry" not in found["JAX's gqa"]  # its float32 does not end the measurement
    assert [row["why not"] for row in rows["kernels"]] == [gpu_kernels.NONE]
    runs = [row for row in rows["cluster"] if row["what"] == "cluster" and "why not" not in row]
    assert all(row["ok"] and row["runs"] and row["off"] < 1e-5 for row in runs)
    assert "flash" in rows["device"][0]["cannot run"] and "flash (" in done.stdout
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


def test_all_limits_together_are_under_ten_minutes(gpu):
    assert sum(seconds for seconds, _ in gpu.PARTS.values()) < 10 * 60


def listed(x) -> list:
    return x if isinstance(x, list) else [x]


def test_predictions_stand_beside_what_is_measured(gpu, monkeypatch):
    """Of the device that they are of; and each is of a row that the parts can yield."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_parts
    import gpu_report

    row = {"what": "local", "dtype": "bfloat16", "keys": 65536, "heads": "32/8"}
    row |= {"implementation": "pallas", "µs": 80.0}
    (found,) = gpu_report.with_predictions([row], "NVIDIA H200")
    assert found.pop("µs predicted") == "64 to 70" and found == row
    for other, device in ((row, "NVIDIA A100"), (row | {"keys": 7}, "NVIDIA H200")):
        assert gpu_report.with_predictions([other], device) == [other]
    predictions = json.loads(gpu_report.PREDICTIONS.read_text("utf-8"))["rows"]
    assert all(prediction["low"] < prediction["high"] for prediction in predictions)
    local = [prediction["of"] for prediction in predictions if prediction["of"]["what"] == "local"]
    assert {of["keys"] for of in local} <= {2**i for i in range(12, 21, 2)}
    assert {of["heads"] for of in local} == {f"{gpu_parts.HEADS}/8"}
    asked = [of["implementation"] for of in local]
    assert {x for name in asked for x in listed(name)} <= set(gpu_parts.KERNELS)
    decoded = [of["model"] for of in (p["of"] for p in predictions) if of["what"] == "decode"]
    source = (BENCHMARKS / "gpu_llama.py").read_text("utf-8")
    names = [x for name in decoded for x in listed(name)]
    assert all(f'"{name}"' in source for name in names)


def test_the_exit_status_says_wrong_or_incomplete(gpu, capsys):
    right, wrong = {"ok": True}, {"ok": False}
    done = {"status": "done", "rows": [right, {"why not": "it is not installed"}]}
    assert gpu.verdict({"correct": done}) == 0 and not capsys.readouterr().out
    cut = {"status": "stopped after 9 s", "rows": [right]}
    assert gpu.verdict({"correct": done, "local": cut}) == 2
    assert capsys.readouterr().out.startswith("incomplete: local")
    assert gpu.verdict({"correct": {"status": "done", "rows": [right, wrong]}, "local": cut}) == 1


def test_a_limit_is_multiplied(tmp_path):
    script = str(BENCHMARKS / "gpu.py")
    done = start(script, "device", "--smoke", "--times", "0.001", "--results", str(tmp_path))
    assert "(at most 0 s)" in done.stdout and done.returncode == 2
    assert "incomplete: device" in done.stdout


def test_what_is_not_installed_is_not_wrong(gpu, monkeypatch):
    import gpu_correct

    def load():
        raise ImportError("flash-attn-jax cannot be imported")

    monkeypatch.setattr(flash, "load", load)
    monkeypatch.setattr(choice, "device_platform", lambda _: "cuda")
    (row,) = gpu_correct.implementation("flash", ("bfloat16", "float32"), True)
    assert row["what"] == "not run" and "cannot be imported" in row["why not"]
    assert gpu.verdict({"correct": {"status": "done", "rows": [row]}}) == 0


def test_keys_and_values_are_arrays_of_their_own(gpu, monkeypatch):
    """One array read twice is in the GPU's cache the second time; and so is a small pair."""
    import gpu_parts

    pairs = gpu_parts.random_pairs((1, 64, 2, 8), "float32", most=3)
    arrays = [x for pair in pairs for x in pair]
    assert len(pairs) == 3 and len({float(x[0, 0, 0, 0]) for x in arrays}) == 6
    seen = []

    def spy(q, k, v):
        seen.append((k, v))
        return q

    monkeypatch.setattr(gpu_parts, "KERNELS", {"pallas": spy})
    monkeypatch.setattr(gpu_parts, "LOCAL", (("bfloat16", 8, ("pallas",)),))
    rows = list(gpu_parts.local(smoke=True))
    traced = [id(x) for pair in seen for x in pair]
    assert len(set(traced)) == len(traced) and len(seen) >= 2 * len(rows)


def test_a_profile_of_a_gpu_is_read_by_kernel(gpu):
    """What ran on its streams; other lines of a profile, and the host's, are sums or something
    else."""
    import gpu_kernels

    def part(name, **parts):
        return types.SimpleNamespace(name=name, **parts)

    events = [part("treeattn_split_k", duration_ns=60_000.0)] * 2
    events += [part("treeattn_merge_splits", duration_ns=4_000.0)] * 2
    events += [part("loop_add_fusion", duration_ns=1_000.0)]
    ran, sums = part("Stream #13(Compute)", events=events), part("XLA Modules", events=events)
    planes = [part("/host:CPU", lines=[ran]), part("/device:GPU:0", lines=[ran, sums])]
    times = {}
    for name, seconds in gpu_kernels.events_on_gpus(planes):
        times.setdefault(name, []).append(seconds)
    first, second, others = gpu_kernels.rows(times, calls=2, size=240_000)
    assert first["kernel"] == "treeattn_split_k" and first["a call"] == second["a call"] == 1
    np.testing.assert_allclose([first["µs"], first["GB/s"], second["µs"]], [60, 4, 4])
    assert (others["kernel"], others["a call"]) == ("others", 0.5)
    assert "command_buffer" in gpu.environment("kernels", False)["XLA_FLAGS"]
    assert "command_buffer" not in gpu.environment("local", False).get("XLA_FLAGS", "")


def test_nothing_but_jax_and_numpy(tmp_path):
    """A part runs where jaxtyping and the readers of checkpoints are not installed."""
    needed = (
        "jax",
        "jaxlib",
        "numpy",
        "numpy.libs",
        "scipy",
        "scipy.libs",
        "ml_dtypes",
        "opt_einsum",
    )
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


def test_programs_that_are_interpreted_run_one_by_one(gpu, monkeypatch):
    """The interpreter of Mosaic has one memory, whoever calls it."""
    import gpu_correct

    running, most = set(), {}

    def compare(what, arrays, options, about):
        running.add(what)
        time.sleep(0.2)
        most[what] = len(running)
        running.remove(what)
        yield {"what": what}

    monkeypatch.setattr(gpu_correct, "compare", compare)
    monkeypatch.setattr(gpu_correct, "why_not", lambda *arguments, **options: None)
    rows = list(gpu_correct.implementation("mosaic", ("bfloat16",), smoke=True))
    assert [row["what"] for row in rows] == list(gpu_correct.SMALL)
    assert set(most.values()) == {1}


def test_what_is_wrong_is_found(gpu):
    import gpu_correct

    x = np.array([1.0, -np.inf])
    assert gpu_correct.difference(x, x) == 0
    for other in ([1.0, 0.0], [np.nan, -np.inf], [-np.inf, -np.inf]):
        assert gpu_correct.difference(np.array(other), x) == np.inf
    assert not gpu_correct.verdict("", 2.0, 1.0)["ok"] and gpu_correct.verdict("", 1.0, 1.0)["ok"]
    nan = np.array([1.0, np.nan])
    assert gpu_correct.difference(nan, nan) == 0


def test_a_lost_nan_is_found(gpu):
    import gpu_hard

    def losing(*arguments, **options):
        state = treeattn.attend(*arguments, **options)
        return jax.tree.map(lambda x: jax.numpy.nan_to_num(x, nan=0.0, neginf=-np.inf), state)

    assert gpu_hard.nan_in("value", treeattn.attend, smoke=True)["ok"]
    assert not gpu_hard.nan_in("value", losing, smoke=True)["ok"]
