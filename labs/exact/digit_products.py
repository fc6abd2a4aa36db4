"""Products of digits: a block's scores, and the sums of its values, as sums of whole numbers.

Whatever library forms them, in whatever order: float32 adds whole numbers exactly up to 2^24, and
int32 those of 8 bits. Shapes are those of treeattn/kernel/exactly.py.
"""

import functools

import jax.numpy as jnp
import numpy as np

from treeattn.kernel.digits import LARGEST, LEVELS, digit, ldexp, to_whole
from treeattn.kernel.products import EXACT

SCORE_DIGITS = 3  # of a query's and a key's entries, relative to their largest
FEW = 64  # queries a key head: weights' digits as float32, and as 8-bit integers from there on


def scores_of(queries, k, scale, bits: int, partitioned: bool):
    """τ = scale · q·k, (b, h_kv, group, l, size), NaN where an entry is no number."""
    query_digits, exponent, number = queries
    b, h_kv, _, group, l, d = query_digits.shape
    k, key_exponent, key_number = to_whole(jnp.moveaxis(k, 1, 2), bits, partitioned)
    levels = [0] * SCORE_DIGITS
    for j in range(SCORE_DIGITS):  # products of digits beyond the last level are left out
        count = SCORE_DIGITS - j
        rows = query_digits[:, :, :count].reshape(b, h_kv, -1, d)
        some = dots(rows, digit(k, j, bits)).astype(jnp.int32)
        some = some.reshape(b, h_kv, count, group, l, -1)
        for i in range(count):
            levels[i + j] += some[:, :, i]
    s = 0
    for level in reversed(levels):
        s = s * np.float32(2.0**-bits) + level.astype(jnp.float32)  # the product is exact
    tau = ldexp(s * scale, exponent + key_exponent[:, :, None, None])
    number &= key_number[:, :, None, None]
    return jnp.where(number, jnp.clip(tau, -LARGEST, LARGEST), jnp.nan)


def dots(rows, keys):
    """rows · keys, (b, h_kv, rows, size), for rows (b, h_kv, rows, d), keys (b, h_kv, size, d)."""
    if rows.shape[2] < keys.shape[2]:  # XLA:CPU transposes the second factor
        return jnp.moveaxis(jnp.einsum("bknd,bkrd->bknr", keys, rows, precision=EXACT), -1, 2)
    return jnp.einsum("bkrd,bknd->bkrn", rows, keys, precision=EXACT)


def weighted_sums(weights, values):
    """Σ digit · digit by level, int32 (b, h_kv, group, l, dv), over a block of keys.

    weights: LEVELS of (b, h_kv, group, l, size), 0 … 255
    values: the digits of values, (b, h_kv, size, dv), −128 … 127
    """
    b, h_kv, group, l, size = weights[0].shape
    few = group * l <= FEW
    levels = [0] * LEVELS
    rows = [x.reshape(b, h_kv, group * l, size) for x in weights]
    if few:
        rows = jnp.concatenate(rows, axis=2).astype(jnp.float32)
    else:
        rows = [(x - 128).astype(jnp.int8) for x in rows]
    for j, digits in enumerate(values):
        if few:
            count = LEVELS - j
            some = rows[:, :, : count * group * l]
            digits = digits.astype(jnp.float32)
            sums = jnp.einsum("bkrn,bknd->bkrd", some, digits, precision=EXACT)
            sums = jnp.split(sums.astype(jnp.int32), count, axis=2)
        else:
            taken_off = 128 * jnp.sum(digits, axis=2, keepdims=True, dtype=jnp.int32)
            digits = digits.astype(jnp.int8)
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.int32)
            sums = [product("bkrn,bknd->bkrd", x, digits) for x in rows[: LEVELS - j]]
            sums = [x + taken_off for x in sums]
        for i, x in enumerate(sums):
            levels[i + j] += x.reshape(b, h_kv, group, l, -1)
    return levels
