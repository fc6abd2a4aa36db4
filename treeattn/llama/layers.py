"""What a Llama computes around its attention: its layers, as compiled programs.

On a CPU a step runs one program for its layers, once for each layer (`steps`): compiling takes a
second instead of half a minute, and the memory that one layer needs is free again for the next.

A layer attends to the cache and to its own new tokens separately, and merges the two states:
nothing is written before everything is read, and the new tokens may see each other in any way that
a mask says, a tree of candidates included. Writing is a program of its own (`cache.append`): one
that read a cache in a loop and then wrote to it would copy all of it in between.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from treeattn.devices.merge import own_heads, pad_heads
from treeattn.devices.shards import over_shards
from treeattn.idea.arrays import Array
from treeattn.idea.state import finalize, merge
from treeattn.kernel.attend import attend
from treeattn.llama.cache import ShardAttention, attend_cache, axes_of, fill, shard_lengths
from treeattn.llama.reading.config import Config
from treeattn.llama.weights import Layer, layer_specs, together_again


@dataclasses.dataclass(frozen=True)
class Static:
    """What the programs depend on besides arrays: another one compiles anew."""

    config: Config
    mesh: Mesh | None
    attention: ShardAttention | None  # towards the cache; None where there is none
    implementation: str | None
    sharded: bool = False  # the weights, over the mesh (`weights.SHARDED_AXIS`)
    scattered: bool = False  # what the attention returns: each device's share of the heads

    def whole(self, tree):
        """The arrays, on every device, where XLA might leave them sharded as the weights are."""
        if not self.sharded:
            return tree
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))


class Rotation(NamedTuple):
    """By which angle each pair of each token's queries and keys is turned."""

    cos: Float[Array, "#b l half"]
    sin: Float[Array, "#b l half"]


@functools.partial(jax.jit, static_argnames="out")
def embed(
    tokens: Int[Array, "b l"],
    embedding: Float[Array, "vocabulary width"],
    frequencies: Float[Array, " half"],
    lengths: Int[Array, " b"] | None = None,
    positions: Int[Array, "b l"] | None = None,
    *,
    out: NamedSharding | None = None,
) -> tuple[Float[Array, "b l width"], Rotation]:
    """The first layer's input, and the rotation of its tokens, computed in float32.

    positions: None: those after a cached text of `lengths`, or from 0 on
    out:       how the input lies, of an embedding that is sharded
    """
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = positions if lengths is None else lengths[:, None] + positions
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = (f(angles).astype(embedding.dtype) for f in (jnp.cos, jnp.sin))
    x = embedding[tokens]
    x = x if out is None else jax.lax.with_sharding_constraint(x, out)
    return x, Rotation(cos, sin)


