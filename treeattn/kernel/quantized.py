"""Keys and values in 8 bits, with a scale beside them: a cache of a quarter of float32's bytes.

A key is s·k, of small numbers k and one scale s for a token and head. Its score is s·(q·k), and its
part of the output is (p·s)·v: scores and weights are multiplied by scales, and neither keys nor
values are ever written in floats. A state is made of scores and weights, so that it is the same
small state as without scales, and merges as ever.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int8

from treeattn.idea.arrays import (
    Array,
    accumulation_dtype,
    as_array,
    check_broadcasts,
    check_floating,
    check_rank,
)

# The dtypes that take a scale, and the largest number of each that is used: −128 would have no
# opposite.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
NAMES = " or ".join(str(dtype) for dtype in LARGEST)

Numbers = Int8[Array, "b n h_kv d"] | Float[Array, "b n h_kv d"]
Scales = Float[Array, "#b #n #h_kv"]


def quantize(
    x: Float[Array, "b n h_kv d"], dtype: DTypeLike = jnp.int8
) -> tuple[Numbers, Float[Array, "b n h_kv"]]:
    """(numbers, scale) of keys or values: numbers · scale[..., None] is x, rounded.

    x:     (b, n, h_kv, d), floating-point
    dtype: int8, of numbers from −127 to 127, or float8_e4m3fn, from −448 to 448
    scale: (b, n, h_kv), the largest magnitude of a token's head over 127, or over 448; in float32,
           or float64 where x is

    Each number is the nearest to x / scale, of two the even one. So an error is up to scale / 2 by
    int8, 1/254 of the largest magnitude; by float8_e4m3fn up to 1/16 of the number itself, and
    scale / 1024 where that is more. Zeros have a scale of 0. A token's head with a NaN or an ∞ has
    the scale NaN and numbers of 0: who sees it gets NaN.

    Raises TypeError for x of another kind, ValueError for another shape or dtype.
    """
    check_floating(x=x)
    check_rank(4, "(batch, length, heads, head_dim)", x=x)
    largest = LARGEST.get(_known(dtype))
    if largest is None:
        raise ValueError(f"dtype: expected {NAMES}, got {dtype!r}")
    wide = jnp.asarray(x, accumulation_dtype(x))
    scale = jnp.max(jnp.abs(wide), axis=-1, initial=0) / largest
    finite = jnp.isfinite(scale)
    divisor = jnp.where(finite & (scale > 0), scale, 1)[..., None]
    steps = jnp.clip(wide / divisor, -largest, largest)  # where the smallest of scales is rounded
    steps = jnp.where(finite[..., None], steps, 0)
    steps = jnp.round(steps) if jnp.dtype(dtype) == jnp.int8 else _to_float8(steps)
    return steps.astype(dtype), jnp.where(finite, scale, jnp.nan)


def dequantize(numbers: Numbers, scale: Scales) -> Float[Array, "b n h_kv d"]:
    """numbers · scale[..., None], in the scale's dtype.

    scale broadcasts to (b, n, h_kv). Raises TypeError for numbers that are neither int8 nor
    float8_e4m3fn, and a scale that is not floating-point; ValueError for shapes that do not fit.
    """
    numbers = as_array("numbers", numbers)
    if not is_quantized(numbers):
        raise TypeError(f"numbers: expected {NAMES}, got dtype {numbers.dtype}")
    check_rank(4, "(batch, length, heads, head_dim)", numbers=numbers)
    scale = check_shape("scale", scale, numbers.shape[:3])
    return jnp.asarray(numbers).astype(scale.dtype) * scale[..., None]


def is_quantized(x: Array) -> bool:
    """Whether these are numbers that take a scale."""
    return jnp.dtype(x.dtype) in LARGEST


def check_shape(name: str, scale, shape: tuple[int, ...]) -> Array:
    """`scale`, or the TypeError or ValueError that names it, if it does not broadcast to shape."""
    scale = as_array(name, scale)
    check_floating(**{name: scale})
    check_broadcasts(name, scale, shape, "(batch, kv_len, kv_heads)")
    return scale


def need_scales(k: Array, v: Array, key_scale, value_scale) -> bool:
    """Whether keys and values are in 8 bits, with scales; the error that says what is missing."""
    given = {"key_scale": (k, "k", key_scale), "value_scale": (v, "v", value_scale)}
    for name, (x, of, scale) in given.items():
        if is_quantized(x) and scale is None:
            raise ValueError(f"{name}: expected one beside {of} of {x.dtype}, got None")
        if not is_quantized(x) and scale is not None:
            raise ValueError(f"{name}: goes with {of} of {NAMES}, got {of} of dtype {x.dtype}")
    return key_scale is not None


def _to_float8(x):
    """The numbers of float8_e4m3fn nearest to x, in x's dtype.

    XLA:CPU converts by way of float16, and so rounds twice: one in two hundred to the other side.
    """
    three_bits = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(x) < 2**-6, jnp.round(x * 512) / 512, three_bits)


def _known(dtype):
    """`dtype` as JAX has it; None for what is none."""
    try:
        return jnp.dtype(dtype)
    except TypeError:
        return None
