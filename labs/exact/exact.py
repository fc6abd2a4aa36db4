"""A state whose sums no order can change: whole numbers, on a grid that the largest key decides.

A weight e^s is 256^τ with τ = s / ln 256. Its digits to the base 256 stand at positions that the
weight alone decides, and so do those of a weight times a value. What stands at one position adds up
as integers do: exactly, in any order. A state keeps the sums of the six highest positions that any
of its keys reaches; where a larger key comes, lower positions fall off, the same whenever it comes.
So the merge is associative and commutative **bit for bit**, and a state is rounded once, at the
end. (Sums in bins by exponents: Demmel & Nguyen, Parallel Reproducible Summation, 2015.)

Weights, and weighted values, are cut off at 2^−40 of their largest: n keys lose n · 2^−40 of the
whole at most.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int

from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, finite, from_output, where
from treeattn.kernel.digits import (
    LARGEST,
    LEVELS,
    PER_NAT,
    VALUE_DIGITS,
    ldexp,
    level_digits,
    log,
    place_word,
    power_of,
    to_whole,
    unfused,
    value_digits,
    word_of,
)

MAX_KEYS = 1 << 28  # the sum of a position stays below keys · 2^17, in halves of 16 and 32 bits
LEAST_OFFSET = -32  # values that count for less than 2^−250 of a weight are 0 in float32


class ExactState(NamedTuple):
    """What a set of keys adds up to, exactly.

    index:       (...,) float32, whole: the position, a power of 256, where the digits of the
                 weights begin; −∞ when the set is empty
    offset:      (...,) float32, whole: how far above it those of weighted values begin
    denominator: (6, 2, ...) int32: the sums of the digits of Σ 256^τ, position by position, in
                 halves, hi · 2^16 + lo with 0 ≤ lo < 2^16
    numerator:   (6, 2, ..., dv) int32: those of Σ 256^τ v
    invalid:     (...,) bool: whether one of the keys, or its value, is no number
    """

    index: Float[Array, "..."]
    offset: Float[Array, "..."]
    denominator: Int[Array, "6 2 ..."]
    numerator: Int[Array, "6 2 ... dv"]
    invalid: Bool[Array, "..."]

    @staticmethod
    def identity(shape: tuple[int, ...], value_dim: int) -> "ExactState":
        """The state of no keys for `shape` queries and values of `value_dim`."""
        return ExactState(
            index=jnp.full(shape, -jnp.inf, jnp.float32),
            offset=jnp.full(shape, -jnp.inf, jnp.float32),
            denominator=jnp.zeros((LEVELS, 2, *shape), jnp.int32),
            numerator=jnp.zeros((LEVELS, 2, *shape, value_dim), jnp.int32),
            invalid=jnp.zeros(shape, bool),
        )

    def merge(self, other: "ExactState") -> "ExactState":
        """The state of the union of two disjoint sets: associative and commutative, every bit."""
        return _merge(self, other)

    def counted_from(self, index: Float[Array, "..."]) -> "ExactState":
        """The same, the weights' digits beginning at `index`, which is not below its own."""
        down = _distance(index, self.index)
        offset = jnp.where(self.offset - down < LEAST_OFFSET, -jnp.inf, self.offset - down)
        return self._replace(
            index=index, offset=offset, denominator=_move_down(self.denominator, down)
        )

    def with_values_from(self, offset: Float[Array, "..."]) -> "ExactState":
        """The same, the weighted values' digits beginning at `offset`, not below its own."""
        down = _distance(offset, self.offset)
        return self._replace(offset=offset, numerator=_move_down(self.numerator, down))

    def rounded(self) -> AttentionState:
        """The `AttentionState` relative to its own lse, (lse, 1, out).

        Where one of the keys was no number, lse and out are NaN.
        """
        return _rounded(self)


# Programs of their own where they are called by themselves, as `treeattn.merge` is.
@functools.partial(jax.jit, inline=True)
def _merge(a: ExactState, b: ExactState) -> ExactState:
    """`ExactState.merge`."""
    index = jnp.maximum(a.index, b.index)
    a = a.counted_from(index)
    b = b.counted_from(index)
    offset = jnp.maximum(a.offset, b.offset)
    a = a.with_values_from(offset)
    b = b.with_values_from(offset)
    denominator = _add(a.denominator, b.denominator)
    numerator = _add(a.numerator, b.numerator)
    return ExactState(index, offset, denominator, numerator, a.invalid | b.invalid)


@functools.partial(jax.jit, inline=True)
def _rounded(state: ExactState) -> AttentionState:
    """`ExactState.rounded`."""
    return rounded(state, limbs(state.denominator), limbs(state.numerator))