@functools.partial(jax.jit, static_argnames="static")
def extend_layer(
    x: Float[Array, "b l width"],
    w: Layer,
    rotation: Rotation,
    *,
    static: Static,
    mask: Bool[Array, "#b l l"] | None = None,
    cached: tuple[Array, Array] | None = None,
    lengths: Int[Array, " b"] | None = None,
    last: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b _ width"], tuple[Array, Array]]:
    """A layer over new tokens: its output, and their keys and values (b, l, h_kv, d).

    mask:   which of the new tokens each of them sees; None: causal
    cached: the layer's keys and values in the cache (b, capacity, h_kv, d), of which `lengths`
            are in use; None without a cache
    last:   the one token of each row whose output is wanted (b, 1, width), without a mask;
            None: of all (b, l, width)
    """
    inputs = x, w, rotation, mask, cached, lengths, last
    if not static.sharded:
        return _layer(None, *inputs, static=static)
    axes, each = static.mesh.axis_names, P(None, static.mesh.axis_names)
    on_device = functools.partial(_layer, static=static)
    specs = P(), layer_specs(w, axes), P(), P(), each, P(), P()
    return over_shards(on_device, static.mesh, axes, specs)(*inputs)


def _layer(rank, x, w, rotation, mask, cached, lengths, last, *, static: Static):
    """`extend_layer`; of sharded weights, what one device does: `w` and `cached` are its own."""
    q, k, v = queries_keys_values(x, w, rotation, static)
    among_new = {"causal": True, "implementation": static.implementation}
    if last is not None:
        x, q = take_token(x, last), take_token(q, last)
        among_new |= {"causal": False, "kv_lengths": last + 1}
    elif mask is not None:
        among_new = {"mask": mask[:, None]}
    state = attend(q, k, v, **among_new)
    if static.scattered:
        axes = static.mesh.axis_names
        state = jax.tree.map(lambda y: own_heads(y, axes, 2), pad_heads(state, axes))
    if cached is not None and static.sharded:
        own = shard_lengths(lengths, rank, static.mesh.size)
        state = merge(static.attention(q, *cached, own, static.mesh.axis_names), state)
    elif cached is not None:
        state = merge(attend_cache(q, *cached, lengths, static.mesh, static.attention), state)
    out = finalize(state)[0].astype(x.dtype)
    return after_attention(x, w, out, static), (k, v)


# What sharded weights need besides: all parts of an array together, the sum of all.


def together(x: Float[Array, "... part"], static: Static) -> Float[Array, "... all"]:
    """All devices' parts of the last axis, where weights are sharded."""
    if not static.sharded:
        return x
    return jax.lax.all_gather(x, static.mesh.axis_names, axis=x.ndim - 1, tiled=True)


def total(x: Float[Array, "... d"], matrix, bias, static: Static) -> Float[Array, "... out"]:
    """`linear`, where each device has its part of x and of the matrix: summed in float32."""
    if not static.sharded:
        return linear(x, matrix, bias)
    wide = linear(x, matrix, dtype=jnp.promote_types(x.dtype, jnp.float32))
    y = jax.lax.psum(wide, static.mesh.axis_names)
    return (y if bias is None else y + bias).astype(x.dtype)


@functools.partial(
    jax.jit, static_argnames=("static", "attention"), donate_argnames=("x", "cached")
)
def prefill_layer(
    x: Float[Array, "b n width"],
    w: Layer,
    rotation: Rotation,
    cached: tuple[Array, Array],
    *,
    static: Static,
    attention: Callable,
) -> tuple[Float[Array, "b n width"], tuple[Array, Array]]:
    """A layer over whole prompts, sharded along n: its output, and the empty cache filled.

    attention: a function like `ring_attention`
    """
    if static.sharded:  # what is dealt out here is the text: a layer's weights come together
        w = together_again(static.whole(w), static.mesh.size)
    static = dataclasses.replace(static, sharded=False)
    q, k, v = queries_keys_values(x, w, rotation, static)
    axes = axes_of(static.mesh)
    out = attention(q, k, v, mesh=static.mesh, axis=axes, implementation=static.implementation)
    return after_attention(x, w, out, static), fill(cached, (k, v), static.mesh)


@functools.partial(jax.jit, static_argnames="static")
def queries_keys_values(
    x: Float[Array, "b l width"], w: Layer, rotation: Rotation, static: Static
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """What a layer's attention gets, from the layer's input x."""
    config, h, h_kv = static.config, static.config.heads, static.config.kv_heads
    qkv = linear(rms_norm(x, w.attention_norm, config.norm_epsilon), w.qkv, w.qkv_bias)
    qkv = together(qkv, static)[..., : (h + 2 * h_kv) * config.head_dim]
    qkv = qkv.reshape(*x.shape[:2], h + 2 * h_kv, config.head_dim)
    q, k, v = jnp.split(qkv, [h, h + h_kv], axis=2)
    return rotate(q, rotation), rotate(k, rotation), v


def after_attention(
    x: Float[Array, "b l width"], w: Layer, out: Float[Array, "b l h d"], static: Static
) -> Float[Array, "b l width"]:
    """The layer's output, from its input x and its attention's `out`, of all heads or its own."""
    out = out.reshape(*x.shape[:2], math.prod(out.shape[2:]))
    if static.sharded and not static.scattered:
        full = w.output.shape[1] * static.mesh.size
        out = jnp.pad(out, [(0, 0), (0, 0), (0, full - out.shape[-1])])
        out = own_heads(out, static.mesh.axis_names)
    elif not static.sharded:  # of weights that came together
        out = jnp.pad(out, [(0, 0), (0, 0), (0, w.output.shape[1] - out.shape[-1])])
    x = x + total(out, w.output, w.output_bias, static)
    h = linear(rms_norm(x, w.mlp_norm, static.config.norm_epsilon), w.gate_up, w.gate_up_bias)
    gate, up = jnp.split(h, 2, axis=-1)
    return x + total(jax.nn.silu(gate) * up, w.down, w.down_bias, static)


@functools.partial(jax.jit, static_argnames="static")
def to_logits(
    x: Float[Array, "b l width"],
    norm: Float[Array, " width"],
    head: Float[Array, "vocabulary width"],
    last: Int[Array, " b"] | None = None,
    *,
    static: Static,
) -> Float[Array, "b *l vocabulary"]:
    """After each token, or (b, vocabulary) after each row's token `last`; float32, or float64 for
    a model of float64."""
    if last is not None:
        x = take_token(x, last)[:, 0]
    x = rms_norm(x, norm, static.config.norm_epsilon)
    logits = linear(x, head, dtype=jnp.promote_types(x.dtype, jnp.float32))
    return static.whole(logits)[..., : static.config.vocabulary]


def take_token(x: Float[Array, "b l ..."], last: Int[Array, " b"]) -> Float[Array, "b 1 ..."]:
    """Token last[row] of every row; its first where `last` is −1, its only one too."""
    last = jnp.clip(last, 0, x.shape[1] - 1).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.take_along_axis(x, last, axis=1)


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "... d"]:
    """x / √mean(x²), times weight, computed in float32 or wider; in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * weight).astype(x.dtype)


FEW_TOKENS = 16  # up to which W xᵀ is computed no slower than x Wᵀ; from 32 on it is the slower


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


def rotate(x: Float[Array, "b l h d"], rotation: Rotation) -> Float[Array, "b l h d"]:
    """Rotary embedding: the pair (x_i, x_{i + d/2}) turned by angle i of its token."""
    cos, sin = (y[:, :, None] for y in rotation)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
