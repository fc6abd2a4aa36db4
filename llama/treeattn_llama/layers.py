"""What a Llama computes around its attention: its layers, as compiled programs.

A layer attends to the cache and to its own new tokens separately, and merges the states, or by one
kernel: nothing is written before everything is read, and the new tokens may see each other in any
way that a mask says, a tree of candidates included. Writing is a program of its own
(`cache.append`): one that read a cache in a loop and then wrote to it would copy all of it between.

On a CPU each layer of a step is a program of its own, the same for all: compiling takes a second
instead of half a minute, and the memory that one layer needs is free again for the next. A GPU runs
a layer of a decoding step in less time than the host takes to dispatch it: there few tokens go
through all layers in one program, and another writes what they bring into the cache (`Programs`).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from treeattn.devices.layout import Layout
from treeattn.devices.mesh import Axes
from treeattn.idea.arrays import Array
from treeattn.idea.state import finalize, merge
from treeattn_llama import cache as caches
from treeattn_llama import fixed, int8, vocabulary
from treeattn_llama.attentions import Static, attend_cache, attend_new, attend_with_new
from treeattn_llama.cache import Entries
from treeattn_llama.int8 import Int8Matrix
from treeattn_llama.placement import Placement
from treeattn_llama.products import linear, rms_norm, take_token
from treeattn_llama.reading.config import Config
from treeattn_llama.weights import Layer, Weights


class Rotation(NamedTuple):
    """By which angle each pair of each token's queries and keys is turned."""

    cos: Float[Array, "#b l half"]
    sin: Float[Array, "#b l half"]


@functools.partial(jax.jit, static_argnames=("place", "along", "exact"))
def embed(
    tokens: Int[Array, "b l"],
    embedding: Float[Array, "n width"] | Int8Matrix,
    frequencies: Float[Array, " half"],
    lengths: Int[Array, " b"] | None = None,
    positions: Int[Array, "b l"] | None = None,
    *,
    place: Placement = Placement(),  # noqa: B008
    along: Axes = (),
    exact: bool = False,
) -> tuple[Float[Array, "b l width"], Rotation]:
    """The first layer's input, and the rotation of its tokens, computed in float32.

    positions: None: those after a cached text of `lengths`, or from 0 on
    place:     how the model lies on the devices
    along:     the axes of its mesh along which each text's tokens are dealt
    exact:     whether nothing around a token may move its bits (`fixed`)
    """
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = positions if lengths is None else lengths[:, None] + positions
    x = vocabulary.embed_tokens(embedding, tokens, place, along)
    if exact:
        return x, Rotation(*fixed.cos_and_sin(positions, frequencies))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos = jnp.cos(angles).astype(embedding.dtype)
    sin = jnp.sin(angles).astype(embedding.dtype)
    return x, Rotation(cos, sin)


def plain_layer(
    x: Float[Array, "b l width"],
    w: Layer,
    rotation: Rotation,
    mask: Bool[Array, "#b l l"] | None,
    cached: tuple[Entries, Entries] | None,
    lengths: Int[Array, " b"] | None,
    last: Int[Array, " b"] | None,
    static: Static,
) -> tuple[Float[Array, "b _ width"], tuple[Entries, Entries]]:
    """`extend_layer` of weights that every device has whole."""
    config = static.config
    q, k, v = queries_keys_values(x, w, rotation, config)
    (k, v), entries = caches.as_cached(k, v, static.cache_dtype)
    if last is not None:
        x = take_token(x, last)
        q = take_token(q, last)
    out = attend_with_new(q, k, v, mask, last, cached, lengths, static)
    if out is None:
        state = attend_new(q, k, v, mask, last, static.implementation)
        if cached is not None:
            state = merge(attend_cache(q, *cached, lengths, static), state)
        out = finalize(state)[0].astype(x.dtype)
    return after_attention(x, w, out, config), entries


