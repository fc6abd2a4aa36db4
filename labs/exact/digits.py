"""Numbers taken apart into digits, and the few functions of them whose bits nothing may move.

Two things move the bits of a float32 from program to program. The order of a sum: here nothing is
added but whole numbers below 2^24, which float32 adds exactly. And the compiler, which fuses a
product and a sum into one operation, or does not: here products are exact, by powers of two, or
`unfused`.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from treeattn.kernel.products import row_max

VALUE_DIGITS = 4  # of a float32 value, to the base 256: 32 bits below the largest of its key's
LEVELS = 6  # digits of a weight to the base 256, from the highest position that any weight reaches
PER_NAT = math.log2(math.e) / 8  # e^s is 256^(s · PER_NAT)
LARGEST = float(np.float32(np.finfo(np.float32).max * PER_NAT))

# 2^g for |g| ≤ 1/2, to 3e-9: the polynomial through its values at Chebyshev's seven points.
EXP2 = 1.0, 0.6931472067, 0.2402265092, 0.05550327227, 0.009618056678, 0.001340042818, 0.0001546145
LOG = tuple(2 / odd for odd in range(1, 15, 2))  # ln((1 + r) / (1 − r)) / r, in powers of r²


def unfused(product):
    """`product`, rounded, whatever is added to it afterwards.

    What is added here is 0, or NaN to a NaN, which no compiler can know. So a product may be fused
    with this sum, which changes nothing, and not with the next.
    """
    return product + jnp.where(product == product, np.float32(0), product)


def polynomial(coefficients, x):
    """Σ coefficients[i] xⁱ, in float32, rounded after every operation."""
    y = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = unfused(y * x) + np.float32(c)
    return y


def ldexp(x, exponent):
    """x · 2^exponent, exact but where it leaves the range of float32. int32, −252 … 254."""
    half = exponent >> 1
    return x * _power(half) * _power(exponent - half)


def _power(exponent):
    """2^exponent, −126 … 127 (beyond it, the nearest of them)."""
    bits = (jnp.clip(exponent, -126, 127) + 127) << 23
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def digit(x, i: int, bits: int):
    """Digit i of x to the base 2^bits; digit 0 is x rounded, the others are at most 2^(bits − 1).

    It is round(x 2^(i·bits)), less what the digits before it are in the same units: each by itself,
    from x, which is all that a compiler has to keep.
    """
    if i == 0:
        return jnp.round(x)
    before = jnp.round(x * np.float32(2.0 ** (bits * (i - 1))))
    return jnp.round(x * np.float32(2.0 ** (bits * i))) - before * np.float32(1 << bits)


def to_whole(x, bits: int, partitioned: bool = True):
    """(x, exponent, number): x with its last axis scaled to whole numbers of `bits` bits and sign.

    What came is x · 2^exponent, exponent (...,) int32, |x| < 127/128 · 2^(bits − 1). Where the row
    holds what is no number, or ∞, `number` (...,) is False, and x is 0.
    """
    size = jnp.where(x == x, jnp.abs(x), jnp.inf)
    largest = lax.bitcast_convert_type(row_max(size, partitioned), jnp.int32)
    number = largest < 0x7F800000
    above = (jnp.maximum(largest, 0) + 0x20000) >> 23  # the next power from 127/128 of it on
    exponent = jnp.where(number, above - 126, -126) - (bits - 1)
    x = jnp.where(number[..., None], x, 0)
    return ldexp(x, -exponent[..., None]), exponent, number


def value_digits(x, count: int):
    """`count` digits to the base 256, −128 … 127, int32, of x of 8 · count bits and sign, rounded.

    |x| < 127/128 · 2^(8·count − 1), so that the first has room for what is carried into it.
    """
    halves = sum(128 << 8 * i for i in range(count - 1))
    x = jnp.round(x).astype(jnp.int32) + halves
    first = x >> 8 * (count - 1)
    return [first] + [((x >> 8 * i) & 0xFF) - 128 for i in range(count - 2, -1, -1)]


def score_bits(d: int) -> int:
    """Bits of a digit, so that a sum of d products of two stays within 2^24."""
    return (24 - (d - 1).bit_length()) // 2 + 1


def power_of(tau):
    """(index, eighths, factor): 256^tau = 256^index · 2^eighths · factor (to 1e-7); tau float32.

    index and eighths are whole float32, eighths 0 … 7, factor 0.7 … 1.42. A tau of −∞ has the index
    −∞ and the factor 0.
    """
    hidden = tau == -jnp.inf
    tau = jnp.where(jnp.isfinite(tau), tau, 0)
    index = jnp.floor(tau)
    power = (tau - index) * 8
    eighths = jnp.round(power)
    factor = polynomial(EXP2, power - eighths)
    above = eighths == 8
    index = jnp.where(hidden, -jnp.inf, jnp.where(above, index + 1, index))
    return index, jnp.where(above, 0, eighths), jnp.where(hidden, 0, factor)


def weight_of(tau):
    """(index, weight) with 256^tau = 256^index · weight, 0.7 < weight < 182 (to 1e-7); tau float32.

    Both are float32, index a whole number. A tau of −∞ has the index −∞ and the weight 0.
    """
    index, eighths, factor = power_of(tau)
    return index, factor * _power(eighths.astype(jnp.int32))


def word_of(factor, eighths):
    """2^eighths · factor, factor below 2 and 0 or more than 1/2, as int32 of 32 bits without sign.

    Its four bytes are its digits to the base 256, of which the first stands at 256^0.
    """
    bits = lax.bitcast_convert_type(factor, jnp.int32)
    mantissa = (bits & 0x007FFFFF) | 0x00800000
    shift = (bits >> 23) - 126 + eighths
    return jnp.where(factor > 0, mantissa << jnp.clip(shift, 0, 8), 0)


def place_word(word, down):
    """(first, rest): the digits of a word that begins `down` levels lower, int32, 0 or more.

    The bytes of `first` are the levels 0 … 3, the lower bytes of `rest` those from 4 on. They are
    cut off, not rounded: a digit must not depend on the position of the first.
    """
    down = jnp.minimum(down, 7)
    first = lax.shift_right_logical(lax.shift_right_logical(word, 4 * down), 4 * down)
    more = LEVELS - 4
    up = 8 * jnp.clip(more - down, 0, more)
    further = 4 * jnp.clip(down - more, 0, 7)
    rest = lax.shift_right_logical(lax.shift_right_logical(word << up, further), further)
    return first, rest


def level_digits(first, rest):
    """The LEVELS digits, 0 … 255, int32, of what `place_word` gave, the highest first."""
    levels = [(first >> 24 - 8 * i) & 0xFF for i in range(4)]
    return levels + [(rest >> 8 * (LEVELS - 1 - i)) & 0xFF for i in range(4, LEVELS)]


def log(x):
    """ln x of x ≥ 2^−126, float32: to about 1e-7, relative or absolute, whichever is more."""
    bits = lax.bitcast_convert_type(x, jnp.int32) - np.int32(0x3F400000)  # that of 3/4
    exponent = bits >> 23
    mantissa = (bits & np.int32(0x007FFFFF)) + np.int32(0x3F400000)
    mantissa = lax.bitcast_convert_type(mantissa, jnp.float32)  # 3/4 … 3/2
    r = (mantissa - 1) / (mantissa + 1)
    of_mantissa = unfused(r * polynomial(LOG, unfused(r * r)))
    return unfused(exponent.astype(jnp.float32) * np.float32(math.log(2))) + of_mantissa
