"""Programs for described GPUs. These tests need JAX's plugin for CUDA, and no GPU."""

import jax.numpy as jnp
import pytest

from labs.kernels import gpu_programs
from labs.kernels.described_gpus import gpu
from labs.kernels.split_k import split_k_attend

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", gpu_programs.GPUS, ids=str)
def test_the_state_compiles_for_every_gpu(capability):
    """The widest heads, with a mask, a bias and lengths. Some GPUs have 99 KiB for a block."""
    try:
        device = gpu(*capability)
    except NotImplementedError as missing:
        pytest.skip(str(missing))
    options = {
        "mask": jnp.ones((1, 1, 1, 8192), bool),
        "bias": jnp.zeros((1, 4, 1, 8192), jnp.float32),
        "kv_lengths": jnp.ones(1, jnp.int32),
    }
    f = gpu_programs.state_of(split_k_attend)
    shapes = (1, 1, 4, 256), (1, 8192, 1, 256), (1, 8192, 1, 256)
    program = gpu_programs.compiled(f, device, *shapes, dtype=jnp.float32, **options)
    assert program.as_text().count("__gpu$xla.gpu.triton") == 2
