"""Operations of a program on a tile, for Triton: products, indices, reads and writes.

The sides of Triton's arrays are powers of two, and its integers need a dtype.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since JAX 0.11.0
    triton = None

SIDE = 16  # the smallest side of a tile that tensor cores take
TILE = 1 << 14  # bytes of a tile of queries, or of keys; all fit in any GPU's shared memory
PROGRAMS = 512  # programs that share the keys, about four for each multiprocessor of an H100
KEYS = 256  # about the fewest keys of a program; the number of programs is rounded up


class Tiling(NamedTuple):
    """How the work is divided.

    rows:   queries of a program; all read one key head
    tiles:  programs for all queries that read one key head
    block:  keys that a program reads at a time
    splits: parts of a head's keys, with a program for each
    """

    rows: int
    tiles: int
    block: int
    splits: int


def tile_of(q, v) -> Tiling:
    """The tiling for queries (b, l, h, d) and values (b, n, h_kv, dv)."""
    b, l, h, d = q.shape
    n, h_kv, dv = v.shape[1:]
    width = max(side(d), side(dv)) * q.dtype.itemsize
    most = max(TILE // width, SIDE)
    queries = l * h // h_kv
    rows = min(side(queries), most)
    tiles = pl.cdiv(queries, rows)
    wanted = pl.cdiv(PROGRAMS, b * h_kv * tiles)
    splits = pl.next_power_of_2(min(wanted, pl.cdiv(n, KEYS)))
    return Tiling(rows, tiles, min(side(n), most), splits)


# Numbers.


def finite(x):
    """±∞ replaced by the largest finite numbers, because ∞ − ∞ of two pivots would be NaN."""
    largest = jnp.finfo(x.dtype).max
    return lax.clamp(-largest, x, largest)


def largest_weight(dtype, keys: int) -> float:
    """The divisor of weights, which are at most 1, before they multiply values of this dtype.

    A divisor of at least the number of keys keeps the sum of values within float32's range. In
    float16 the weights are made larger instead, because float16 has no numbers below 2⁻²⁴, and few
    bits below 2⁻¹⁴.
    """
    return 2.0**-15 if dtype == jnp.float16 else float(pl.next_power_of_2(keys))


def dot(a, b, axis: int):
    """Σ over a's axis 1 and b's `axis`, as in float32, for a of float32 or of b's dtype.

    Tensor cores use only the first bits of a float32. So each float32 factor is written as a sum of
    two numbers with fewer bits. The product of the two smaller numbers is left out. It is at most
    2⁻²⁰ of the whole product, and on average about float32's rounding error. The relative error of
    a weight, for values in bfloat16, is at most 2⁻¹⁵.
    """
    contracted = ((1,), (axis,)), ((), ())
    once = lax.Precision.DEFAULT  # independent of JAX's settings
    products = [
        lax.dot_general(x, y, contracted, once, jnp.float32)
        for i, x in enumerate(split_float(a, b.dtype))
        for j, y in enumerate(split_float(b, b.dtype))
        if i + j < 2
    ]
    return sum(products)


def split_float(x, dtype):
    """One or two numbers of `dtype` whose sum is x; for float32 in TensorFloat-32's precision."""
    if x.dtype != jnp.float32:
        return (x,)
    dropped = 16 if dtype == jnp.bfloat16 else 13  # last bits that the first number lacks
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-1 << dropped)
    high = lax.bitcast_convert_type(bits, x.dtype)
    return high.astype(dtype), (x - high).astype(dtype)


def shrink_tile(q, d: int):
    """(q / f², f) for a tile of queries, (rows, d) and (rows, 1), so that no sum of q·k overflows.

    f² is a power of two, at least 1, and at least d times the largest number of a query. Scores are
    later multiplied by f twice, and clipped. float16 scores cannot overflow, so f is 1.
    """
    if q.dtype == jnp.float16:
        return q, jnp.ones((len(q), 1), jnp.float32)
    wide = q.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)[:, None]
    # Bits 23 … 30 of a float32 are its exponent plus 127. 2^exponent, below, is larger than x.
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 126
    half = (jnp.maximum(exponent + (d - 1).bit_length(), 0) + 1) >> 1
    root = lax.bitcast_convert_type((127 + half) << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((127 - half) << 23, jnp.float32)
    return (wide * inverse * inverse).astype(q.dtype), root


# Places.


def side(n: int) -> int:
    """The side of a tile that holds n."""
    return max(SIDE, pl.next_power_of_2(n))


def indices(n: int):
    """0 … n − 1."""
    return jnp.arange(n, dtype=jnp.int32)


def divide(x, n: int):
    """(quotient, remainder) of non-negative numbers."""
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def ceil(x, n: int):
    """The quotient, rounded up."""
    return lax.div(x + (n - 1), jnp.int32(n))


def grid(*at):
    """Indices of a tile: the last index runs along its columns, the others along its rows."""
    return *(jnp.asarray(i)[:, None] for i in at[:-1]), at[-1][None]


def load(x, at, there):
    """The elements of `x` at these indices; zeros where `there` is False."""
    return triton.load(x.at[at], mask=there, other=jnp.zeros((), x.dtype))


def load_rows(x, at, there, size: int):
    """Rows of `size` elements, padded by zeros to a tile's side; zeros where `there` is False."""
    column = indices(side(size))
    return load(x, grid(*at, column), there[:, None] & (column < size)[None])


def store_state(out, state, place, there):
    """Write the fields of a tile of states to the places of their queries in `out`.

    out: references to (l, h), (l, h) and (l, h, dv); there: whether a row of the tile is a query
    """
    m, denominator, numerator = state
    triton.store(out[0].at[place], m, mask=there)
    triton.store(out[1].at[place], denominator, mask=there)
    dv = out[2].shape[-1]
    column = indices(side(dv))
    is_entry = there[:, None] & (column < dv)[None]
    triton.store(out[2].at[grid(*place, column)], numerator, mask=is_entry)


def keep_nan(m, denominator, numerator):
    """The state to write, in which a NaN stays NaN, and a query without keys has numerator 0.

    Triton compiles max, min and clamp to instructions that drop a NaN: of a number and a NaN they
    return the number. So a pivot ignores a NaN, while the sums are NaN.
    """
    m = jnp.where(denominator != denominator, denominator, m)
    total = jnp.where(numerator != numerator, numerator, finite(numerator))
    # A weight of 0 times a NaN value would be NaN.
    return m, denominator, jnp.where(denominator[:, None] == 0, 0, total)
