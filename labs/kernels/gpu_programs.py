"""What eight H100s would send each other for one attention, compiled without one of them.

    make gpu-programs

Every method of `tree_decode`, ring decoding, pass-Q and the two prefills, with the rows or the
heads of the cache over another axis of the mesh than its keys; and a Llama's step where a mesh has
axes for all three. The collectives are those of the program that XLA compiles for the GPUs, kernels
included: its own count, as it has joined them, in the order in which it will run them. What is
under way while a device attends, what is copied and what is held are read from the same program.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from described_gpus import h100s
from described_programs import zero_weights
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeattn
from labs.cost import collectives, count_collectives, memory, sent_bytes, total_bytes
from treeattn_llama import Config, Llama

ROWS, HEADS, KV_HEADS, HEAD_DIM = 4, 16, 8, 128
KEYS = 65536  # of a decoding step
TEXT = 1024  # queries and keys of a prefill
METHODS = "allreduce", "butterfly", "gather", "reduce_scatter", "all_to_all"
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
BY_NODES = {
    "hierarchical": functools.partial(treeattn.tree_decode, method="hierarchical"),
    "hierarchical, scattered": functools.partial(
        treeattn.tree_decode, method="hierarchical", scatter=True
    ),
    "hierarchical, 16 bits": functools.partial(
        treeattn.tree_decode, method="hierarchical", wire=jnp.bfloat16
    ),
}
PREFILLS = {
    "ring prefill": treeattn.ring_attention,
    "Ulysses prefill": treeattn.ulysses_attention,
}
# The mesh's axes and their sizes; the keys are along "kv", and along "node" where there is one.
LAYOUTS = {
    "rows over 2, keys over 4": {"batch": 2, "kv": 4},
    "heads over 2, keys over 4": {"heads": 2, "kv": 4},
}
# Of these only some methods.
NODES = {"keys over 2 nodes of 4": {"node": 2, "kv": 4}}
LONG = {"keys over 8": {"kv": 8}}


def compiled(name: str, axes: dict[str, int], devices, named: bool = True):
    """The program of one attention over bfloat16 arrays that are sharded along those axes.

    named: whether it is told what lies along the other axis, as nobody can see inside `jax.jit`
    """
    mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    batch, heads = ("batch" if "batch" in axes else None), ("heads" if "heads" in axes else None)
    keys = tuple(name for name in axes if name in ("node", "kv"))
    prefill = name in PREFILLS
    n = TEXT if prefill else KEYS

    def array(length: int, h: int, along: tuple[str, ...] | None):
        sharding = NamedSharding(mesh, PartitionSpec(batch, along, heads))
        return jax.ShapeDtypeStruct((ROWS, length, h, HEAD_DIM), jnp.bfloat16, sharding=sharding)

    q = array(n, HEADS, keys) if prefill else array(1, HEADS, None)
    k = array(n, KV_HEADS, keys)
    options = {"batch_axis": batch, "head_axis": heads} if named else {}
    # An abstract mesh: the kernel is chosen while the program is compiled for its devices.
    options |= {"mesh": mesh.abstract_mesh, "axis": keys, "implementation": "pallas"}
    f = functools.partial((PREFILLS | DECODERS | BY_NODES)[name], **options)
    return jax.jit(f).lower(q, k, k).compile()


# The sizes of a layer of Llama 3.2 1B, with a smaller vocabulary.
LLAMA = Config(
    vocabulary=32768,
    width=2048,
    layers=1,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp_width=8192,
    context=131072,
    norm_epsilon=1e-5,
    rotary_base=500000.0,
    tied=True,
)
LLAMA_ROWS = 4
CAPACITY = 8192  # keys of each row
LLAMA_MESHES = {
    "rows over 2, heads over 2, text over 2": {"batch": 2, "heads": 2},
    "heads over 4, text over 2": {"heads": 4},
    "rows over 2, text over 4": {"batch": 2},
}
LLAMA_STEPS = {
    "tree": {"attention": "tree"},
    "ring": {"attention": "ring"},
    "reduce_scatter, shard_weights": {"attention": "reduce_scatter", "shard_weights": True},
    "all_to_all, 16 bits, shard_weights": {
        "attention": "all_to_all",
        "wire": "bfloat16",
        "shard_weights": True,
    },
}


def llama_step(roles: dict[str, int], options: dict, devices):
    """(the mesh, the program) of a Llama's step of one token a row.

    The model is made on as many simulated devices; of it, only how its arrays lie is compiled for.
    """
    here = Llama(LLAMA, zero_weights(LLAMA), implementation="pallas")
    here = here.on(treeattn.kv_mesh(jax.devices()[: len(devices)], **roles), **options)
    mesh = Mesh(np.array(devices).reshape(here.mesh.devices.shape), here.mesh.axis_names)

    def there(x):
        sharding = NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    weights, cache = jax.tree.map(there, (here.weights, here.new_cache(LLAMA_ROWS, CAPACITY)))
    model = dataclasses.replace(here, mesh=mesh, weights=weights)
    rows = NamedSharding(mesh, PartitionSpec("batch" if "batch" in roles else None))
    tokens = jax.ShapeDtypeStruct((LLAMA_ROWS, 1), jnp.int32, sharding=rows)

    def step(weights, tokens, cache):
        return dataclasses.replace(model, weights=weights).extend(tokens, cache)

    return mesh, jax.jit(step).lower(weights, tokens, cache).compile()


def llama_table(devices) -> Iterator[str]:
    """The lines of the second table."""
    c = LLAMA
    yield ""
    yield (
        f"A step of a Llama: {LLAMA_ROWS} rows of one token, one layer of width {c.width:,} with "
        f"{c.heads} heads on {c.kv_heads} key heads of {c.head_dim} and an MLP of "
        f"{c.mlp_width:,}, a vocabulary of {c.vocabulary:,}, {CAPACITY:,} keys of each row. The "
        "embedding's row and the logits, which a step has once, are among what crosses."
    )
    yield ""
    yield "| mesh | attention | collectives | sent at least | across which axes |"
    yield "|---|---|---|---|---|"
    for layout, roles in LLAMA_MESHES.items():
        for name, options in LLAMA_STEPS.items():
            yield llama_row(layout, name, *llama_step(roles, options, devices))


def llama_row(layout: str, name: str, mesh, program) -> str:
    """A line of the table: the collectives by the axes that they cross."""
    found = collectives(program, mesh)
    cells = [str(count_collectives(found)), f"{sent_bytes(found):,}"]
    for axes in sorted({c.axes for c in found}):
        own = [c for c in found if c.axes == axes]
        cells.append(f"{' and '.join(axes)}: {kinds_of(own)}, {total_bytes(own):,} bytes put in")
    return f"| {layout} | {name} | {cells[0]} | {cells[1]} | {'; '.join(cells[2:])} |"


def kinds_of(found) -> str:
    """How many there are of each kind."""
    kinds = {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.count
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def hidden_bytes(text: str) -> int:
    """Bytes that a device puts in while it attends, in the order in which the GPU runs the program.

    text: a scheduled program's. A message is under way between its two halves; a kernel of the
    package's, or a choice between some, is what attends.
    """
    exposed = text
    starts = r"%([\w.-]+) = .* (?:[a-z-]+)-start\("
    for start in re.finditer(starts, text):
        end = re.search(rf" [a-z-]+-done\(%{re.escape(start[1])}\)", text[start.end() :])
        between = text[start.end() : start.end() + end.start()]
        if re.search(r"%pallas_call[\w.-]* = | conditional\(", between):
            hidden = re.sub(r"([a-z-]+)-start\($", "hidden-start(", start[0])
            exposed = exposed.replace(start[0], hidden)
    return total_bytes(collectives(text)) - total_bytes(collectives(exposed))


def kernels_and_copies(text: str) -> tuple[int, int]:
    """(how many kernels a device starts, bytes that those of them write which only copy)."""
    kernel = r" (fusion|custom-call|copy)\("
    kernels = collectives(re.sub(kernel, " collective-broadcast(", _without_collectives(text)))
    copy = r" copy\(| fusion\((?=.*calls=%(?:wrapped_(?:slice|concatenate)|fused_concatenate))"
    copies = collectives(re.sub(copy, " collective-broadcast(", _without_collectives(text)))
    return count_collectives(kernels), sum(c.count * c.result_bytes for c in copies)


def _without_collectives(text: str) -> str:
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.sub(rf" ({kinds})(-start|-done)?\(", r" no-\1(", text)


def row(layout: str, name: str, program) -> str:
    """A line of the table."""
    found = collectives(program)
    text = program.as_text()
    kernels, copied = kernels_and_copies(text)
    numbers = [
        count_collectives(found),
        total_bytes(found),
        hidden_bytes(text),
        sent_bytes(found),
        kernels,
        copied,
        memory(program).temporary_bytes,
    ]
    return f"| {layout} | {name} | {' | '.join(f'{n:,}' for n in numbers)} | {kinds_of(found)} |"


def main() -> None:
    treeattn.simulate_devices(8)
    try:
        devices = h100s(8)
    except NotImplementedError as missing:
        print(missing)
        return
    lines = [
        f"{ROWS} rows, {HEADS} heads on {KV_HEADS} key heads of {HEAD_DIM}, bfloat16, compiled by "
        f"JAX {jax.__version__} for eight H100s. Decoding: one query, {KEYS:,} keys; prefill: "
        f"{TEXT:,} of both. Bytes are a device's: of messages, those of them that are under way "
        "while it attends, what it must send at least, what its kernels copy, and what it holds "
        "besides arguments and results.",
        "",
        "| layout | method | collectives | put in | while attending | sent at least | kernels "
        "| copied | held | which |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for layouts, names in (
        (LAYOUTS, [*DECODERS, *PREFILLS]),
        (NODES, ["allreduce", *BY_NODES]),
        (LONG, ["allreduce", "ring", "pass-Q", "ring prefill"]),
    ):
        for layout, axes in layouts.items():
            for name in names:
                lines.append(row(layout, name, compiled(name, axes, devices)))
                print(lines[-1], flush=True)
    layout = "rows over 2, keys over 4"
    blind = compiled("allreduce", LAYOUTS[layout], devices, named=False)
    lines.append(row(f"{layout}, without batch_axis", "allreduce", blind))
    print(lines[-1])
    for line in llama_table(devices):
        lines.append(line)
        print(line, flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
