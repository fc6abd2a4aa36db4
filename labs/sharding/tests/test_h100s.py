"""The layer compiled for described H100s, where JAX's compiler for them is installed: no GPU."""

import jax
import pytest

import treeattn
from labs.sharding.__main__ import LLAMA_8B, axes_crossed, program
from labs.sharding.h100s import h100s, mesh_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def devices():
    try:
        return h100s(8)
    except NotImplementedError as missing:
        pytest.skip(f"JAX's plugin for CUDA: {missing}")


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)], ids=str)
def test_eight_h100s_send_what_eight_cpu_devices_send(shape, devices):
    crossed = []
    for which in (devices, jax.devices()[:8]):
        mesh = mesh_of(which, shape)
        found = treeattn.collectives(program(LLAMA_8B, 2, 8192, mesh))
        several = [c for c in found if c.devices > 1]  # on CPUs XLA leaves those of one device in
        crossed.append([(c.kind, c.count, axes_crossed(c, mesh), c.total_bytes) for c in several])
    on_gpus, on_cpus = crossed
    assert on_gpus == on_cpus and on_gpus
