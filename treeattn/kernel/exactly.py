"""Attention whose bits depend on the set of keys alone: blocks of keys into an `ExactState`.

Nothing here depends on how many keys are read at a time, in which order, beside which queries and
rows: a score is a sum of whole numbers, products of digits, which float32 adds exactly; weights are
functions of one score; and the sums of weights and of weighted values are whole numbers again. So
they may be matrix products, of any shape, by any library. Shapes are those of
treeattn/kernel/blockwise.py: queries (b, h_kv, group, l, d), scores (b, h_kv, group, l, size).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState, finalize, from_output
from treeattn.kernel.blocks import over_blocks
from treeattn.kernel.blockwise import attend_blockwise, group_heads, hide_future
from treeattn.kernel.digits import (
    LARGEST,
    LEVELS,
    PER_NAT,
    VALUE_DIGITS,
    digits,
    ldexp,
    score_bits,
    times_power,
    to_whole,
    unfused,
    weight_digits,
    weight_of,
)
from treeattn.kernel.exact import MAX_KEYS, ExactState, in_halves, sum_by_level
from treeattn.kernel.inputs import Grouped, Inputs
from treeattn.kernel.masks import block_visibility
from treeattn.kernel.products import EXACT, may_be_partitioned, read_block, row_max

SCORE_DIGITS = 3  # of a query's and a key's entries, relative to their largest
BLOCK = 512  # keys: 512 products of a weight's digit, below 256, and a value's, up to 128, are 2^24
SCORES = 1 << 19  # held at a time, about, and
LEAST = 64  # keys at least


def obstacle(inputs: Inputs) -> str | None:
    """Why these arguments have no exact form, naming the argument; None if they have."""
    if inputs.q.dtype == jnp.float64:
        return "q: implementation 'exact' takes float16, bfloat16 or float32, got float64"
    n, d = inputs.k.shape[1::2]
    if n > MAX_KEYS:
        return f"k: implementation 'exact' takes at most {MAX_KEYS} keys, got {n}"
    if d > 1 << 12:
        return f"q: implementation 'exact' takes a head_dim up to {1 << 12}, got {d}"
    return None


@jax.custom_jvp
def attend_rounded(inputs: Inputs) -> AttentionState:
    """`attend` by "exact": the state (lse, 1, out). Its derivative is that of "blockwise"."""
    return attend_exactly(inputs).rounded()


@attend_rounded.defjvp
def _attend_rounded_jvp(primals, tangents):
    def blockwise(inputs):
        return from_output(*finalize(attend_blockwise(inputs)))

    _, tangent = jax.jvp(blockwise, primals, tangents)
    return attend_rounded(*primals), tangent


@functools.partial(jax.jit, inline=True)
def attend_exactly(inputs: Inputs) -> ExactState:
    """The state of the queries after all keys that they see: (b, l, h) and (b, l, h, dv)."""
    partitioned = may_be_partitioned(*(x for x in inputs.arrays if x is not None))
    inputs = hide_future(inputs)
    b, l, h = inputs.q.shape[:3]
    dv = inputs.v.shape[-1]
    if inputs.q.size == 0 or inputs.k.shape[1] == 0:
        return _varying(ExactState.identity((b, l, h), dv), inputs.arrays)
    scale = jnp.float32(inputs.scale * PER_NAT)
    if inputs.factor is not None:
        scale = unfused(inputs.factor.astype(jnp.float32) * scale)
    grouped = group_heads(inputs.replace(scale=1.0, factor=None), partitioned)
    alike = inputs.lengths is None and inputs.intervals is None
    if alike or b == 1 or not grouped.by_row:
        state = _attend_rows(grouped, scale, 0)
    else:
        rows = lax.map(
            functools.partial(_attend_row, grouped, scale), jnp.arange(b, dtype=jnp.int32)
        )
        state = _map_fields(rows, lambda x, at: jnp.squeeze(jnp.moveaxis(x, 0, at), at + 1))

    def ungroup(x, at: int):  # (..., b, h_kv, group, l, ...) -> (..., b, l, h, ...)
        x = jnp.moveaxis(x, at + 3, at + 1)
        return x.reshape(*x.shape[: at + 2], h, *x.shape[at + 4 :])

    return _map_fields(state, ungroup)


def _map_fields(state: ExactState, f) -> ExactState:
    """f(x, the position of its first axis of queries) of every field."""
    at = ExactState(0, 0, 2, 2, 0)
    return jax.tree.map(f, state, at)


def _attend_row(inputs: Grouped, scale, i) -> ExactState:
    """The state of row i of the queries, (1, h_kv, group, l)."""

    def cut(x):
        return x if x is None or len(x) == 1 else lax.dynamic_slice_in_dim(x, i, 1)

    arrays = {name: cut(getattr(inputs, name)) for name in ("q", "mask", "bias", "lengths")}
    intervals = inputs.intervals and inputs.intervals.replace(ends=cut(inputs.intervals.ends))
    return _attend_rows(inputs.replace(intervals=intervals, **arrays), scale, i)


def _attend_rows(inputs: Grouped, scale, row) -> ExactState:
    """The state of the queries, (b, h_kv, group, l); their keys begin with row `row` of k and v."""
    q = inputs.q
    n, d = inputs.k.shape[1::2]
    most = min(max(SCORES // (q.size // d), LEAST), BLOCK)
    size = -(-n // -(-n // most))
    bits = score_bits(d)
    value_digits = VALUE_DIGITS if inputs.v.dtype == jnp.float32 else VALUE_DIGITS - 1
    whole, exponent, number = to_whole(q, bits, inputs.partitioned)
    queries = digits(whole, 2, SCORE_DIGITS, bits), exponent[..., None], number[..., None]
    read = functools.partial(read_block, row=row, rows=len(q), size=size, dtype=q.dtype)

    def add_block(state, start):
        first, visible, bias = block_visibility(inputs, start, size)
        tau = _scores(queries, read(inputs.k, first), scale, bits, inputs.partitioned)
        if bias is not None:
            bias = jnp.clip(bias, -LARGEST / PER_NAT, LARGEST / PER_NAT)
            tau = jnp.clip(tau + unfused(bias * np.float32(PER_NAT)), -LARGEST, LARGEST)
        visible = True if visible is None else visible
        block = _sums(tau, read(inputs.v, first), visible, value_digits, inputs.partitioned)
        return state.merge(block)

    state = ExactState.identity(q.shape[:-1], inputs.v.shape[-1])
    return over_blocks(add_block, _varying(state, inputs.arrays), size, inputs)


def _scores(queries, k, scale, bits: int, partitioned: bool):
    """τ = scale · q·k, (b, h_kv, group, l, size), NaN where an entry is no number."""
    query_digits, exponent, number = queries
    b, h_kv, _, group, l, d = query_digits.shape
    k, key_exponent, key_number = to_whole(jnp.moveaxis(k, 1, 2), bits, partitioned)
    key_digits = digits(k, 2, SCORE_DIGITS, bits)
    rows = query_digits.reshape(b, h_kv, -1, d)
    if rows.shape[2] < key_digits.shape[3]:  # XLA:CPU transposes the second factor
        dots = lax.dot_general(key_digits, rows, (((4,), (3,)), ((0, 1), (0, 1))), EXACT)
        dots = jnp.moveaxis(dots, -1, 2)
    else:
        dots = jnp.einsum("bkrd,bkjnd->bkrjn", rows, key_digits, precision=EXACT)
    dots = dots.astype(jnp.int32).reshape(b, h_kv, SCORE_DIGITS, group, l, SCORE_DIGITS, -1)
    s = 0
    for level in range(SCORE_DIGITS - 1, -1, -1):
        terms = [dots[:, :, i, :, :, level - i] for i in range(level + 1)]
        whole = sum(terms[1:], terms[0]).astype(jnp.float32)
        s = s * np.float32(2.0**-bits) + whole  # the product is exact
    tau = ldexp(s * scale, exponent + key_exponent[:, :, None, None])
    number &= key_number[:, :, None, None]
    return jnp.where(number, jnp.clip(tau, -LARGEST, LARGEST), jnp.nan)


def _sums(tau, v, visible, value_digits: int, partitioned: bool) -> ExactState:
    """The state of a block of keys: τ (b, h_kv, group, l, size), values (b, size, h_kv, dv)."""
    b, h_kv, group, l, size = tau.shape
    largest = jnp.finfo(v.dtype).max
    v = lax.clamp(-largest, jnp.moveaxis(v, 1, 2), largest)
    v, exponent, number = to_whole(v, 8, partitioned)
    invalid = jnp.any(visible & ~(number[:, :, None, None] & (tau == tau)), axis=-1)
    tau = jnp.where(visible, tau, -jnp.inf)
    # Written down once, in a branch: otherwise XLA:CPU computes a weight again for each digit.
    seen = jnp.any(tau > -jnp.inf)
    cut = functools.partial(digits, axis=3, count=value_digits, bits=8)
    zeros = jnp.zeros((b, h_kv, size, value_digits, v.shape[-1]), v.dtype)
    values = lax.cond(seen, cut, lambda v: varying_like(zeros, v), v)
    weigh = functools.partial(_weigh, partitioned=partitioned)
    first, below, weight, first_offset, offset, weighted = lax.cond(
        seen, weigh, _weigh_nothing, tau, exponent
    )
    rows = weight_digits(offset, weighted, 2).reshape(b, h_kv, -1, size)
    sums = jnp.einsum("bkrn,bknjd->bkrjd", rows, values, precision=EXACT)
    sums = sums.reshape(b, h_kv, LEVELS, group, l, value_digits, -1)
    return ExactState(
        first[..., 0],
        first_offset[..., 0],
        in_halves(jnp.sum(weight_digits(below, weight, 0), axis=-1)),
        sum_by_level(jnp.moveaxis(sums, (2, 5), (0, 1))),
        invalid,
    )


def _weigh(tau, exponent, partitioned: bool):
    """(index, below, weight, offset, under, weighted) of a block, as an `ExactState` counts.

    The weights, weight · 256^(index + below), and those of values, weighted · 256^(index + offset
    + under), whose keys' exponent (b, h_kv, size) is part of them; index, offset (..., 1).
    """
    index, weight = weight_of(tau)
    first = row_max(index, partitioned)[..., None]
    below = jnp.where(index == first, 0, index - first)
    offset, weighted = times_power(below, weight, exponent[:, :, None, None])
    offset = jnp.where(weight > 0, offset, -jnp.inf)
    first_offset = row_max(offset, partitioned)[..., None]
    under = jnp.where(offset == first_offset, 0, offset - first_offset)
    return first, below, weight, first_offset, under, weighted


def _weigh_nothing(tau, exponent):
    """What `_weigh` gives where nobody sees a key."""
    nowhere = jnp.full((*tau.shape[:-1], 1), -jnp.inf, tau.dtype)
    zero = jnp.zeros(tau.shape, tau.dtype)
    return varying_like((nowhere, zero, zero, nowhere, zero, zero), tau, exponent)


def _varying(state: ExactState, arrays) -> ExactState:
    """The state as a loop's first carry, as `varying_like` has it, integers as well."""
    zero = varying_like(jnp.float32(0), *arrays)
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), state)
