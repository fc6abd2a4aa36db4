"""A Llama's layers where more is dealt over a mesh than the text: rows, heads, weights.

A device has its own rows and its own heads, with the weights that make them. In its group, the
devices that share these, each has a part of the text; and, with shard_weights, of the weights
("Helix"). Then queries, keys and values are products of each device's own rows of a matrix, and
come together before the attention. By "reduce_scatter" and "all_to_all" the attention's merge
leaves each device the heads that its columns of the output projection multiply. That product, and
the MLP's second one, have a part of their sum on each device that has a part of the weights: they
end in a sum over those. Everything else is computed everywhere, as `layers` has it.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from treeattn.devices.heads import own_heads, pad_heads
from treeattn.devices.merge import SCATTERED
from treeattn.devices.mesh import Axes
from treeattn.devices.shards import over_shards
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, merge
from treeattn_llama import cache as caches
from treeattn_llama import layers
from treeattn_llama.attentions import (
    Static,
    attend_new,
    attend_shard,
    attend_with_new,
    cache_inputs,
)
from treeattn_llama.dealing import layer_specs, together
from treeattn_llama.layers import Rotation
from treeattn_llama.placement import Placement, own_config
from treeattn_llama.products import linear, rms_norm, summed_linear, take_token
from treeattn_llama.reading.config import Config
from treeattn_llama.weights import Layer


def dealt_layer(x, w: Layer, rotation, mask, cached, lengths, last, static: Static):
    """`layers.extend_layer`, all of it on each device with what is its own."""
    on_device = functools.partial(_layer_on_device, static=static)
    return layer_over_shards(on_device, x, w, rotation, mask, cached, lengths, last, static.place)


def layer_over_shards(
    on_device, x, w: Layer, rotation, mask, cached, lengths, last, place: Placement
):
    """on_device(rank, x, …) on each device: (its rows' outputs, its heads' keys and values)."""
    layout = place.layout
    if layout is None:
        return on_device(0, x, w, rotation, mask, cached, lengths, last)
    rows = layout.rows()
    specs = (
        rows,
        layer_specs(w, place.weight_axes),
        place.of_rows(rotation[0]),
        place.of_rows(mask),
        layout.spec(layout.axes),
        rows,
        rows,
    )
    mapped = over_shards(on_device, layout.mesh, layout.axes, specs, (rows, layout.spec()))
    return mapped(x, w, rotation, mask, cached, lengths, last)


def _layer_on_device(rank, x, w: Layer, rotation, mask, cached, lengths, last, *, static: Static):
    """What a device does: `w` and `cached` are its own, x and what it returns those of its group.

    With h = 6 heads in a group whose 4 devices share the weights, too, a device has ⌈6/4⌉ = 2
    heads' columns of the output projection, the last device two of zeros.
    """
    place = static.place
    config = own_config(static.config, place)
    parts = place.parts
    q, k, v = _queries_keys_values(x, w, rotation, config, parts)
    (k, v), entries = caches.as_cached(k, v, static.cache_dtype)
    if last is not None:
        x = take_token(x, last)
        q = take_token(q, last)
    out = attend_with_new(q, k, v, mask, last, cached, lengths, static)
    scattered = cached is not None and bool(parts) and static.attention in SCATTERED
    if out is None:
        state = attend_new(q, k, v, mask, last, static.implementation)
        if scattered:
            state = _own_share(state, parts)
        if cached is not None:
            inputs = cache_inputs(q, *cached, lengths, static.implementation)
            how = {"scatter": scattered, "wire": static.wire}
            earlier = attend_shard(inputs, rank, place.layout, static.attention, **how)
            state = merge(earlier, state)
        out = finalize(state)[0].astype(x.dtype)
    out = layers.join_heads(out)
    if parts and not scattered:
        missing = w.output.shape[1] * place.members - out.shape[-1]
        out = own_heads(jnp.pad(out, [(0, 0), (0, 0), (0, missing)]), parts)
    return _after_attention(x, w, out, config, place.weight_axes), entries


def _queries_keys_values(x, w: Layer, rotation: Rotation, config: Config, parts: Axes):
    """`layers.queries_keys_values` of one group, inside shard_map.

    With 3 heads of 8, and as many of keys and values, 4 devices that share the weights have 18 of
    72 rows each.
    """
    normed = rms_norm(x, w.attention_norm, config.norm_epsilon)
    qkv = linear(normed, w.qkv, w.qkv_bias)
    if parts:
        qkv = jax.lax.all_gather(qkv, parts, axis=qkv.ndim - 1, tiled=True)
        qkv = qkv[..., : (config.heads + 2 * config.kv_heads) * config.head_dim]
    return layers.split_heads(qkv, rotation, config)


def _after_attention(x, w: Layer, out: Float[Array, "b l part"], config: Config, axes: Axes):
    """`layers.after_attention`, each device of the axes having its part of the products' sums."""
    x = x + summed_linear(out, w.output, w.output_bias, axes)
    hidden = layers.gated(rms_norm(x, w.mlp_norm, config.norm_epsilon), w)
    return x + summed_linear(hidden, w.down, w.down_bias, axes)


