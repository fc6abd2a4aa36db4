"""The second kernel by Mosaic: the states of all splits of the keys become one.

A program takes a few queries of a tile and a part of their values, which its warpgroups share by
splits: each adds up its own, and the first one adds those of the others and writes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.state import finite
from treeattn.kernel.mosaic_tiles import (
    columns,
    interpreted,
    load,
    plgpu,
    repeat,
    store,
)
from treeattn.kernel.tiles import divide

WIDTH = 64  # entries of values that a program takes: 16 for each of a warpgroup's four warps
QUERIES = 8  # that it takes
WARPGROUPS = 4  # at most


def merge_splits(states, shape, *, interpret: bool, output_dtype=None) -> tuple:
    """The merge of what programs wrote, a power of two of splits.

    states: (splits, b, h_kv, tiles, rows) twice, (splits, b, h_kv, tiles, dv, rows), dv padded
    shape:  (b, l, h, dv) of the queries and their values

    Returns fields (b, l, h), (b, l, h) and (b, l, h, dv), or with output_dtype the output of that
    state alone, (b, l, h, dv).
    """
    b, l, h, dv = shape
    splits, _, h_kv, tiles, padded, count = states[2].shape
    warpgroups = min(WARPGROUPS, splits)
    outputs = [jax.ShapeDtypeStruct((b, l, h, padded), output_dtype or jnp.float32)]
    if output_dtype is None:
        outputs += 2 * [jax.ShapeDtypeStruct((b, l, h), jnp.float32)]
    scratch = {"numbers": plgpu.SMEM((2, QUERIES), jnp.float32)}
    if warpgroups > 1:
        scratch["sums"] = plgpu.SMEM((warpgroups - 1, WIDTH, QUERIES), jnp.float32)
        scratch["sums_there"] = plgpu.Barrier(num_arrivals=warpgroups - 1)
    call = plgpu.kernel(
        functools.partial(_program, warpgroups=warpgroups),
        out_type=outputs,
        scratch_types=scratch,
        grid=(padded // WIDTH * (count // QUERIES), h_kv * tiles, b),
        grid_names=("part", "head", "text"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="treeattn_mosaic_merge_splits",
        **interpreted(interpret),
    )
    total, *others = call(*states)
    return *others, total[..., :dv]


def _program(m, d, n, total, *others, warpgroups: int, numbers=None, sums=None, sums_there=None):
    """One program: a part of the state, or of the output, of a few queries.

    References to the splits' m, d and n, as in `merge_splits`; total (b, l, h, dv), numerators or
    outputs; others: m and d, (b, l, h), or nothing.
    """
    splits, _, h_kv, tiles, _, count = n.shape
    _, l, h, _ = total.shape
    group = h // h_kv
    text = lax.axis_index("text")
    mine = lax.axis_index("warpgroup")
    head, tile = divide(lax.axis_index("head"), tiles)
    part, few = divide(lax.axis_index("part"), count // QUERIES)
    values = pl.ds(part * WIDTH, WIDTH)
    queries = pl.ds(few * QUERIES, QUERIES)
    first = tile * count + few * QUERIES

    def of(x, split):
        return load(x.at[split, text, head, tile, queries])

    def weight(split):
        return jnp.exp(finite(of(m, split)) - finite(pivot))

    def add_values(i, so_far):
        split = i * warpgroups + mine
        here = n.at[split, text, head, tile, values, queries]
        # Sums divided by their number stay in float32's range.
        some = load(here, plgpu.Layout.WGMMA) * (1 / splits)
        return so_far + some * columns(weight(split), some)

    none = jnp.full(QUERIES, -jnp.inf, jnp.float32)
    pivot = repeat(splits, lambda i, x: jnp.maximum(x, of(m, i)), none)
    zeros = jnp.zeros((WIDTH, QUERIES), jnp.float32)
    numerator = repeat(splits // warpgroups, add_values, zeros)

    def write():
        result = numerator
        for i in range(warpgroups - 1):
            result += plgpu.load(sums.at[i], layout=plgpu.Layout.WGMMA)
        denominator = repeat(splits, lambda i, x: x + of(d, i) * weight(i), jnp.zeros_like(pivot))
        result = finite(result * splits)
        seen = columns(denominator, result) != 0  # a weight of 0 times a value that is NaN is NaN
        if others:
            result = jnp.where(seen, result, jnp.zeros_like(result))
        else:  # all weights are at most 1: a denominator is within range
            divisor = jnp.where(denominator == 0, jnp.ones_like(denominator), denominator)
            result = jnp.where(seen, result / columns(divisor, result), jnp.zeros_like(result))
        column = plgpu.broadcasted_iota(jnp.int32, result.shape, 1)
        for i in range(QUERIES):
            one = jnp.sum(jnp.where(column == i, result, jnp.zeros_like(result)), axis=1)
            write_values(i, one)
        if others:
            write_numbers(pivot, denominator)

    def place(i):
        """(where the result of one of these queries belongs, whether it is there at all)."""
        query, member = divide(first + i, group)
        return (text, jnp.minimum(query, l - 1), head * group + member), query < l

    def write_values(i, x):
        here, there = place(i)
        pl.when(there)(lambda: store(total.at[*here, values], x.astype(total.dtype)))

    def write_numbers(*fields):
        for i, x in enumerate(fields):
            numbers[i, :] = x
        plgpu.commit_smem()
        for i in range(QUERIES):
            here, there = place(i)

            @pl.when(there & (part == 0))
            def _(here=here, i=i):
                for j, target in enumerate(others):
                    target[*here] = numbers[j, i]

    if warpgroups == 1:
        write()
        return

    def pass_on():
        sums[mine - 1] = numerator
        plgpu.barrier_arrive(sums_there)

    def wait_and_write():
        plgpu.barrier_wait(sums_there)
        write()

    pl.when(mine > 0)(pass_on)
    pl.when(mine == 0)(wait_and_write)
