"""What a Llama computes around its attention: its layers, as compiled programs.

A layer attends to the cache and to its own new tokens separately, and merges the states: nothing
is written before everything is read, and the new tokens may see each other in any way that a mask
says, a tree of candidates included. Writing is a program of its own (`cache.append`): in one that
reads a cache in a loop and then writes to it, XLA would copy all of the cache.

Each layer of a step is a program of its own, the same for all: compiling takes a second instead of
half a minute, and the memory that one layer needs is free again for the next. Every device runs it
on the texts of its part of the batch; only the attention looks across.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from treeattn import finalize, merge, ring_attention
from treeattn_llama.arguments import Array
from treeattn_llama.attention import ShardAttention, attend_cache, attend_own
from treeattn_llama.cache import Pair, fill
from treeattn_llama.config import Config
from treeattn_llama.layout import Layout
from treeattn_llama.products import linear, rms_norm
from treeattn_llama.weights import Layer


class Rotation(NamedTuple):
    """By which angle each pair of each token's queries and keys is turned."""

    cos: Float[Array, "b l half"]
    sin: Float[Array, "b l half"]


@dataclasses.dataclass(frozen=True)
class Static:
    """What the programs depend on besides arrays: another one compiles anew."""

    config: Config
    layout: Layout
    attention: str | ShardAttention


@jax.jit
def embed(
    tokens: Int[Array, "b l"],
    positions: Int[Array, "b l"],
    embedding: Float[Array, "n width"],
    frequencies: Float[Array, " half"],
) -> tuple[Float[Array, "b l width"], Rotation]:
    """The first layer's input, and the rotation of its tokens, computed in float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles))
    return embedding[tokens], jax.tree.map(lambda x: x.astype(embedding.dtype), rotation)


@functools.partial(jax.jit, static_argnames="static")
def extend_layer(
    x: Float[Array, "b l width"],
    w: Layer,
    rotation: Rotation,
    *,
    mask: Bool[Array, "b l l"] | None = None,
    cached: Pair | None = None,
    lengths: Int[Array, " b"] | None = None,
    static: Static,
) -> tuple[Float[Array, "b l width"], Pair]:
    """A layer over new tokens: its output, and their keys and values (b, l, h_kv, d).

    mask:   which of the new tokens each of them sees; None: causal
    cached: the layer's keys and values in the cache (b, capacity, h_kv, d), of which `lengths`
            are in use; None where there are none to see
    """

    def body(x, w, rotation, mask, cached, lengths):
        q, k, v = queries_keys_values(x, w, rotation, static.config)
        among = {"causal": True} if mask is None else {"mask": mask[:, None]}
        state = attend_own(q, k, v, **among)
        if cached is not None:
            before = attend_cache(q, *cached, lengths, static.attention, static.layout)
            state = merge(before, state)
        out = finalize(state)[0].astype(x.dtype)
        return after_attention(x, w, out, static.config), (k, v)

    rows = static.layout.of_rows
    given = rows, P(), rows, rows, static.layout.of_keys, rows
    run = static.layout.on_each_device(body, given, rows)
    return run(x, w, rotation, mask, cached, lengths)


@functools.partial(jax.jit, static_argnames="static", donate_argnames=("x", "cached"))
def prefill_layer(
    x: Float[Array, "b n width"], w: Layer, rotation: Rotation, cached: Pair, *, static: Static
) -> tuple[Float[Array, "b n width"], Pair]:
    """A layer over whole prompts, sharded along n: its output, and the empty cache filled.

    Ring Attention: queries are dealt out as the keys are.
    """
    q, k, v = queries_keys_values(x, w, rotation, static.config)
    layout = static.layout
    out = ring_attention(q, k, v, sharding=layout.sharding(layout.of_keys))
    return after_attention(x, w, out, static.config), fill(cached, (k, v), layout=layout)


@functools.partial(jax.jit, static_argnames="epsilon")
def read_out(
    x: Float[Array, "b l width"],
    norm: Float[Array, " width"],
    head: Float[Array, "n width"],
    last: Int[Array, " b"] | None = None,
    *,
    epsilon: float,
) -> Float[Array, "b *l n"]:
    """The logits after each token, or (b, n) after each row's token `last`; float32, or float64 for
    a model of float64."""
    if last is not None:  # −1 in a row that has none
        x = x[jnp.arange(len(x)), jnp.maximum(last, 0)]
    x = rms_norm(x, norm, epsilon)
    return linear(x, head, dtype=jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnames="config")
def queries_keys_values(
    x: Float[Array, "b l width"], w: Layer, rotation: Rotation, config: Config
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """What a layer's attention gets, from the layer's input x: rotary embedding included."""
    normed = rms_norm(x, w.attention_norm, config.norm_epsilon)
    h = config.heads
    h_kv = config.kv_heads
    heads = linear(normed, w.qkv, w.qkv_bias)
    heads = heads.reshape(*x.shape[:2], h + 2 * h_kv, config.head_dim)
    q, k, v = jnp.split(heads, [h, h + h_kv], axis=2)
    return rotate(q, rotation), rotate(k, rotation), v


def after_attention(
    x: Float[Array, "b l width"], w: Layer, out: Float[Array, "b l h d"], config: Config
) -> Float[Array, "b l width"]:
    """The layer's output, from its input x and its attention's `out`."""
    out = out.reshape(*out.shape[:2], math.prod(out.shape[2:]))
    x = x + linear(out, w.output, w.output_bias)
    normed = rms_norm(x, w.mlp_norm, config.norm_epsilon)
    gate, up = jnp.split(linear(normed, w.gate_up, w.gate_up_bias), 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, w.down, w.down_bias)


def rotate(x: Float[Array, "b l h d"], rotation: Rotation) -> Float[Array, "b l h d"]:
    """Rotary embedding: the pair (x_i, x_{i + d/2}) turned by angle i of its token."""
    cos, sin = (y[:, :, None] for y in rotation)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
