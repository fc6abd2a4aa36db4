"""The second kernel: the states of all splits of the keys become one.

As XLA compiles it, a tree of merges is three or four kernels, which start for longer than they run.
Here a program takes one query: it reads the pivots of its splits, then their sums, and writes a
state.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.state import AttentionState, finalize, finite
from treeattn.kernel.tiles import (
    divide,
    indices,
    load,
    load_rows,
    side,
    store_rows,
    store_state,
    triton,
    untyped_array,
)

READ = 1 << 12  # numbers that a program reads at a time


def merge_splits(states, interpret: bool, output_dtype=None) -> tuple:
    """The merge of states (splits, b, l, h), …, (splits, b, l, h, dv), a power of two of them.

    Returns fields (b, l, h), (b, l, h) and (b, l, h, dv), or with output_dtype the output of that
    state alone, (b, l, h, dv). Of a single split nothing is to be merged.
    """
    splits, b, l, h, dv = states[2].shape
    if splits == 1:
        state = AttentionState(*(x[0] for x in states))
        return state if output_dtype is None else (finalize(state)[0].astype(output_dtype),)

    def spec(x):
        rest = [0] * (x.ndim - 2)
        return pl.BlockSpec((splits, None, *x.shape[2:]), lambda _, i: (0, i, *rest))

    def result(*shape, dtype="float32"):
        rest = [0] * len(shape)
        spec = pl.BlockSpec((None, *shape), lambda _, i: (i, *rest))
        return spec, untyped_array(dtype, b, *shape)

    results = [result(l, h), result(l, h), result(l, h, dv)]
    if output_dtype is not None:
        results = [result(l, h, dv, dtype=output_dtype)]
    out_specs, out_shape = zip(*results, strict=True)
    call = pl.pallas_call(
        functools.partial(_kernel, splits=splits),
        grid=(l * h, b),
        in_specs=list(map(spec, states)),
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="treeattn_merge_splits",
    )
    return call(*states)


def _kernel(m, d, n, *out, splits: int):
    """One program: the state of one query of one head.

    References to the splits' m and d (splits, l, h) and n (splits, l, h, dv). out: the state's
    fields, (l, h), (l, h) and (l, h, dv); or its output, (l, h, dv).
    """
    _, _, h, dv = n.shape
    query, head = divide(pl.program_id(0), h)

    def place(i):  # of splits
        return i, jnp.zeros_like(i) + query, jnp.zeros_like(i) + head

    def weights(i):
        return jnp.exp(finite(load(m, place(i), i < splits)) - finite(pivot))

    every = indices(splits)
    pivot = jnp.max(load(m, place(every), every < splits))
    denominator = jnp.sum(load(d, place(every), every < splits) * weights(every))
    size = min(splits, READ // side(dv))

    # Sums divided by their number stay in float32's range.
    def add_some(step, total):
        i = step * size + indices(size)
        sums = load_rows(n, place(i), i < splits, dv) / splits
        return total + jnp.sum(sums * weights(i)[:, None], axis=0)

    total = jnp.zeros(side(dv), jnp.float32)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(splits // size), add_some, total)
    one = indices(1)
    place_of_one = one + query, one + head
    state = keep_nan(jnp.full(1, pivot), jnp.full(1, denominator), total[None] * splits)
    if len(out) > 1:
        store_state(out, state, place_of_one, one == 0)
        return
    _, denominator, numerator = state
    # Without keys both are 0. All weights are at most 1: a denominator is within range.
    output = numerator / jnp.where(denominator == 0, 1, denominator)[:, None]
    store_rows(out[0], output.astype(out[0].dtype), place_of_one, one == 0)


# Triton makes instructions of max, min and clamp that drop a NaN: of a number and a NaN they give
# the number. So a pivot is that of the other scores, or splits, while the sums are NaN.


def keep_nan(m, denominator, numerator):
    """The state to write: a NaN stays one, and a query without keys has seen none of the values."""
    m = jnp.where(denominator != denominator, denominator, m)
    total = jnp.where(numerator != numerator, numerator, finite(numerator))
    # A weight of 0 times a value that is NaN is NaN.
    return m, denominator, jnp.where(denominator[:, None] == 0, 0, total)
