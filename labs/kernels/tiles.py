"""What a program does with a tile, in Triton's terms: products, indices, reads and writes.

Triton knows no arrays of other sides than powers of two, and no integers but those of a dtype.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since JAX 0.11.0
    triton = None

SIDE = 16  # of a tile, at least: what tensor cores take
TILE = 1 << 14  # bytes of queries, and of keys: so all fits in the shared memory of any GPU
PROGRAMS = 512  # that the keys are split over, about: four for each multiprocessor of an H100
KEYS = 256  # for each of them, at least


class Tiling(NamedTuple):
    """How the work is divided.

    rows:   queries a program takes, of those that read one key head
    tiles:  programs that these queries need
    block:  keys a program reads at a time
    splits: parts of a head's keys, a program for each
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
    """±∞ as the largest finite numbers: an infinite pivot is a sign, not one to compute with."""
    largest = jnp.finfo(x.dtype).max
    return lax.clamp(-largest, x, largest)


def largest_weight(dtype, keys: int) -> float:
    """What weights, at most 1, are divided by before they multiply values of that dtype.

    By at least their number, the sum of values keeps within float32's range. float16 has no
    numbers below 2⁻²⁴, and few bits below 2⁻¹⁴: there weights are made larger.
    """
    return 2.0**-15 if dtype == jnp.float16 else float(pl.next_power_of_2(keys))


def dot(a, b, axis: int):
    """Σ over a's axis 1 and b's `axis`, as in float32, for a of float32 or of b's dtype.

    Tensor cores multiply no float32, but its first bits only. So a factor is a sum of two that they
    do multiply, and the product of the two smaller ones is left out: at most 2⁻²⁰ of the whole one,
    on average of the order of what float32 rounds. A weight, for values in bfloat16, is off by
    2⁻¹⁵ at most.
    """
    contracted = ((1,), (axis,)), ((), ())
    once = lax.Precision.DEFAULT  # whatever JAX is set to
    products = [
        lax.dot_general(x, y, contracted, once, jnp.float32)
        for i, x in enumerate(split_float(a, b.dtype))
        for j, y in enumerate(split_float(b, b.dtype))
        if i + j < 2
    ]
    return sum(products)


def split_float(x, dtype):
    """Numbers of `dtype`, for float32 of TensorFloat-32's precision, that add up to x."""
    if x.dtype != jnp.float32:
        return (x,)
    dropped = 16 if dtype == jnp.bfloat16 else 13  # bits of x that the first number does without
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-1 << dropped)
    high = lax.bitcast_convert_type(bits, x.dtype)
    return high.astype(dtype), (x - high).astype(dtype)


def shrink_tile(q, d: int):
    """(q / f², f) of a tile of queries (rows, d) and (rows, 1): no sum of q·k overflows.

    f² is a power of two, at least d times the largest number of a query, and 1. Scores are then
    multiplied by f twice, and the largest clipped. float16 needs none of it.
    """
    if q.dtype == jnp.float16:
        return q, jnp.ones((len(q), 1), jnp.float32)
    wide = q.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)[:, None]
    # Of a float32, bits 23 … 30 are its power of two and 127: 2^−126 times that is beyond it.
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
    """Indices of a tile: the last one's axis becomes its columns, the others' its rows."""
    return *(jnp.asarray(i)[:, None] for i in at[:-1]), at[-1][None]


def load(x, at, there):
    """The elements of `x` at these indices; zeros if not `there`."""
    return triton.load(x.at[at], mask=there, other=jnp.zeros((), x.dtype))


def load_rows(x, at, there, size: int):
    """Rows of `size` elements, with zeros up to the side of a tile; zeros if not `there`."""
    column = indices(side(size))
    return load(x, grid(*at, column), there[:, None] & (column < size)[None])


def store_state(out, state, place, there):
    """Write the fields of a tile of states where their queries have their places in `out`.

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
    """The state to write: a NaN stays one, and a query without keys has seen none of the values.

    Triton makes instructions of max, min and clamp that drop a NaN: of a number and a NaN they give
    the number. So a pivot is that of the other scores, or splits, while the sums are NaN.
    """
    m = jnp.where(denominator != denominator, denominator, m)
    total = jnp.where(numerator != numerator, numerator, finite(numerator))
    # A weight of 0 times a value that is NaN is NaN.
    return m, denominator, jnp.where(denominator[:, None] == 0, 0, total)
