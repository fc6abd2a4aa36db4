"""`make gpu` without a GPU: its checks, its pages, its exit status."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_weights

from labs.kernels import gpu, gpu_checks


def test_its_right_answers_are_those_of_the_tests():
    q, k, v = gpu_checks.draw((2, 3, 6, 2, 40, 8, 5), "float32")
    options = gpu_checks.everything((q, k, v))
    out, lse = gpu_checks.right(q, k, v, **options)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
    first, _ = gpu_checks.right(q, k, v, causal=True)
    np.testing.assert_allclose(first[:, 0], np.repeat(v[:, 0], 3, axis=1), atol=1e-12)


def test_a_wrong_kernel_is_called_wrong(monkeypatch):
    arrays = gpu_checks.draw(gpu_checks.SMALL["decode"], "bfloat16")

    def without_the_first_key(q, k, v, *, scale):
        return gpu_checks.attend(q, k[:, 1:], v[:, 1:], scale=scale)

    assert gpu_checks.checked("decode", "blockwise", arrays)["ok"]
    monkeypatch.setitem(gpu_checks.KERNELS, "blockwise", without_the_first_key)
    assert not gpu_checks.checked("decode", "blockwise", arrays)["ok"]


def test_a_lost_nan_is_wrong():
    assert gpu_checks.difference(jnp.zeros(2), jnp.array([0.0, jnp.nan])) == np.inf


@pytest.mark.parametrize(
    ("device", "predicted"),
    [("NVIDIA H100 80GB HBM3", "93 to 99"), ("NVIDIA H200", "66 to 71"), ("NVIDIA L4", None)],
)
def test_predictions_stand_beside_what_was_measured(device, predicted):
    row = {"kernel": "split-K", "dtype": "bfloat16", "keys": 65_536, "bytes": 2**28, "µs": 80.0}
    assert gpu.predicted(row, device).get("µs predicted") == predicted


def test_the_exit_status():
    right = {"status": "done", "rows": [{"ok": True}]}
    wrong = {"status": "done", "rows": [{"ok": False}]}
    cut = {"status": "stopped after 3 s", "rows": []}
    assert gpu.verdict({"a": right}) == 0
    assert gpu.verdict({"a": right, "b": cut}) == 2
    assert gpu.verdict({"a": wrong, "b": cut}) == 1


def test_a_part_that_takes_too_long_is_stopped():
    assert gpu.run_part("correct", True, 0.5, print)["status"] == "stopped after 0 s"


@pytest.mark.slow
def test_a_rehearsal_writes_its_page(tmp_path):
    """Every kernel is checked with NaN, and no row is wrong."""
    command = [sys.executable, "-m", "labs.kernels.gpu", "correct", "--smoke", "--results"]
    done = subprocess.run([*command, str(tmp_path)], cwd=gpu.ROOT, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu-cpu.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"done"}
    asked = [row["kernel"] for row in parts["correct"]["rows"] if row["what"] == "NaN in a key"]
    assert asked == list(gpu_checks.KERNELS)
    assert "A rehearsal" in (tmp_path / "gpu-cpu.md").read_text()