@functools.partial(jax.jit, static_argnames=("config", "place"))
def queries_keys_values(
    x: Float[Array, "b l width"], w: Layer, rotation: Rotation, config: Config, place: Placement
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """`layers.queries_keys_values`, of what is dealt."""
    own = own_config(config, place)
    on_device = functools.partial(_queries_keys_values, config=own, parts=place.parts)
    return heads_over_shards(on_device, x, w, rotation, place)


def heads_over_shards(on_device, x, w: Layer, rotation, place: Placement, along: Axes = ()):
    """on_device(x, w, rotation) on each device: its group's queries, keys and values.

    along: the axes of the mesh along which the tokens of x are dealt
    """
    layout = place.layout
    if layout is None:
        return on_device(x, w, rotation)

    def body(_, *given):
        return on_device(*given)

    how = place.of_rows(x, along), layer_specs(w, place.weight_axes)
    specs = *how, place.of_rows(rotation[0], along)
    mapped = over_shards(body, layout.mesh, layout.axes, specs, layout.spec(along))
    return mapped(x, w, rotation)


@functools.partial(
    jax.jit, static_argnames=("static", "attention"), donate_argnames=("x", "cached")
)
def prefill_layer(x, w: Layer, rotation: Rotation, cached, *, static: Static, attention):
    """`layers.prefill_layer`: with the text dealt out, a group's weights come together."""
    place = static.place
    layout = place.layout
    axes = layout.axes
    config = own_config(static.config, place)

    def before(x, w, rotation):
        return _queries_keys_values(x, together(w, static.config, place), rotation, config, ())

    def after(_, x, w, out):
        w = together(w, static.config, place)
        return _after_attention(x, w, layers.join_heads(out), config, layout.heads)

    q, k, v = heads_over_shards(before, x, w, rotation, place, along=axes)
    (k, v), entries = caches.as_cached(k, v, static.cache_dtype)
    where = {"mesh": layout.mesh, "axis": axes}
    if layout.batch or layout.heads:
        where |= {"batch_axis": layout.batch, "head_axis": layout.heads}
    out = attention(q, k, v, implementation=static.implementation, **where)
    rows = place.of_rows(x, axes)
    specs = rows, layer_specs(w, place.weight_axes), layout.spec(axes)
    x = over_shards(after, layout.mesh, axes, specs, rows)(x, w, out)
    return x, caches.fill(cached, entries, layout)


def _own_share(state: AttentionState, axes: Axes) -> AttentionState:
    """This device's ⌈h/p⌉ heads of a state (b, l, h) that every device has."""
    return jax.tree.map(lambda x: own_heads(x, axes, 2), pad_heads(state, axes))


DEALT = layers.Kind(dealt_layer, queries_keys_values, prefill_layer)
