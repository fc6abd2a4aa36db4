"""The layers of a Llama, as compiled programs: all that it computes around its attention.

New tokens attend to the cache and to each other separately, and the two states merge. So nothing is
written before everything is read, and the new tokens may see each other by any mask, for example
that of a tree of candidates. Writing is a program of its own (`cache.append`), because XLA would
copy the whole cache in a program that reads it in a loop and writes it afterwards.

All layers of a step run one program, one after the other. It compiles in a second, all layers in
one program in half a minute, and the memory that a layer needs is free again for the next layer.
Every device runs the program on its texts; only the attention communicates.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float

from treeattn import finalize, merge, ring_attention
from treeattn.checks import Array
from treeattn_llama.arguments import Hidden, Keys, Lengths, Queries, Tokens
from treeattn_llama.attention import ShardAttention, attend_cache, attend_own
from treeattn_llama.cache import Pair, fill
from treeattn_llama.config import Config
from treeattn_llama.text_shards import TextShards
from treeattn_llama.weights import Layer

# The cosines and sines of the angles by which the pairs of each token are rotated.
Rotation = tuple[Float[Array, "b l half"], Float[Array, "b l half"]]


class Static(NamedTuple):
    """The static argument of the layers' programs; each value compiles its own."""

    config: Config
    shards: TextShards
    attention: str | ShardAttention


@jax.jit
def embed(
    tokens: Tokens,
    positions: Tokens,
    embedding: Float[Array, "n width"],
    frequencies: Float[Array, " half"],
) -> tuple[Hidden, Rotation]:
    """The first layer's input, and the rotation of the tokens, computed in float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    dtype = embedding.dtype
    return embedding[tokens], (jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))


@functools.partial(jax.jit, static_argnames="static")
def extend_layer(
    x: Hidden,
    w: Layer,
    rotation: Rotation,
    *,
    mask: Bool[Array, "b l l"] | None = None,
    cached: Pair | None = None,
    lengths: Lengths | None = None,
    static: Static,
) -> tuple[Hidden, Pair]:
    """A layer over new tokens: its output, and the tokens' keys and values (b, l, h_kv, d).

    mask:   True where a new token sees another; None is causal
    cached: the layer's keys and values in the cache (b, capacity, h_kv, d), of which `lengths`
            are in use; None if the cache is empty
    """

    def body(x, w, rotation, mask, cached, lengths):
        q, k, v = queries_keys_values(x, w, rotation, static.config)
        among = {"causal": True} if mask is None else {"mask": mask[:, None]}
        state = attend_own(q, k, v, **among)
        if cached is not None:
            before = attend_cache(q, *cached, lengths, static.attention, static.shards)
            state = merge(before, state)
        out = finalize(state)[0].astype(x.dtype)
        return after_attention(x, w, out, static.config), (k, v)

    texts = static.shards.of_texts
    in_specs = texts, P(), texts, texts, static.shards.of_keys, texts
    run = static.shards.on_each_device(body, in_specs, texts)
    return run(x, w, rotation, mask, cached, lengths)


@functools.partial(jax.jit, static_argnames="static", donate_argnames=("x", "cached"))
def prefill_layer(
    x: Float[Array, "b n width"], w: Layer, rotation: Rotation, cached: Pair, *, static: Static
) -> tuple[Float[Array, "b n width"], Pair]:
    """A layer over whole prompts, sharded along n: its output, and the empty cache filled.

    The attention is Ring Attention, with queries sharded as the keys are.
    """
    q, k, v = queries_keys_values(x, w, rotation, static.config)
    shards = static.shards
    out = ring_attention(q, k, v, sharding=shards.sharding(shards.of_keys))
    return after_attention(x, w, out, static.config), fill(cached, (k, v), shards=shards)


@functools.partial(jax.jit, static_argnames="epsilon")
def read_out(
    x: Hidden,
    norm: Float[Array, " width"],
    head: Float[Array, "n width"],
    last: Lengths | None = None,
    *,
    epsilon: float,
) -> Float[Array, "b *l n"]:
    """The logits after each token, or (b, n), those after token `last` of each text.

    They are in float32, or float64 if the model is.
    """
    if last is not None:  # −1 in a text without tokens
        x = x[jnp.arange(len(x)), jnp.maximum(last, 0)]
    x = rms_norm(x, norm, epsilon)
    return linear(x, head, dtype=jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnames="config")
def queries_keys_values(
    x: Hidden, w: Layer, rotation: Rotation, config: Config
) -> tuple[Queries, Keys, Keys]:
    """The queries, keys and values of a layer with input x, after the rotary embedding."""
    normed = rms_norm(x, w.attention_norm, config.norm_epsilon)
    h = config.heads
    h_kv = config.kv_heads
    heads = linear(normed, w.qkv, w.qkv_bias)
    heads = heads.reshape(*x.shape[:2], h + 2 * h_kv, config.head_dim)
    q, k, v = jnp.split(heads, [h, h + h_kv], axis=2)
    return rotate(q, rotation), rotate(k, rotation), v


def after_attention(x: Hidden, w: Layer, out: Queries, config: Config) -> Hidden:
    """The output of a layer with input x and attention `out`."""
    out = out.reshape(*out.shape[:2], math.prod(out.shape[2:]))
    x = x + linear(out, w.output, w.output_bias)
    normed = rms_norm(x, w.mlp_norm, config.norm_epsilon)
    gate, up = jnp.split(linear(normed, w.gate_up, w.gate_up_bias), 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, w.down, w.down_bias)


def rotate(x: Queries, rotation: Rotation) -> Queries:
    """Rotary embedding: the pair (x_i, x_{i + d/2}) rotated by angle i of its token."""
    cos, sin = (y[:, :, None] for y in rotation)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# Up to 16 tokens W xᵀ is no slower than x Wᵀ; from 32 tokens on it is slower.
#
# XLA:CPU rearranges the matrix for 2 tokens or more, so 2 to 8 tokens take 1.3 to 1.8 times as long
# as one, and 16 about twice as long. No alternative was faster (3072 × 576, two cores with AVX-512,
# jax 0.8.3 and 0.12, 2026-11-23): the transpose stored instead (2 tokens take hardly longer than
# one, 8 as long as before), the matrix in 2 to 48 blocks (up to twice as long), tokens padded to
# 16, one product for each token (for 8, three times as long), sums of elementwise products by 16 to
# 64 lanes (as long, up to 30 times as long), and XLA's options for other libraries.
FEW_TOKENS = 16


def linear(
    x: Float[Array, "... d"],
    matrix: Float[Array, "out d"],
    bias: Float[Array, " out"] | None = None,
    dtype=None,
) -> Float[Array, "... out"]:
    """x Wᵀ + bias, in `dtype`, or that of x. The matrix may have another dtype."""
    if math.prod(x.shape[:-1]) > FEW_TOKENS:
        y = jnp.einsum("...d,od->...o", x, matrix, preferred_element_type=dtype)
    else:  # XLA:CPU rearranges the second factor, so the smaller one comes second
        y = jnp.einsum("od,...d->o...", matrix, x, preferred_element_type=dtype)
        y = jnp.moveaxis(y, 0, -1)
    return (y if bias is None else y + bias).astype(dtype or x.dtype)


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "... d"]:
    """weight · x / √(mean(x²) + ε) in the dtype of x, computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * weight).astype(x.dtype)