@functools.partial(jax.jit, static_argnames=("config", "place"))
def queries_keys_values(
    x: Float[Array, "b l width"],
    w: Layer,
    rotation: Rotation,
    config: Config,
    place: Placement = Placement(),  # noqa: B008
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """What a layer's attention gets, from the layer's input x. Of whole weights, on any mesh."""
    del place
    normed = rms_norm(x, w.attention_norm, config.norm_epsilon)
    return split_heads(linear(normed, w.qkv, w.qkv_bias), rotation, config)


def split_heads(
    qkv: Float[Array, "b l qkv"], rotation: Rotation, config: Config
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """Queries, keys and values by heads, rotary embedding included."""
    h = config.heads
    h_kv = config.kv_heads
    heads = qkv.reshape(*qkv.shape[:2], h + 2 * h_kv, config.head_dim)
    q, k, v = jnp.split(heads, [h, h + h_kv], axis=2)
    return rotate(q, rotation), rotate(k, rotation), v


def after_attention(
    x: Float[Array, "b l width"], w: Layer, out: Float[Array, "b l h d"], config: Config
) -> Float[Array, "b l width"]:
    """The layer's output, from its input x and its attention's `out`."""
    x = x + linear(join_heads(out), w.output, w.output_bias)
    hidden = gated(rms_norm(x, w.mlp_norm, config.norm_epsilon), w)
    return x + linear(hidden, w.down, w.down_bias)


def join_heads(out: Float[Array, "b l h d"]) -> Float[Array, "b l h*d"]:
    """The heads of each token, side by side."""
    return out.reshape(*out.shape[:2], math.prod(out.shape[2:]))


def gated(x: Float[Array, "b l width"], w: Layer) -> Float[Array, "b l f"]:
    """The MLP's hidden activations, silu(gate) · up."""
    gate, up = jnp.split(linear(x, w.gate_up, w.gate_up_bias), 2, axis=-1)
    return jax.nn.silu(gate) * up


@functools.partial(jax.jit, static_argnames="static")
def extend_layer(
    x: Float[Array, "b l width"],
    w: Layer,
    rotation: Rotation,
    *,
    static: Static,
    mask: Bool[Array, "#b l l"] | None = None,
    cached: tuple[Entries, Entries] | None = None,
    lengths: Int[Array, " b"] | None = None,
    last: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b _ width"], tuple[Entries, Entries]]:
    """A layer over new tokens: its output, and their keys and values (b, l, h_kv, d).

    mask:   which of the new tokens each of them sees; None: causal
    cached: the layer's keys and values in the cache (b, capacity, h_kv, d), of which `lengths`
            are in use; None without a cache. They and what is returned are as `cache.Entries`
    last:   the one token of each row whose output is wanted (b, 1, width), without a mask;
            None: of all (b, l, width)
    """
    return static.layer(x, w, rotation, mask, cached, lengths, last, static)


@functools.partial(
    jax.jit, static_argnames=("static", "attention"), donate_argnames=("x", "cached")
)
def prefill_layer(
    x: Float[Array, "b n width"],
    w: Layer,
    rotation: Rotation,
    cached: tuple[Entries, Entries],
    *,
    static: Static,
    attention: Callable,
) -> tuple[Float[Array, "b n width"], tuple[Entries, Entries]]:
    """A layer over whole prompts, sharded along n: its output, and the empty cache filled.

    attention: a function like `ring_attention`
    """
    q, k, v = queries_keys_values(x, w, rotation, static.config)
    (k, v), entries = caches.as_cached(k, v, static.cache_dtype)
    layout = static.place.layout
    where = {"mesh": layout.mesh, "axis": layout.axes}
    out = attention(q, k, v, implementation=static.implementation, **where)
    return after_attention(x, w, out, static.config), caches.fill(cached, entries, layout)


@functools.partial(jax.jit, static_argnames=("config", "place", "along", "exact"))
def to_logits(
    x: Float[Array, "b l width"],
    norm: Float[Array, " width"],
    head: Float[Array, "n width"] | Int8Matrix,
    last: Int[Array, " b"] | None = None,
    *,
    config: Config,
    place: Placement = Placement(),  # noqa: B008
    along: Axes = (),
    exact: bool = False,
) -> Float[Array, "b *l vocabulary"]:
    """After each token, or (b, vocabulary) after each row's token `last`; float32, or float64 for
    a model of float64.

    place, along, exact: as in `embed`
    """

    def read(x, norm, head):
        if exact:
            return int8.exact_product(fixed.rms_norm(x, norm, config.norm_epsilon), head)
        x = rms_norm(x, norm, config.norm_epsilon)
        return linear(x, head, dtype=jnp.promote_types(x.dtype, jnp.float32))

    logits = vocabulary.to_logits(read, x, norm, head, last, place, along)
    return logits[..., : config.vocabulary]  # a head that is dealt out may have rows of zeros


def rotate(x: Float[Array, "b l h d"], rotation: Rotation) -> Float[Array, "b l h d"]:
    """Rotary embedding: the pair (x_i, x_{i + d/2}) turned by angle i of its token."""
    cos, sin = (y[:, :, None] for y in rotation)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Kind(NamedTuple):
    """What computes a model's layers: functions named so here, or others that take the same."""

    layer: Callable
    queries_keys_values: Callable
    prefill_layer: Callable


PLAIN = Kind(plain_layer, queries_keys_values, prefill_layer)


# A step over all layers


def run_layers(
    weights: Weights,
    tokens,
    cache: caches.Cache,
    positions,
    mask,
    last,
    *,
    static: Static,
    see_cache: bool,
    exact: bool = False,
) -> tuple[Float[Array, "b _ width"], caches.NewEntries]:
    """(the last layer's output, what all layers have to write), of checked arguments.

    last:      (b,) as in `extend_layer`, for the last layer
    see_cache: whether the tokens see what is cached
    exact:     as in `embed`
    """
    table = weights.embedding
    at = cache.lengths, positions
    how = {"place": static.place, "exact": exact}
    x, rotation = embed(tokens, table, weights.frequencies, *at, **how)
    entries = []
    final = len(weights.layers) - 1
    for i, (w, cached) in enumerate(zip(weights.layers, cache.layers, strict=True)):
        options = {"mask": mask, "last": last if i == final else None}
        if see_cache:
            options |= {"cached": cached, "lengths": cache.lengths}
        x, new = extend_layer(x, w, rotation, static=static, **options)
        entries.append(new)
    return x, tuple(entries)


def write_entries(arrays, new: caches.NewEntries, lengths, counts, select, layout: Layout | None):
    """(k, v, lengths) of a cache, of whose layers `arrays` = (k, v) are given up, and written."""
    written = [
        caches.append(cached, entries, lengths, counts, layout=layout, select=select)
        for cached, entries in zip(zip(*arrays, strict=True), new, strict=True)
    ]
    return (*zip(*written, strict=True), caches.advance(lengths, counts))


class Programs(NamedTuple):
    """How a step runs: `run_layers` and `write_entries`, compiled as one program each, or not."""

    run: Callable
    write: Callable


PROGRAM_A_LAYER = Programs(run_layers, write_entries)
ONE_PROGRAM = Programs(
    jax.jit(run_layers, static_argnames=("static", "see_cache", "exact")),
    jax.jit(write_entries, static_argnames="layout", donate_argnames="arrays"),
)
# More tokens than these keep a device busy layer by layer.
MAX_TOKENS_IN_ONE_PROGRAM = {"cuda": 64, "gpu": 64}


def programs(platform: str | None, tokens: int) -> Programs:
    """Those for so many tokens of a text on devices of that platform."""
    few = tokens <= MAX_TOKENS_IN_ONE_PROGRAM.get(platform, 0)
    return ONE_PROGRAM if few else PROGRAM_A_LAYER
