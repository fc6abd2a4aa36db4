"""`make gpu` without a GPU: its right answers, and what it calls wrong."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_weights

from labs.kernels import gpu
from labs.kernels.cases import draw, right
from treeattn import attend


def test_its_right_answers_are_those_of_the_tests():
    q, k, v = draw((2, 3, 6, 2, 40, 8, 5), "float32")
    options = {"kv_lengths": np.array([7, 0])}
    out, lse = right(q, k, v, **options)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)


def test_a_wrong_kernel_is_called_wrong(monkeypatch):
    arrays = draw(gpu.SMALL["decode"], "bfloat16")

    def without_the_first_key(q, k, v, *, scale):
        return attend(q, k[:, 1:], v[:, 1:], scale=scale)

    assert gpu.checked("decode", "blockwise", arrays)["ok"]
    monkeypatch.setitem(gpu.KERNELS, "blockwise", without_the_first_key)
    assert not gpu.checked("decode", "blockwise", arrays)["ok"]


def test_a_lost_nan_is_wrong():
    assert gpu.difference(jnp.zeros(2), jnp.array([0.0, jnp.nan])) == np.inf


@pytest.mark.slow
def test_a_rehearsal_writes_its_page(tmp_path):
    """Split-K and blockwise are checked with NaN, and no row is wrong."""
    command = [sys.executable, "-m", "labs.kernels.gpu", "--smoke", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "gpu-cpu.md").read_text()
    assert "A rehearsal" in page and "0 results are wrong" in page
    assert page.count("what: NaN in a key") == len(gpu.KERNELS) and "µs" in page
