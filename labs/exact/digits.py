"""Weights and values as digits, by functions whose bits are the same in every program.

Two things move the last bits of a float32 from program to program: the order of a sum, and a
compiler that rounds a product and a sum once if it fuses them, and twice if it does not. Here
sums have a written order, and inexact products are `unfused`.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

LEVELS = 6  # digits to the base 256 that a sum keeps
VALUE_DIGITS = 4  # of a value; the first digit is -64 ... 64
VALUE_BITS = 30  # of a value, below the power of two above the largest entry of its row
MOST = 2.0**26  # scores are clipped to -MOST ... MOST

LN2_HIGH = np.float32(0.693359375)  # nine bits: its product with a whole number below 2^15 is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
EXP = tuple(1 / math.factorial(i) for i in range(8))  # to 7e-9 for |x| <= 0.36
LOG = tuple(2 / odd for odd in range(1, 15, 2))  # ln((1 + r) / (1 - r)) / r, in powers of r^2


def unfused(product):
    """`product`, rounded before any later sum.

    The function adds 0 to a number, and NaN to a NaN. A compiler cannot know which, unless it may
    assume that there are no NaNs (XLA's fast math). So it may fuse the product with this sum,
    which changes nothing, but not with the next sum.
    """
    return product + jnp.where(product == product, np.float32(0), product)


def polynomial(coefficients, x):
    """Σ coefficients[i] xⁱ in float32, rounded after every operation."""
    y = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = unfused(y * x) + np.float32(c)
    return y


def dot(x, y):
    """Σ x y over the last axis, as a balanced tree: a sum whose order is fixed.

    The axis is padded with zeros to a power of two. Then halves are added, and halves again.
    """
    terms = unfused(x * y)
    size = terms.shape[-1]
    room = (1 << (size - 1).bit_length()) - size
    terms = jnp.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, room)])
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]


def weight_of(score):
    """(power, mantissa), int32, with e^score = mantissa · 2^(power − 24), to about 1e-7.

    score: float32 without NaN. mantissa is 0.69 … 1.42 times 2^24, and needs no rounding, because
    float32 has no bits below 1 there.
    """
    score = jnp.clip(score, -MOST, MOST)
    power = jnp.round(score * np.float32(1 / math.log(2)))
    rest = score - unfused(power * LN2_HIGH) - unfused(power * LN2_LOW)
    factor = polynomial(EXP, jnp.clip(rest, -0.36, 0.36))
    return power.astype(jnp.int32), (factor * np.float32(1 << 24)).astype(jnp.int32)


def position_of(power):
    """The position, a power of 256, of the first digit of mantissa · 2^(power − 24), int32."""
    return power >> 3


def digits_from(top, power, mantissa):
    """The digits, 0 … 255, of mantissa · 2^(power − 24) at the positions top, top − 1, …

    (LEVELS, ...) int32. They are cut off after the last position, not rounded, because a digit
    must not depend on the end of the window. No digit is above `top`.
    """
    word = mantissa.astype(jnp.uint32) << (power & 7).astype(jnp.uint32)  # four bytes, four digits
    down = jnp.clip(top - position_of(power), 0, LEVELS)
    level = jnp.arange(LEVELS, dtype=jnp.int32).reshape(-1, *[1] * power.ndim)
    shift = 24 + 8 * (down - level)
    byte = (word >> jnp.clip(shift, 0, 31).astype(jnp.uint32)) & np.uint32(0xFF)
    return jnp.where((shift >= 0) & (shift < 32), byte, 0).astype(jnp.int32)


def value_digits(values):
    """(digits, power, number): rows of float32 as digits to the base 256, four for each entry.

    values: (..., dv); an entry is Σ_j digits[j] 256^−j · 2^power, its row's power (...,) in int32.
    digits: VALUE_DIGITS of (..., dv), int32, the first −64 … 64, the others −128 … 127. They round
    an entry to 2^−30 of the largest of its row, or to half of that.
    number: (...,) False if an entry is NaN. Infinities count as the largest finite number.
    """
    values = jnp.clip(values, -jnp.finfo(jnp.float32).max, jnp.finfo(jnp.float32).max)
    # Without signs, floats are in the order of their bits, and NaN is above all numbers.
    largest = jnp.max(lax.bitcast_convert_type(jnp.abs(values), jnp.int32), axis=-1)
    number = largest < 0x7F800000
    exponent = jnp.where(number, (largest >> 23) - 126, 0)
    whole = times_power(jnp.where(number[..., None], values, 0), (VALUE_BITS - exponent)[..., None])
    whole = jnp.round(whole).astype(jnp.int32)
    carried = whole + sum(128 << 8 * j for j in range(VALUE_DIGITS - 1))
    lower = [((carried >> 8 * j) & 0xFF) - 128 for j in range(VALUE_DIGITS - 2, -1, -1)]
    return [carried >> 24, *lower], exponent - (VALUE_BITS - 24), number


def times_power(x, exponent):
    """x · 2^exponent, exact within the range of float32; exponent −252 … 254."""
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent):
    return lax.bitcast_convert_type((exponent + 127).astype(jnp.int32) << 23, jnp.float32)


def log(x):
    """ln x of x ≥ 2^−126, float32: to about 1e-7, relative or absolute, the larger of both."""
    bits = lax.bitcast_convert_type(x, jnp.int32) - np.int32(0x3F400000)  # the bits of 3/4
    power = (bits >> 23).astype(jnp.float32)
    mantissa = (bits & np.int32(0x007FFFFF)) + np.int32(0x3F400000)
    mantissa = lax.bitcast_convert_type(mantissa, jnp.float32)  # 3/4 … 3/2
    r = (mantissa - 1) / (mantissa + 1)
    return unfused(power * np.float32(math.log(2))) + unfused(r * polynomial(LOG, unfused(r * r)))
