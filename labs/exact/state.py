"""A state of whole numbers, whose merge is associative and commutative in every bit.

A weight e^s has digits to the base 256, at positions (powers of 256) that the weight alone decides,
and so has a weight times a value. Digits at one position are added as integers. A sum keeps six
positions, from the highest that any key reaches. When a larger key comes, early or late, the same
lower positions fall off. This is in the manner of Demmel and Nguyen, Parallel Reproducible
Summation, 2015.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int

from labs.exact.digits import LEVELS, log, times_power, unfused
from treeattn import AttentionState, from_output

EMPTY = -(1 << 27)  # the top of a sum of no keys
NO_NUMBER = 1 << 27  # the position of a NaN, above all others, so that no digit is left
MAX_KEYS = 1 << 28  # in all: a position's sum grows by less than 2^17 a key


class Sums(NamedTuple):
    """Sums of numbers, position by position, for each query.

    top:    (...,) int32, the highest position kept
    levels: (6, 2, ..., c) int32: level i is the sum of the digits at position top − i, in halves:
            high · 2^16 + low with 0 ≤ low < 2^16
    """

    top: Int[jax.Array, "..."]
    levels: Int[jax.Array, "6 2 ... c"]

    def moved_to(self, top):
        """The same sums counted from `top`, which is not below their own."""
        down = jnp.minimum(top - self.top, 7)[..., None]
        levels = self.levels
        for step in (4, 2, 1):
            lower = jnp.concatenate([jnp.zeros_like(levels[:step]), levels[:-step]])
            levels = jnp.where((down & step) > 0, lower, levels)
        return Sums(top, levels)


class ExactState(NamedTuple):
    """The sums over a set of keys: Σ e^s, one channel, and Σ e^s v, with positions of their own."""

    weights: Sums
    values: Sums

    @staticmethod
    def identity(shape: tuple[int, ...], value_dim: int) -> "ExactState":
        """The state of no keys for `shape` queries and values of `value_dim`."""

        def nothing(channels):
            levels = jnp.zeros((LEVELS, 2, *shape, channels), jnp.int32)
            return Sums(jnp.full(shape, EMPTY, jnp.int32), levels)

        return ExactState(nothing(1), nothing(value_dim))

    def merge(self, other: "ExactState") -> "ExactState":
        """The state of the union of two disjoint sets of keys, at most MAX_KEYS together."""
        return ExactState(
            _merge_sums(self.weights, other.weights), _merge_sums(self.values, other.values)
        )

    def rounded(self) -> AttentionState:
        """The state (lse, 1, out) of the core, in float32: the only rounding."""
        return round_sums(jnp.stack([self.weights.top, self.values.top]), self.in_positions())

    def in_positions(self) -> Int[jax.Array, "8 ... channels"]:
        """All sums, those of weights first, at the positions top + 2 to top − 5.

        A high half counts two positions higher. The window no longer moves, so nothing falls off.
        There is room for the sums of 2^14 devices.
        """
        levels = jnp.concatenate([self.weights.levels, self.values.levels], axis=-1)
        high, low = levels[:, 0], levels[:, 1]
        nothing = jnp.zeros_like(high[:2])
        return jnp.concatenate([high, nothing]) + jnp.concatenate([nothing, low])


def merge_exact(state: ExactState, axes: str | tuple[str, ...]) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along the axes, rounded once.

    This is Algorithm 3: one Allreduce of int32 (2, ...) finds the highest positions, another of
    int32 (8, ..., dv + 1) adds the integers. The result is the state (lse, 1, out), with the same
    bits on every device. It can be `tree_decode`'s `method`.
    """
    if isinstance(state, AttentionState):  # the core's own, if no device has a key
        return state
    tops = lax.pmax(jnp.stack([state.weights.top, state.values.top]), axes)
    state = ExactState(*(sums.moved_to(top) for sums, top in zip(state, tops, strict=True)))
    return round_sums(tops, lax.psum(state.in_positions(), axes))


def _merge_sums(a: Sums, b: Sums) -> Sums:
    top = jnp.maximum(a.top, b.top)
    total = a.moved_to(top).levels + b.moved_to(top).levels
    high, low = total[:, 0], total[:, 1]
    return Sums(top, jnp.stack([high + (low >> 16), low & 0xFFFF], axis=1))


def in_halves(levels: Int[jax.Array, "6 ..."]) -> Int[jax.Array, "6 2 ..."]:
    """Sums in int32 as `Sums` keeps them."""
    return jnp.stack([levels >> 16, levels & 0xFFFF], axis=1)


def round_sums(tops, totals) -> AttentionState:
    """(lse, 1, out): tops (2, ...) of weights and values, totals (8, ..., 1 + dv) in positions."""
    weights_top, values_top = tops
    empty = weights_top == EMPTY
    sums = value_of(totals)
    d = jnp.where(empty, 1, sums[..., 0])
    exponent = 8 * jnp.clip(values_top - weights_top, -31, 31)
    # Not n / d, which some compilers make n · (1/d) for some shapes.
    out = times_power(sums[..., 1:] * (1 / d)[..., None], exponent[..., None])
    out = jnp.clip(out, -jnp.finfo(jnp.float32).max, jnp.finfo(jnp.float32).max)
    out = jnp.where((values_top == EMPTY)[..., None], 0, out)
    out = jnp.where((values_top == NO_NUMBER)[..., None], jnp.nan, out)
    above = jnp.where(empty, 0, weights_top).astype(jnp.float32)
    lse = jnp.where(empty, -jnp.inf, unfused(above * np.float32(8 * math.log(2))) + log(d))
    return from_output(out, jnp.where(weights_top == NO_NUMBER, jnp.nan, lse))


def value_of(positions: Int[jax.Array, "8 ..."]) -> Float[jax.Array, "..."]:
    """The float32 nearest to the whole sum, or its neighbour, in units of 256^top."""
    negative = _carried(positions)[0] < 0
    digits = _carried(jnp.where(negative, -positions, positions))
    value = jnp.zeros(negative.shape, jnp.float32)
    for digit in reversed(digits):
        value = value * np.float32(1 / 256) + digit.astype(jnp.float32)  # the product is exact
    value = value * np.float32(256**2)
    return jnp.where(negative, -value, value)


def _carried(positions):
    """The same number, all digits but the first in 0 … 255; the first has the sign."""
    digits = []
    carry = np.int32(0)
    for x in positions[:0:-1]:
        digits.append((x + carry) & 0xFF)
        carry = (x + carry) >> 8
    return [positions[0] + carry, *reversed(digits)]
