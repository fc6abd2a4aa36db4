"""What eight H100s would send each other for one attention, compiled without one of them.

    make gpu-programs

Every method of `tree_decode`, ring decoding, pass-Q and the two prefills, with the rows or the
heads of the cache over another axis of the mesh than its keys. The collectives are those of the
program that XLA compiles for the GPUs, kernels included: its own count, as it has joined them.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from described_gpus import h100s
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeattn
from treeattn.cost import collectives, count_collectives, sent_bytes, total_bytes

ROWS, HEADS, KV_HEADS, HEAD_DIM = 4, 16, 8, 128
KEYS = 65536  # of a decoding step
TEXT = 1024  # queries and keys of a prefill
METHODS = "allreduce", "butterfly", "gather", "reduce_scatter", "all_to_all", "hierarchical"
DECODERS = {
    method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS
} | {
    "reduce_scatter, scattered": functools.partial(
        treeattn.tree_decode, method="reduce_scatter", scatter=True
    ),
    "all_to_all, scattered": functools.partial(
        treeattn.tree_decode, method="all_to_all", scatter=True
    ),
    "allreduce, 16 bits": functools.partial(treeattn.tree_decode, wire=jnp.bfloat16),
    "all_to_all, scattered, 16 bits": functools.partial(
        treeattn.tree_decode, method="all_to_all", scatter=True, wire=jnp.bfloat16
    ),
    "ring": treeattn.ring_decode,
    "pass-Q": treeattn.pass_q_decode,
}
PREFILLS = {
    "ring prefill": treeattn.ring_attention,
    "Ulysses prefill": treeattn.ulysses_attention,
}
# The mesh's axes and their sizes; the keys are always along "kv".
LAYOUTS = {
    "rows over 2, keys over 4": {"batch": 2, "kv": 4},
    "heads over 2, keys over 4": {"heads": 2, "kv": 4},
}


def compiled(name: str, axes: dict[str, int], devices, named: bool = True):
    """The program of one attention over bfloat16 arrays that are sharded along those axes.

    named: whether it is told what lies along the other axis, as nobody can see inside `jax.jit`
    """
    mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    batch, heads = ("batch" if "batch" in axes else None), ("heads" if "heads" in axes else None)
    prefill = name in PREFILLS
    n = TEXT if prefill else KEYS

    def array(length: int, h: int, along: str | None):
        sharding = NamedSharding(mesh, PartitionSpec(batch, along, heads))
        return jax.ShapeDtypeStruct((ROWS, length, h, HEAD_DIM), jnp.bfloat16, sharding=sharding)

    q = array(n, HEADS, "kv") if prefill else array(1, HEADS, None)
    k = array(n, KV_HEADS, "kv")
    options = {"batch_axis": batch, "head_axis": heads} if named else {}
    # An abstract mesh: the kernel is chosen while the program is compiled for its devices.
    options |= {"mesh": mesh.abstract_mesh, "axis": "kv", "implementation": "pallas"}
    f = functools.partial((PREFILLS | DECODERS)[name], **options)
    return jax.jit(f).lower(q, k, k).compile()


def row(layout: str, name: str, program) -> str:
    """A line of the table."""
    found = collectives(program)
    kinds = {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.count
    kinds = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    numbers = f"{count_collectives(found)} | {total_bytes(found):,} | {sent_bytes(found):,}"
    return f"| {layout} | {name} | {numbers} | {kinds} |"


def main() -> None:
    try:
        devices = h100s(8)
    except NotImplementedError as missing:
        print(missing)
        return
    lines = [
        f"{ROWS} rows, {HEADS} heads on {KV_HEADS} key heads of {HEAD_DIM}, bfloat16, compiled by "
        f"JAX {jax.__version__} for eight H100s. Decoding: one query, {KEYS:,} keys; prefill: "
        f"{TEXT:,} of both. Bytes are a device's.",
        "",
        "| layout | method | collectives | put in | sent at least | which |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for layout, axes in LAYOUTS.items():
        for name in [*DECODERS, *PREFILLS]:
            lines.append(row(layout, name, compiled(name, axes, devices)))
            print(lines[-1], flush=True)
    layout = "rows over 2, keys over 4"
    blind = compiled("allreduce", LAYOUTS[layout], devices, named=False)
    lines.append(row(f"{layout}, without batch_axis", "allreduce", blind))
    print(lines[-1])
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
