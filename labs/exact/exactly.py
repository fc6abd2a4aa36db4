"""Attention whose bits depend on the set of keys alone: blocks of keys into an `ExactState`.

Nothing here depends on how many keys are read at a time, in which order, beside which queries and
rows: a score is a sum of whole numbers, products of digits, which float32 adds exactly; weights are
functions of one score; and the sums of weights and of weighted values are whole numbers again. So
they may be matrix products, of any shape, by any library. Shapes are those of
treeattn/kernel/blockwise.py: queries (b, h_kv, group, l, d), scores (b, h_kv, group, l, size).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState, finalize, finite, from_output
from treeattn.kernel.blocks import over_blocks
from treeattn.kernel.blockwise import attend_blockwise, group_heads, hide_future
from treeattn.kernel.digit_products import SCORE_DIGITS, scores_of, weighted_sums
from treeattn.kernel.digits import (
    LARGEST,
    LEVELS,
    PER_NAT,
    VALUE_DIGITS,
    digit,
    level_digits,
    place_word,
    power_of,
    score_bits,
    to_whole,
    unfused,
    value_digits,
    word_of,
)
from treeattn.kernel.exact import LEAST_OFFSET, MAX_KEYS, ExactState
from treeattn.kernel.inputs import Grouped, Inputs
from treeattn.kernel.masks import block_visibility
from treeattn.kernel.products import may_be_partitioned, read_block, row_max

BLOCK = 512  # keys: 512 products of a weight's digit, below 256, and a value's, up to 128, are 2^24
SCORES = 1 << 20  # held at a time, about, and
LEAST = 128  # keys at least


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
    count = VALUE_DIGITS if inputs.v.dtype == jnp.float32 else VALUE_DIGITS - 1
    whole, exponent, number = to_whole(q, bits, inputs.partitioned)
    levels = jnp.stack([digit(whole, i, bits) for i in range(SCORE_DIGITS)], axis=2)
    queries = levels, exponent[..., None], number[..., None]
    read = functools.partial(read_block, row=row, rows=len(q), size=size, dtype=q.dtype)

    def add_block(state, start):
        first, visible, bias = block_visibility(inputs, start, size)
        tau = scores_of(queries, read(inputs.k, first), scale, bits, inputs.partitioned)
        if bias is not None:
            bias = jnp.clip(bias, -LARGEST / PER_NAT, LARGEST / PER_NAT)
            tau = jnp.clip(tau + unfused(bias * np.float32(PER_NAT)), -LARGEST, LARGEST)
        visible = True if visible is None else visible
        v = read(inputs.v, first)
        return _add_block(state, tau, v, count, visible, inputs.partitioned)

    state = _Sums.none(q.shape[:-1], inputs.v.shape[-1])
    return over_blocks(add_block, _varying(state, inputs.arrays), size, inputs).state()


class _Sums(NamedTuple):
    """An `ExactState` in parts that XLA:CPU need not put together in every block.

    index, offset: (...,) where the weights' digits begin, and how far above it weighted values'
    denominator, numerator: LEVELS of (...,), and of (..., dv): the sums, in pairs (high, low)
    invalid: (...,)
    """

    index: Any
    offset: Any
    denominator: Any
    numerator: Any
    invalid: Any

    @staticmethod
    def none(shape: tuple[int, ...], value_dim: int) -> "_Sums":
        nowhere = jnp.full(shape, -jnp.inf, jnp.float32)
        denominator = [(jnp.zeros(shape, jnp.int32),) * 2] * LEVELS
        numerator = [(jnp.zeros((*shape, value_dim), jnp.int32),) * 2] * LEVELS
        return _Sums(nowhere, nowhere, denominator, numerator, jnp.zeros(shape, bool))

    def state(self) -> ExactState:
        denominator, numerator = (
            jnp.stack([jnp.stack(pair) for pair in x]) for x in (self.denominator, self.numerator)
        )
        return ExactState(self.index, self.offset, denominator, numerator, self.invalid)


def _add_block(sums: _Sums, tau, v, count: int, visible, partitioned: bool) -> _Sums:
    """The sums with a block of keys: τ (b, h_kv, group, l, size), values (b, size, h_kv, dv).

    count: how many digits of a value count
    """
    largest = jnp.finfo(v.dtype).max
    v = lax.clamp(-largest, jnp.moveaxis(v, 1, 2), largest)
    v, exponent, number = to_whole(v, 8 * count, partitioned)
    invalid = jnp.any(visible & ~(number[:, :, None, None] & (tau == tau)), axis=-1)
    tau = jnp.where(visible & (tau == tau), tau, -jnp.inf)
    exponent = exponent[:, :, None, None] + 8 * (count - 1)  # that of the first digit
    index = jnp.maximum(sums.index, row_max(power_of(tau)[0], partitioned))
    down = jnp.where(index == sums.index, 0, index - sums.index)
    first = finite(index)[..., None]
    seen = jnp.any(tau > -jnp.inf)
    weights = _digits_from(tau, first, None, 0, seen)
    own = sums.offset - down
    offset = jnp.maximum(own, row_max(_offset(tau, first, exponent), partitioned))
    none = offset < LEAST_OFFSET
    moved = jnp.where(none, jnp.inf, offset - own)
    begin = jnp.where(none, jnp.inf, offset)[..., None]  # so that all digits are 0
    weighted = _digits_from(tau, first, exponent, begin, seen)
    weights = [jnp.sum(x, axis=-1, dtype=jnp.int32) for x in weights]
    weighted = weighted_sums(weighted, value_digits(v, count))
    return _Sums(
        index,
        jnp.where(none, -jnp.inf, offset),
        _add(sums.denominator, down, weights),
        _add(sums.numerator, moved[..., None], weighted),
        sums.invalid | invalid,
    )


def _add(sums, down, more):
    """LEVELS of sums in pairs, so many levels lower, and `more`, LEVELS of int32."""
    added = []
    for level, x in enumerate(more):
        high, low = sums[level]
        for step in range(1, level + 2):
            above = sums[level - step] if step <= level else (0, 0)
            high = jnp.where(down >= step, above[0], high)
            low = jnp.where(down >= step, above[1], low)
        low = low + x
        added.append((high + (low >> 16), low & 0xFFFF))
    return added


def _offset(tau, first, exponent):
    """How many levels above `first` the digits of 256^tau · 2^exponent begin; float32, or −∞."""
    index, eighths, _ = power_of(tau)
    below = jnp.where(index == first, 0, index - first)
    return below if exponent is None else below + ((eighths.astype(jnp.int32) + exponent) >> 3)


def _digits_from(tau, first, exponent, offset, seen):
    """The digits of 256^tau · 2^exponent, (b, h_kv, group, l, size), from first + offset on.

    first, offset: (b, h_kv, group, l, 1), whole float32; no key stands above their sum. All digits
    are 0 where nobody sees a key, `seen` being False.
    """

    def place(tau, first, exponent, offset, part: int):
        _, eighths, factor = power_of(tau)
        eighths = eighths.astype(jnp.int32)
        down = offset - _offset(tau, first, exponent)
        if exponent is not None:
            eighths = (eighths + exponent) & 7
        return place_word(word_of(factor, eighths), jnp.clip(down, 0, 7).astype(jnp.int32))[part]

    def nothing(tau, first, exponent, offset):
        return (tau * 0).astype(jnp.int32)

    # Written down once, in branches: otherwise XLA:CPU computes a weight again for each digit.
    parts = [functools.partial(place, part=part) for part in (0, 1)]
    found = [lax.cond(seen, f, nothing, tau, first, exponent, offset) for f in parts]
    return level_digits(*found)


def _varying(state, arrays):
    """The state as a loop's first carry, as `varying_like` has it, integers as well."""
    zero = varying_like(jnp.float32(0), *arrays)
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), state)
