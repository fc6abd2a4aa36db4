"""The second kernel, which merges the states of all splits of the keys.

XLA would compile a tree of merges to three or four kernels, which take longer to start than to run.
In this kernel a program takes one query. It reads the pivots of the query's splits, then their
sums, and writes one state.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from labs.kernels.tiles import (
    divide,
    finite,
    indices,
    keep_nan,
    load,
    load_rows,
    side,
    store_state,
    triton,
)

READ = 1 << 12  # numbers that a program reads at a time


def merge_splits(states, interpret: bool) -> tuple:
    """Merges states with fields (splits, b, l, h), …, (splits, b, l, h, dv). splits: a power of 2.

    Returns fields (b, l, h), (b, l, h) and (b, l, h, dv). A single split is returned as it is.
    """
    splits, b, l, h, dv = states[2].shape
    if splits == 1:
        return tuple(x[0] for x in states)

    def spec(x):
        rest = [0] * (x.ndim - 2)
        return pl.BlockSpec((splits, None, *x.shape[2:]), lambda _, i: (0, i, *rest))

    def result(*shape):
        rest = [0] * len(shape)
        return pl.BlockSpec((None, *shape), lambda _, i: (i, *rest))

    call = pl.pallas_call(
        functools.partial(_kernel, splits=splits),
        grid=(l * h, b),
        in_specs=list(map(spec, states)),
        out_specs=[result(l, h), result(l, h), result(l, h, dv)],
        out_shape=[jax.ShapeDtypeStruct(x.shape[1:], jnp.float32) for x in states],
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="treeattn_merge_splits",
    )
    return tuple(call(*states))


def _kernel(m, d, n, *out, splits: int):
    """One program: the state of one query of one head.

    References to the splits' m and d (splits, l, h) and n (splits, l, h, dv). out: references to
    the merged state's fields, (l, h), (l, h) and (l, h, dv).
    """
    _, _, h, dv = n.shape
    query, head = divide(pl.program_id(0), h)

    def place(i):  # the indices of this query's states in the splits i
        return i, jnp.zeros_like(i) + query, jnp.zeros_like(i) + head

    def weights(i):
        return jnp.exp(finite(load(m, place(i), i < splits)) - finite(pivot))

    every = indices(splits)
    pivot = jnp.max(load(m, place(every), every < splits))
    denominator = jnp.sum(load(d, place(every), every < splits) * weights(every))
    size = min(splits, READ // side(dv))

    # The sums are divided by the number of splits, so their total stays in float32's range.
    def add_some(step, total):
        i = step * size + indices(size)
        sums = load_rows(n, place(i), i < splits, dv) / splits
        return total + jnp.sum(sums * weights(i)[:, None], axis=0)

    total = jnp.zeros(side(dv), jnp.float32)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(splits // size), add_some, total)
    one = indices(1)
    state = keep_nan(jnp.full(1, pivot), jnp.full(1, denominator), total[None] * splits)
    store_state(out, state, (one + query, one + head), one == 0)
