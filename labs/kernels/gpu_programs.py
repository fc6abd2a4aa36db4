"""Programs for GPUs, compiled without a GPU. `make gpu-programs` writes the page.

XLA compiles for a described GPU as for a real one, NVIDIA's assembler included. The programs show
whether a kernel compiles, how many kernels a call starts, and how much memory they use between
them. They show neither times nor that results are right.
"""

import contextlib
import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from labs.kernels.cluster_merge import cluster_attend
from labs.kernels.described_gpus import gpu
from labs.kernels.mosaic_decode import mosaic_attend
from labs.kernels.split_k import split_k_attend
from treeattn import attend

GPUS = {(9, 0): "H100", (10, 0): "B200", (8, 0): "A100", (8, 9): "L4", (12, 0): "RTX PRO 6000"}
CASES = {  # queries, heads, key heads, head_dim, keys, dtype
    "bfloat16, 4,096 keys": (1, 32, 8, 128, 4096, jnp.bfloat16),
    "bfloat16, 65,536 keys": (1, 32, 8, 128, 65_536, jnp.bfloat16),
    "float16, 64 queries": (64, 32, 8, 128, 65_536, jnp.float16),
    "float32, heads of 256": (1, 16, 8, 256, 65_536, jnp.float32),
}


def on_cuda(kind: str = "NVIDIA H100 80GB HBM3"):
    """A context for lowering to a described GPU, which Pallas asks for since JAX 0.11."""
    try:
        about = jax.sharding.AbstractDevice(kind, 132, "cuda")
    except (AttributeError, TypeError):  # an older JAX
        return contextlib.nullcontext()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=about)
    return jax.sharding.use_abstract_mesh(mesh)


def compiled(f, device, *shapes, dtype=jnp.bfloat16, **options):
    """The compiled program of f on the described device, for arrays of these shapes."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    options = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in options.items()
    }
    with on_cuda(device.device_kind):
        return jax.jit(f).trace(*arrays, **options).lower().compile()


def kernels(program) -> list[str]:
    """The lines of a program's text that start a kernel."""
    entry = program.as_text().split("\nENTRY ")[1].split("\n}")[0]
    return [x for x in entry.splitlines() if re.search(r" (fusion|custom-call|copy)\(", x)]


def state_of(implementation):
    return functools.partial(attend, implementation=implementation)


def decoding(f, device, l, h, h_kv, d, n, dtype):
    """The compiled program of attention of l queries over n keys."""
    return compiled(f, device, (1, l, h, d), (1, n, h_kv, d), (1, n, h_kv, d), dtype=dtype)


def kernel_table() -> Iterator[str]:
    """The lines of the first table: the kernels of a call, by GPU."""
    yield "| for | case | by | kernels | temporary, kB |"
    yield "|---|---|---|---|---|"
    for capability, name in GPUS.items():
        device = gpu(*capability)
        for case, (l, h, h_kv, d, n, dtype) in CASES.items():
            ways = {"split-K": state_of(split_k_attend)}
            if capability == (9, 0) and dtype == jnp.bfloat16:
                ways |= {"Mosaic": state_of(mosaic_attend)}
                ways |= {"a cluster of 8": state_of(cluster_attend)}
            for way, f in ways.items():
                program = decoding(f, device, l, h, h_kv, d, n, dtype)
                held = program.memory_analysis().temp_size_in_bytes / 1e3
                yield f"| {name} | {case} | {way} | {len(kernels(program))} | {held:,.0f} |"


def page(devices) -> Iterator[str]:
    """The lines of the page of results."""
    yield "# Programs for GPUs that are not there"
    yield ""
    yield f"Compiled without a GPU by jax {jax.__version__} (`make gpu-programs`). Nothing was run."
    yield ""
    yield "The *state* of one query, or 64: 32 heads on 8 key heads of 128, or 16 of 256."
    yield ""
    yield from kernel_table()
