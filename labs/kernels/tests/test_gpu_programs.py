"""The split-K kernel, compiled for described GPUs. It needs JAX's plugin for CUDA, and no GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

from labs.kernels.described_gpus import gpu
from labs.kernels.split_k import split_k_attend
from treeattn import attend

pytestmark = pytest.mark.slow

GPUS = {(9, 0): "H100", (10, 0): "B200", (8, 0): "A100", (8, 9): "L4", (12, 0): "RTX PRO 6000"}


@pytest.mark.parametrize("capability", GPUS, ids=GPUS.get)
def test_the_state_compiles_for_every_gpu(capability):
    """The widest heads, with a mask, a bias and lengths. Some GPUs have 99 KiB for a block."""
    try:
        device = gpu(*capability)
    except NotImplementedError as missing:
        pytest.skip(str(missing))
    sharding = SingleDeviceSharding(device)
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    q, cache = array((1, 1, 4, 256), jnp.float32), array((1, 8192, 1, 256), jnp.float32)
    options = {
        "mask": array((1, 1, 1, 8192), bool),
        "bias": array((1, 4, 1, 8192), jnp.float32),
        "kv_lengths": array((1,), jnp.int32),
    }
    about = jax.sharding.AbstractDevice(device.device_kind, 132, "cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=about)
    with use_abstract_mesh(mesh):
        f = jax.jit(functools.partial(attend, implementation=split_k_attend))
        program = f.trace(q, cache, cache, **options).lower().compile()
    assert program.as_text().count("__gpu$xla.gpu.triton") == 2
