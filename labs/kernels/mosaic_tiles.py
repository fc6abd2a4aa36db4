"""What a program does with a tile, in Mosaic's terms: products, reads and writes, and its queries.

The factors of a product are numbers of 16 bits: float16, or bfloat16, of which three add up to a
float32. Sums are in float32.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.kernel.tiles import divide, roots_of

plgpu: Any
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    plgpu = None

CHUNK = 64  # of a head_dim, that is in registers at a time
AT_ONCE = 8  # steps of a loop whose reads need not wait for each other


def interpreted(whether: bool) -> dict[str, Any]:
    """What has a kernel interpreted, with races looked for."""
    return {"interpret": plgpu.InterpretGPUParams(detect_races=True)} if whether else {}


def factor_dtype(dtype):
    """The dtype of the factors that numbers of `dtype` are, or are sums of."""
    return jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)


def chunks(d: int):
    """The parts of a head_dim, as indices of references."""
    return [pl.ds(i, min(CHUNK, d - i)) for i in range(0, d, CHUNK)]


def load(x, layout=None):
    """An array that lies in global memory, each thread its own elements."""
    return plgpu.load(x, layout=layout, optimized=False)


def store(target, x) -> None:
    """The same the other way: since JAX 0.12 that is to be said."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, x, optimized=False)
    else:
        target[...] = x


def load_rows(x, factor):
    """A first factor in shared memory, as 128 threads hold one that is multiplied."""
    return plgpu.load(x, layout=plgpu.Layout.MMA_LHS(factor))


# Which thread holds which numbers of an array Mosaic finds out by trial, and of a program with two
# loops not in time. So it is said of all that others follow from: of sums, and of factors.


def sums_of(x):
    """An array as threads hold the sums of products; of one axis, as its columns are held."""
    layout = plgpu.Layout.WGMMA
    return plgpu.layout_cast(x, layout.reduce(0) if x.ndim == 1 else layout)


def load_columns(x):
    """A second factor in shared memory, as they hold one that is multiplied."""
    return plgpu.load(x, layout=plgpu.Layout.MMA_RHS(x.dtype))


def load_along(x, factor, axis: int):
    """Numbers in global memory along an axis of a first factor, as it is held: of its shape."""
    layout = plgpu.Layout.MMA_LHS(factor_dtype(factor.dtype))
    numbers = load(x, layout.reduce(1 - axis))
    return lax.broadcast_in_dim(numbers, factor.shape, [axis])


def columns(x, like):
    """A number for each column of `like`."""
    return sums_of(lax.broadcast_in_dim(x, like.shape, [1]))


def rows(x, like):
    """A number for each row of `like`."""
    return sums_of(lax.broadcast_in_dim(x, like.shape, [0]))


def repeat(count: int, step, state):
    """step(i, state) for i = 0 … count − 1, a power of two of them."""
    size = min(count, AT_ONCE)

    def some(i, state):
        for j in range(size):
            state = step(i * size + j, state)
        return state

    if count == size:
        return some(jnp.int32(0), state)
    return lax.fori_loop(jnp.int32(0), jnp.int32(count // size), some, state)


def product(sums, a, b, *, interpret: bool):
    """sums + a · b, of matrices that are sums of `a` and of `b`, their largest parts first.

    Left out are the products that a float32 would not hold: of the second part and the third, say.
    """
    count = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < count]
    for i, j in sorted(pairs, key=sum, reverse=True):
        if interpret:
            sums += lax.dot(a[i], b[j], preferred_element_type=jnp.float32)
        else:
            sums = plgpu.mma(sums, a[i], b[j])
    return sums


def parts_of(x, dtype, count: int) -> list:
    """So many numbers of a dtype of 16 bits that add up to x, but for what is beyond them.

    x is of that dtype, and its only part, or of float32. Each part but the last has the first bits
    that are left: rounded, the largest float32 would be an infinite bfloat16.
    """
    if x.dtype == dtype:
        return [x]
    found = []
    dropped = 16 if dtype == jnp.bfloat16 else 13
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-1 << dropped)
        high = lax.bitcast_convert_type(bits, x.dtype)
        found.append(high.astype(dtype))
        x = x - high
    return [*found, x.astype(dtype)]


def write_rows(source, tile, first) -> None:
    """Write a few rows to the first ones of a tile, and zeros to the others.

    source: reference to (few, columns) in global memory, of which the tile's begin at `first`
    tile:   reference to (rows, width) in shared memory
    """
    for chunk in chunks(tile.shape[1]):
        here = pl.ds(first + chunk.start, chunk.size)
        x = sums_of(jnp.zeros((tile.shape[0], chunk.size), jnp.float32))
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0)
        for i in range(source.shape[0]):
            one = load(source.at[i, here], plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)
            x = jnp.where(row == i, columns(one, x), x)
        tile[:, chunk] = x.astype(tile.dtype)


def write_queries(q, tile, first, head, group: int):
    """Write a tile of queries, divided by f², as factors of a product; returns f, (rows,).

    q:     reference to (l, h, d), all queries of a text
    tile:  reference to (parts, d, rows) in shared memory
    first: number of the tile's first, of the queries of `group` heads that read this key head
    f:     as treeattn.kernel.products.shrink has it
    """
    l, _, d = q.shape
    count = tile.shape[2]

    def read(chunk):
        column = plgpu.broadcasted_iota(jnp.int32, (chunk.size, count), 1)

        def add(i, x):
            query, member = divide(first + i, group)
            query = jnp.minimum(query, l - 1)  # past the last one is padding
            one = load(q.at[query, head * group + member, chunk], plgpu.Layout.WGMMA.reduce(1))
            return jnp.where(column == i, rows(one.astype(jnp.float32), x), x)

        return repeat(count, add, sums_of(jnp.zeros(column.shape, jnp.float32)))

    wide = [read(chunk) for chunk in chunks(d)]
    root = sums_of(jnp.ones(count, jnp.float32))
    if q.dtype != jnp.float16:  # its products are all within float32's range
        largest = jnp.zeros_like(root)
        for x in wide:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=0))
        root, inverse = roots_of(largest, d)
        wide = [x * columns(inverse, x) * columns(inverse, x) for x in wide]
    for chunk, x in zip(chunks(d), wide, strict=True):
        for j, part in enumerate(parts_of(x.astype(q.dtype), tile.dtype, len(tile))):
            tile[j, chunk, :] = part
    return root
