"""What a layer does to each number, in float32, by operations that no compiler rounds otherwise.

The bits of a float32 move with the order of a sum, with a product that is fused with a sum or is
not, and with the library's functions, which are other ones for eight numbers at a time than for the
last three of a row. Here sums have one order, that of a binary tree; products that are added to
something are `unfused`; exponentials and angles are polynomials of our own. Divisions and square
roots are correctly rounded everywhere.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int, UInt32

from treeattn.idea.arrays import Array
from treeattn.kernel.digits import PER_NAT, ldexp, polynomial, unfused, weight_of

# sin x / x and cos x for |x| ≤ π/4, in powers of x²: to 1e-8.
# Three numbers of 12 bits that add up to 2³² / 2π.
TURN = 683409408.0, 155840.0, 27.5764
SIN = 1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880
COS = 1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "... d"]:
    """x / √(mean(x²) + ε), times weight."""
    mean = sum_as_a_tree(unfused(x * x)) * np.float32(1 / x.shape[-1])
    root = jnp.sqrt(unfused(mean) + np.float32(epsilon))
    return unfused(x / unfused(root)[..., None]) * weight


def sum_as_a_tree(x: Float[Array, "... d"]) -> Float[Array, "..."]:
    """Σ x: the second half is added to the first, until one number is left."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x / (1 + e⁻ˣ)."""
    power, weight = weight_of(jnp.clip(x * np.float32(-PER_NAT), -15.5, 15.5))  # of 256
    return x / (1 + unfused(ldexp(weight, 8 * power.astype(jnp.int32))))


def cos_and_sin(
    positions: Int[Array, "*n"], frequencies: Float[Array, " half"]
) -> tuple[Float[Array, "*n half"], Float[Array, "*n half"]]:
    """Of the angles positions · frequencies.

    In whole numbers, a turn being 2³²: what goes beyond the last bit are whole turns.
    frequencies: 0 … 3
    """
    phase = positions[..., None].astype(jnp.uint32) * _turns(frequencies)
    quarter = (phase + np.uint32(1 << 29)) >> 30
    rest = (phase - (quarter << 30)).astype(jnp.int32)  # −2²⁹ … 2²⁹
    x = rest.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    square = unfused(x * x)
    sin = unfused(x * polynomial(SIN, square))
    cos = polynomial(COS, square)
    odd = quarter % 2 == 1
    low = quarter < 2
    return (
        jnp.where((quarter == 0) | (quarter == 3), 1, -1) * jnp.where(odd, sin, cos),
        jnp.where(low, 1, -1) * jnp.where(odd, cos, sin),
    )


def _turns(frequencies: Float[Array, " half"]) -> UInt32[Array, " half"]:
    """frequencies · 2³² / 2π, to 3: products of 12 bits with 12 bits are exact."""
    bits = lax.bitcast_convert_type(frequencies, jnp.uint32)
    high = lax.bitcast_convert_type(bits & np.uint32(0xFFFFF000), jnp.float32)
    parts = (high, frequencies - high)
    products = [part * np.float32(of_turn) for of_turn in TURN for part in parts]
    return sum(jnp.round(x).astype(jnp.uint32) for x in products)


def rotate(
    x: Float[Array, "b l h d"], cos: Float[Array, "#b l half"], sin: Float[Array, "#b l half"]
) -> Float[Array, "b l h d"]:
    """Rotary embedding, as in `layers.rotate`."""
    cos = cos[:, :, None]
    sin = sin[:, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    first = unfused(a * cos) - unfused(b * sin)
    second = unfused(b * cos) + unfused(a * sin)
    return jnp.concatenate([first, second], axis=-1)
