"""What a Llama computes around its attention: pure functions of arrays."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from treeattn.idea.arrays import Array
from treeattn.llama.config import Config
from treeattn.llama.weights import Layer


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "... d"]:
    """x / √mean(x²), times weight, computed in float32 or wider; in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * weight).astype(x.dtype)


FEW_TOKENS = 64  # up to which W xᵀ is computed faster than x Wᵀ


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


class Rotation(NamedTuple):
    """By which angle each pair of each token's queries and keys is turned."""

    cos: Float[Array, "#b l half"]
    sin: Float[Array, "#b l half"]


def rotation(positions: Int[Array, "#b l"], frequencies: Float[Array, " half"], dtype) -> Rotation:
    """The turns of tokens at these positions. Computed in float32, once for all layers."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))


def rotate(x: Float[Array, "b l h d"], turn: Rotation) -> Float[Array, "b l h d"]:
    """Rotary embedding: the pair (x_i, x_{i + d/2}) turned by angle i of its token."""
    cos, sin = (y[:, :, None] for y in turn)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def queries_keys_values(
    x: Float[Array, "b l width"], w: Layer, turn: Rotation, config: Config
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """What a layer's attention gets, from the layer's input x."""
    h, h_kv = config.heads, config.kv_heads
    qkv = linear(rms_norm(x, w.attention_norm, config.norm_epsilon), w.qkv, w.qkv_bias)
    qkv = qkv.reshape(*x.shape[:2], h + 2 * h_kv, config.head_dim)
    q, k, v = jnp.split(qkv, [h, h + h_kv], axis=2)
    return rotate(q, turn), rotate(k, turn), v


def after_attention(
    x: Float[Array, "b l width"], w: Layer, out: Float[Array, "b l h d"], config: Config
) -> Float[Array, "b l width"]:
    """The layer's output, from its input x and its attention's `out`."""
    x = x + linear(out.reshape(*x.shape[:2], -1), w.output, w.output_bias)
    h = linear(rms_norm(x, w.mlp_norm, config.norm_epsilon), w.gate_up, w.gate_up_bias)
    gate, up = jnp.split(h, 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, w.down, w.down_bias)


def to_logits(
    x: Float[Array, "... d"],
    norm: Float[Array, " d"],
    head: Float[Array, "vocabulary d"],
    epsilon: float,
) -> Float[Array, "... vocabulary"]:
    """float32, or float64 for a model of float64."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = rms_norm(x, norm, epsilon)
    return linear(x, head, dtype=wide)
