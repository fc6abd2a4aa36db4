"""The table of `why_not_jax.md`: JAX's own attention and ours, over a cache sharded along its keys.

python site/why_not_jax.py      # measures, and writes the table into the page
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import attention, collectives, kv_mesh, memory, simulate_devices, tree_decode

PAGE = Path(__file__).parent / "why_not_jax.md"
BEGIN, END = "<!-- the table -->\n\n", "\n<!-- end -->"
DEVICES = 8
SIZES = 8_192, 65_536  # keys


def functions(cache: NamedSharding) -> dict:
    """`tree_decode` is told how the cache is sharded; XLA partitions the other functions."""
    return {
        "`jax.nn.dot_product_attention`": jax.nn.dot_product_attention,
        "`attention`": attention,
        "`tree_decode`": functools.partial(tree_decode, sharding=cache),
    }


def compiled(f, mesh, keys: int):
    """f of one query with 16 heads of 128, and of `keys` keys with 4 heads, in float32."""
    whole, shards = (NamedSharding(mesh, spec) for spec in (P(), P(None, "kv")))
    q = jax.ShapeDtypeStruct((1, 1, 16, 128), "float32", sharding=whole)
    k = jax.ShapeDtypeStruct((1, keys, 4, 128), "float32", sharding=shards)
    return jax.jit(f).lower(q, k, k).compile()


def measured() -> dict[str, list[int]]:
    """Row -> the number of each function's compiled program: bytes sent and held, collectives."""
    mesh = kv_mesh(jax.devices()[:DEVICES])
    fs = functions(NamedSharding(mesh, P(None, "kv"))).values()
    small, large = ([compiled(f, mesh, n) for f in fs] for n in SIZES)

    def sent(program):
        return sum(c.sent_bytes for c in collectives(program))

    table = {
        "bytes that a device sends": list(map(sent, small)),
        "collectives": [sum(c.count for c in collectives(x)) for x in small],
    }
    for n, programs in zip(SIZES, (small, large), strict=True):
        table[f"temporary bytes, {n:,} keys"] = [memory(x).temporary_bytes for x in programs]
    assert list(map(sent, large)) == table["bytes that a device sends"], "no growth with the cache"
    return table


def answered() -> dict[str, list[str]]:
    """The functions' results with Explicit axes, and for a row without keys."""
    mesh = kv_mesh(jax.devices()[:DEVICES])
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, (AxisType.Explicit,))
    one_device = NamedSharding(kv_mesh(jax.devices()[:1]), P(None, "kv"))
    lengths = ["key_value_seq_lengths", "kv_lengths", "kv_lengths"]
    named = zip(functions(one_device).values(), lengths, strict=True)
    return {
        "a mesh with Explicit axes": [
            takes(f, explicit) for f in functions(NamedSharding(explicit, P(None, "kv"))).values()
        ],
        "output of a row without keys": [of_no_keys(f, name) for f, name in named],
    }


def takes(f, mesh) -> str:
    try:
        compiled(f, mesh, SIZES[0])
    except Exception as error:  # ShardingTypeError is not public in every version of JAX
        return f"`{type(error).__name__}`"
    return "works"


def of_no_keys(f, name: str) -> str:
    """f's output where no key counts; the values are 0 … 7, whose mean is 3.5."""
    q, k = jnp.ones((1, 1, 1, 4), jnp.float32), jnp.ones((1, 8, 1, 4), jnp.float32)
    v = k * jnp.arange(8)[:, None, None].astype(k.dtype)
    out = f(q, k, v, **{name: jnp.zeros(1, jnp.int32)})
    return {0.0: "0", 3.5: "the mean of all values"}[float(out[0, 0, 0, 0])]


def markdown(numbers: dict, words: dict) -> str:
    table = {"": list(functions(None)), **numbers, **words}  # type: ignore[arg-type]
    lines = []
    for name, cells in table.items():
        cells = [f"{x:,}" if isinstance(x, int) else x for x in cells]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join([lines[0], "|---" * (len(cells) + 1) + "|", *lines[1:]]) + "\n"


if __name__ == "__main__":
    simulate_devices(DEVICES)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = markdown(measured(), answered())
    PAGE.write_text(before + BEGIN + table + END + after, encoding="utf-8")
    print(jax.__version__, table, sep="\n")
