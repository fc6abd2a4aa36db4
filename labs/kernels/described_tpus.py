"""Programs for TPUs, compiled by Google's compiler without a TPU. `make tpu-programs` writes them.

    pip install --no-deps libtpu          # the compiler, and the driver, which is not used

The programs show whether a kernel compiles, what XLA sends and holds, and how many cycles XLA
estimates for its own operations. They show neither times nor that results are right.
"""

import functools
import os
import re
from collections.abc import Iterator
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from labs.kernels.remote_merge import width
from labs.kernels.tpu_decode import BUTTERFLY, ONE_SHOT, one_kernel
from treeattn import collectives, memory, tree_decode

CHIPS = "v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v5e:16x16"
HEADS, KV_HEADS, DIM, KEYS = 16, 4, 128, 4096  # keys of each device, in bfloat16
PROGRAMS = {
    "one kernel, butterfly": lambda: one_kernel(),
    "one kernel, one-shot": lambda: one_kernel(protocol=ONE_SHOT),
    "XLA, allreduce": lambda: {"method": "allreduce"},
    "XLA, butterfly": lambda: {"method": "butterfly"},
}
MOST = 16  # devices of a one-shot merge, whose code grows with their number
MISSING = "Google's compiler for TPUs is not installed: pip install --no-deps libtpu"


def tpus(name: str) -> Mesh:
    """A mesh of described TPUs, for example "v5e:2x4". Raises ImportError without libtpu."""
    # Unless it is told, libtpu asks a cloud's server about this machine.
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5e-8",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is used, so two processes may compile
    }.items():
        os.environ.setdefault(key, value)
    try:
        version("libtpu")
    except ImportError:
        raise ImportError(MISSING) from None
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return Mesh(np.array(devices).reshape(-1), ("kv",), axis_types=(AxisType.Auto,))


def compiled(
    mesh: Mesh, *, q=(HEADS, DIM), k=(KV_HEADS, DIM), n=KEYS, dtype=jnp.bfloat16, **options
):
    """`tree_decode`, compiled for the mesh: one query (heads, d), n keys (heads, d) a device."""
    sharding = NamedSharding(mesh, P(None, "kv"))
    everywhere = NamedSharding(mesh, P())
    query = jax.ShapeDtypeStruct((1, 1, *q), dtype, sharding=everywhere)
    cache = jax.ShapeDtypeStruct((1, n * mesh.size, *k), dtype, sharding=sharding)
    f = functools.partial(tree_decode, sharding=sharding, **options)
    return jax.jit(f).lower(query, cache, cache).compile()


def row(name: str, mesh: Mesh, program) -> dict:
    """What a compiled program sends, holds and takes, by the compiler's own account."""
    text = program.as_text()
    found = collectives(text)
    p = mesh.size
    copies = {"one kernel, butterfly": BUTTERFLY, "one kernel, one-shot": ONE_SHOT}
    if name in copies:
        sent = len(copies[name].partners(0, p)) * HEADS * width(DIM) * 4
    else:
        sent = sum(x.sent_bytes for x in found)
    cycles = re.findall(r'"estimated_cycles":"(\d+)"', text)
    return {
        "program": name,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": sum(x.count for x in found),
        "sent": sent,
        "held": memory(program).temporary_bytes,
        "cycles outside kernels": sum(map(int, cycles)),
    }


def table(name: str) -> Iterator[dict]:
    """The rows for these chips, each as soon as it is compiled."""
    mesh = tpus(name)
    for program, options in PROGRAMS.items():
        if "one-shot" not in program or mesh.size <= MOST:
            yield {"chips": name} | row(program, mesh, compiled(mesh, **options()))
