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

VALUE_DIGITS = 4  # of a value, 31 bits below the largest of its key's
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


def digits(x, axis: int, count: int, bits: int, whole=jnp.round):
    """The first `count` digits of x to the base 2^bits, along a new axis; digit 0 is whole(x).

    Each is whole(x 2^(i·bits)), less what the digits before it are in the same units: a digit at a
    time, from x itself. With `whole` jnp.round, they are at most 2^(bits − 1), but for digit 0.
    """
    shape = [1] * (x.ndim + 1)
    shape[axis] = count
    finer = np.exp2(bits * np.arange(count)).astype(np.float32)
    coarser = np.where(finer == 1, 0, finer / np.float32(1 << bits))
    x = jnp.expand_dims(x, axis)
    before = whole(x * coarser.reshape(shape)) * np.float32(1 << bits)
    return whole(x * finer.reshape(shape)) - before


def to_whole(x, bits: int, partitioned: bool = True):
    """(x, exponent, number): x with its last axis scaled to whole numbers of `bits` bits and sign.

    What came is x · 2^exponent, exponent (...,) int32, |x| < 2^(bits − 1). Where the row holds what
    is no number, or ∞, `number` (...,) is False, and x is 0.
    """
    size = jnp.where(x == x, jnp.abs(x), jnp.inf)
    largest = lax.bitcast_convert_type(row_max(size, partitioned), jnp.int32)
    number = largest < 0x7F800000
    exponent = jnp.where(number, (jnp.maximum(largest, 0) >> 23) - 126, -126) - (bits - 1)
    x = jnp.where(number[..., None], x, 0)
    return ldexp(x, -exponent[..., None]), exponent, number


def score_bits(d: int) -> int:
    """Bits of a digit, so that a sum of d products of two stays within 2^24."""
    return (24 - (d - 1).bit_length()) // 2 + 1


def weight_of(tau):
    """(index, weight) with 256^tau = 256^index · weight, 1 ≤ weight < 256 (to 1e-7); tau float32.

    Both are float32, index a whole number. A tau of −∞ has the index −∞ and the weight 0.
    """
    hidden = tau == -jnp.inf
    tau = jnp.where(jnp.isfinite(tau), tau, 0)
    index = jnp.floor(tau)
    power = (tau - index) * 8
    whole = jnp.round(power)
    weight = polynomial(EXP2, power - whole) * _power(whole.astype(jnp.int32))
    # 256 would be a digit of the position above.
    weight = jnp.minimum(weight, np.float32(256 - 2**-16))
    return jnp.where(hidden, -jnp.inf, index), jnp.where(hidden, 0, weight)


def times_power(offset, weight, exponent):
    """(offset, weight) of 256^offset · weight · 2^exponent, the new weight below 256 again."""
    weight = weight * _power(exponent & 7)
    above = weight >= 256
    weight = jnp.where(above, weight / 256, weight)
    return offset + (exponent >> 3) + above, weight


def weight_digits(offset, weight, axis: int):
    """LEVELS digits, 0 … 255, of 256^offset · weight, offset ≤ 0, along a new axis, highest first.

    They are cut off, not rounded: a digit must not depend on the position of the first.
    """
    rest = weight * _power(8 * jnp.maximum(offset, -15).astype(jnp.int32))
    return digits(rest, axis, LEVELS, 8, jnp.floor)


def log(x):
    """ln x of x ≥ 2^−126, float32: to about 1e-7, relative or absolute, whichever is more."""
    bits = lax.bitcast_convert_type(x, jnp.int32) - np.int32(0x3F400000)  # that of 3/4
    exponent = bits >> 23
    mantissa = (bits & np.int32(0x007FFFFF)) + np.int32(0x3F400000)
    mantissa = lax.bitcast_convert_type(mantissa, jnp.float32)  # 3/4 … 3/2
    r = (mantissa - 1) / (mantissa + 1)
    of_mantissa = unfused(r * polynomial(LOG, unfused(r * r)))
    return unfused(exponent.astype(jnp.float32) * np.float32(math.log(2))) + of_mantissa
