"""What a layer does with each token by itself: a norm, and products with matrices."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float

from treeattn_llama.arguments import Array

# Up to so many tokens W xᵀ is computed no slower than x Wᵀ; from 32 on it is the slower.
#
# XLA:CPU rearranges the matrix for 2 tokens or more, so that 2 to 8 take 1.3 to 1.8 times as long
# as one, and 16 some twice as long. Nothing else was faster (3072 × 576, on two cores with AVX-512,
# jax 0.8.3 and 0.12, 2026-11-23): the transpose stored instead (2 tokens then take hardly longer
# than one, 8 as long as before), the matrix in 2 to 48 blocks (up to twice as long), tokens filled
# up to 16, a product for each token (for 8, three times as long), sums of elementwise products by
# 16 to 64 lanes (as long, up to 30 times as long), and XLA's options for its other libraries.
FEW_TOKENS = 16


def linear(
    x: Float[Array, "... d"],
    matrix: Float[Array, "out d"],
    bias: Float[Array, " out"] | None = None,
    dtype=None,
) -> Float[Array, "... out"]:
    """x Wᵀ + bias, in `dtype`, or x's: the matrix may be of another."""
    if math.prod(x.shape[:-1]) > FEW_TOKENS:
        y = jnp.einsum("...d,od->...o", x, matrix, preferred_element_type=dtype)
    else:  # XLA:CPU rearranges the second factor: let that be the smaller one
        y = jnp.einsum("od,...d->o...", matrix, x, preferred_element_type=dtype)
        y = jnp.moveaxis(y, 0, -1)
    return (y if bias is None else y + bias).astype(dtype or x.dtype)


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "... d"]:
    """x / √mean(x²), times weight, computed in float32 or wider; in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * weight).astype(x.dtype)