def from_state(state: AttentionState) -> ExactState:
    """A state, rounded already, as that of one key: its lse for a score, its output for a value.

    state: float32, (...,) and (..., dv)
    """
    out, lse = finalize(state)
    values, exponent, number = to_whole(finite(out), 8 * VALUE_DIGITS)
    tau = jnp.clip(lse * np.float32(PER_NAT), -LARGEST, LARGEST)
    index, eighths, factor = power_of(jnp.where(lse == -jnp.inf, -jnp.inf, tau))
    eighths = eighths.astype(jnp.int32)
    power = eighths + exponent + 8 * (VALUE_DIGITS - 1)  # that of the values' first digit

    def digits_of(eighths):
        word = word_of(factor, eighths)
        return level_digits(*place_word(word, jnp.zeros_like(word)))

    weighted = digits_of(power & 7)
    levels = [jnp.zeros(out.shape, jnp.int32)] * LEVELS
    for j, digit in enumerate(value_digits(values, VALUE_DIGITS)):
        for i in range(LEVELS - j):
            levels[i + j] += weighted[i][..., None] * digit
    return ExactState(
        index,
        jnp.where(index == -jnp.inf, -jnp.inf, (power >> 3).astype(jnp.float32)),
        in_halves(jnp.stack(digits_of(eighths))),
        in_halves(jnp.stack(levels)),
        ~number | jnp.isnan(lse),
    )


def in_halves(levels) -> Int[Array, "6 2 ..."]:
    """Whole numbers (6, ...) as the fields of an `ExactState` hold them."""
    x = levels.astype(jnp.int32)
    return jnp.stack([x >> 16, x & 0xFFFF], axis=1)


def rounded(state: ExactState, denominator, numerator, bits: int = 24) -> AttentionState:
    """`ExactState.rounded` of sums in limbs; only index, offset and invalid are the state's."""
    empty = state.index == -jnp.inf
    d = jnp.where(empty, 1, value_of(denominator, bits))
    exponent = 8 * jnp.maximum(state.offset, -64).astype(jnp.int32)
    out = finite(ldexp(value_of(numerator, bits) / d[..., None], exponent[..., None]))
    lse = jnp.where(empty, 0, state.index) * np.float32(1 / PER_NAT)
    lse = jnp.where(empty, -jnp.inf, finite(unfused(lse) + log(d)))
    result = from_output(out, lse)
    nothing = AttentionState(*(jnp.full_like(x, jnp.nan) for x in result))
    return where(state.invalid, nothing, result)


# From the sums of positions to one whole number, and to a float32.


def limbs(levels: Int[Array, "6 2 ..."], bits: int = 24) -> Int[Array, "limbs ..."]:
    """The number that the levels add up to, in limbs of 24 or 16 bits, the lowest first.

    All are 0 … 2^bits − 1 but the last, which has the sign. 31 − bits bits are left in each for
    sums over devices.
    """
    carry_high = carry_low = np.int32(0)
    octets = []
    for high, low in levels[:0:-1]:
        low = low + carry_low
        high = high + carry_high + (low >> 16)
        octets.append(low & 0xFF)
        carry_low = ((low >> 8) & 0xFF) | ((high & 0xFF) << 8)
        carry_high = high >> 8
    high, low = levels[0]
    low = low + carry_low
    high = high + carry_high + (low >> 16)
    octets += [low & 0xFF, (low >> 8) & 0xFF]
    octets += [high & 0xFF, (high >> 8) & 0xFF, (high >> 16) & 0xFF, high >> 24]
    size = bits // 8
    parts = [octets[i : i + size] for i in range(0, len(octets), size)]
    return jnp.stack([sum(x << (8 * i) for i, x in enumerate(part)) for part in parts])


def value_of(limbs: Int[Array, "limbs ..."], bits: int = 24) -> Float[Array, "..."]:
    """The float32 next to the number in limbs, or the one beside it, in units of level 0."""
    limbs = _carried(limbs, bits)
    negative = limbs[-1] < 0
    magnitude = _carried(jnp.where(negative, -limbs, limbs), bits).astype(jnp.float32)
    value = magnitude[0]
    for limb in magnitude[1:]:
        value = value * np.float32(2.0**-bits) + limb  # the product is exact
    value = value * np.float32(2.0 ** (bits * (len(limbs) - 1) - 8 * (LEVELS - 1)))
    return jnp.where(negative, -value, value)


def _carried(limbs, bits: int):
    """The same number, each limb but the last in 0 … 2^bits − 1."""
    mask = (1 << bits) - 1
    carried = []
    carry = np.int32(0)
    for limb in limbs[:-1]:
        limb = limb + carry
        carried.append(limb & mask)
        carry = limb >> bits
    return jnp.stack([*carried, limbs[-1] + carry])


def _add(a, b):
    """The sums of levels (6, 2, ...), in halves again."""
    total = a + b
    low = total[:, 1]
    return jnp.stack([total[:, 0] + (low >> 16), low & 0xFFFF], axis=1)


def _distance(above, own):
    """How many levels `own` lies below `above`; 0 where neither is anywhere."""
    return jnp.where(above == own, 0, above - finite(own))


def _move_down(levels, down):
    """The levels (6, 2, ...), so many (...,) lower; what falls off is gone."""
    down = jnp.minimum(down, 7).astype(jnp.int32)
    down = down.reshape(down.shape + (1,) * (levels.ndim - 2 - down.ndim))

    def move(levels):
        for step in (4, 2, 1):
            moved = jnp.concatenate([jnp.zeros_like(levels[:step]), levels[:-step]])
            levels = jnp.where((down & step) > 0, moved, levels)
        return levels

    def stay(levels):
        return levels + (down & 0)  # of the type that moving has, inside shard_map

    return lax.cond(jnp.any(down > 0), move, stay, levels)
