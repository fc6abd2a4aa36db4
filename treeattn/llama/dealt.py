"""A Llama's weights dealt over the devices that hold its cache: each has a p-th of both ("Helix").

Queries, keys and values are products of each device's own rows, and come together before the
attention. By "reduce_scatter" and "all_to_all" the attention's merge leaves each device the heads
that its columns of the output projection multiply. That product, and the MLP's second one, have a
part of their sum on each device: they end in a sum over the devices. Everything else is computed
everywhere, as `layers` has it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from treeattn.devices.heads import own_heads, pad_heads
from treeattn.devices.merge import SCATTERED
from treeattn.devices.shards import over_shards
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, merge
from treeattn.llama import layers
from treeattn.llama.attentions import attend_shard, cache_inputs
from treeattn.llama.layers import Rotation, Static
from treeattn.llama.products import linear, rms_norm, summed_linear
from treeattn.llama.reading.config import Config
from treeattn.llama.weights import Layer, map_parts, place, put_whole

# The axis of a weight that is dealt over all devices of a mesh; those not named here are whole on
# every device. Zeros at its end fill up what the devices do not divide.
SHARDED_AXIS = {
    "embedding": 0,  # the vocabulary
    "head": 0,
    "qkv": 0,  # queries, keys and values one below the other, wherever a head ends
    "qkv_bias": 0,
    "output": 1,  # heads, ⌈h/p⌉ to a device, as a merge scatters them
    "gate_up": 0,  # the MLP's width: each device's rows of the gate, then its own of "up"
    "gate_up_bias": 0,
    "down": 1,
}
# A matrix of 8 bits has a scale for each row, dealt as its rows are.
SHARDED_AXIS |= {f"{field}_scale": 0 for field in ("embedding", "head", "qkv", "gate_up")}


# The layer


def dealt_layer(x, w: Layer, rotation, mask, cached, lengths, last, static: Static):
    """`layers.extend_layer` of dealt weights; all but they and the cache is whole everywhere."""
    axes = static.mesh.axis_names
    along_text = P(None, axes)
    specs = P(), layer_specs(w, axes), P(), P(), along_text, P(), P()
    on_device = functools.partial(_layer_on_device, static=static)
    mapped = over_shards(on_device, static.mesh, axes, specs)
    return mapped(x, w, rotation, mask, cached, lengths, last)


def _layer_on_device(rank, x, w: Layer, rotation, mask, cached, lengths, last, *, static: Static):
    """What device `rank` does: `w` and `cached` are its own, what it returns is everybody's.

    With h = 6 heads on 4 devices, a device has ⌈6/4⌉ = 2 heads' columns of the output projection,
    the last device two of zeros.
    """
    config = static.config
    axes = static.mesh.axis_names
    q, k, v = _queries_keys_values(x, w, rotation, config, axes)
    if last is not None:
        x = layers.take_token(x, last)
        q = layers.take_token(q, last)
    state = layers.attend_new(q, k, v, mask, last, static.implementation)
    scattered = cached is not None and static.attention in SCATTERED
    if scattered:
        state = _own_share(state, axes)
    if cached is not None:
        inputs = cache_inputs(q, *cached, lengths, static.implementation)
        earlier = attend_shard(inputs, rank, static.mesh, static.attention, scatter=True)
        state = merge(earlier, state)
    out = layers.join_heads(finalize(state)[0].astype(x.dtype))
    if not scattered:
        missing = w.output.shape[1] * static.mesh.size - out.shape[-1]
        out = own_heads(jnp.pad(out, [(0, 0), (0, 0), (0, missing)]), axes)
    x = x + summed_linear(out, w.output, w.output_bias, axes)
    hidden = layers.gated(rms_norm(x, w.mlp_norm, config.norm_epsilon), w)
    return x + summed_linear(hidden, w.down, w.down_bias, axes), (k, v)


def _queries_keys_values(x, w: Layer, rotation: Rotation, config: Config, axes):
    """`layers.queries_keys_values` inside shard_map, from each device's rows of the product.

    With 3 heads of 8, and as many of keys and values, 4 devices have 18 of 72 rows each.
    """
    normed = rms_norm(x, w.attention_norm, config.norm_epsilon)
    qkv = all_gather_last(linear(normed, w.qkv, w.qkv_bias), axes)
    return layers.split_heads(qkv[..., : _sizes(config)["qkv"]], rotation, config)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def queries_keys_values(
    x: Float[Array, "b l width"], w: Layer, rotation: Rotation, config: Config, mesh: Mesh
) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
    """`layers.queries_keys_values` of dealt weights."""
    axes = mesh.axis_names

    def on_device(rank, x, w, rotation):
        return _queries_keys_values(x, w, rotation, config, axes)

    return over_shards(on_device, mesh, axes, (P(), layer_specs(w, axes), P()))(x, w, rotation)


@functools.partial(
    jax.jit, static_argnames=("static", "attention"), donate_argnames=("x", "cached")
)
def prefill_layer(x, w: Layer, rotation: Rotation, cached, *, static: Static, attention):
    """`layers.prefill_layer`: what is dealt there is the text, and the weights come together."""
    w = undealt(replicated(w, static.mesh), static.config, static.mesh.size)
    return layers.prefill_layer(x, w, rotation, cached, static=static, attention=attention)


def _own_share(state: AttentionState, axes) -> AttentionState:
    """This device's ⌈h/p⌉ heads of a state (b, l, h) that every device has."""
    return jax.tree.map(lambda x: own_heads(x, axes, 2), pad_heads(state, axes))


def all_gather_last(x: Float[Array, "... part"], axes) -> Float[Array, "... all"]:
    """All devices' parts of the last axis."""
    return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)


def replicated(tree, mesh: Mesh):
    """The arrays, whole on every device: without a word XLA may leave a product's rows where the
    rows of its matrix are, 1/p of them on each."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))


DEALT = layers.Kind(dealt_layer, queries_keys_values)


# The weights


def put_dealt(x: np.ndarray, field: str, config: Config, mesh: Mesh) -> jax.Array:
    """A whole weight of that name on the devices, cut along its `SHARDED_AXIS`."""
    x = deal_field(x, field, config, mesh.size)
    return place(x, mesh, field_spec(field, mesh.axis_names))


def placing(config: Config, mesh: Mesh | None, shard_weights: bool) -> Callable:
    """What puts a weight, and its field's name, on the devices, as `load_weights` wants it."""
    if shard_weights:
        return functools.partial(put_dealt, config=config, mesh=mesh)
    return functools.partial(put_whole, mesh=mesh)


def field_spec(field: str, axes: tuple[str, ...]) -> P:
    """How a dealt weight of that name lies over the axes."""
    axis = SHARDED_AXIS.get(field)
    return P() if axis is None else P(*[None] * axis, axes)


def layer_specs(w: Layer, axes: tuple[str, ...]) -> Layer:
    """How each of a layer's dealt weights lies over the axes."""
    return _map_layer(lambda _, name: field_spec(name, axes), w)


def _sizes(config: Config) -> dict[str, int]:
    """The length of each weight's `SHARDED_AXIS`, before it is filled up; of the gate's rows, and
    of those of "up", for both together."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    return {
        "embedding": config.vocabulary,
        "head": config.vocabulary,
        "qkv": qkv,
        "output": config.heads * config.head_dim,
        "gate_up": config.mlp_width,
        "down": config.mlp_width,
    }


def deal_field(x: np.ndarray, field: str, config: Config, p: int) -> np.ndarray:
    """A whole weight of that name in the order in which p devices hold it, filled up with zeros.

    With 6 rows each of gate and up, and 4 devices: gate 0 1, up 0 1, gate 2 3, up 2 3, gate 4 5,
    up 4 5, and four rows of zeros.
    """
    if field not in SHARDED_AXIS:
        return x
    if field.startswith("gate_up"):
        halves = _filled_up(x.reshape(2, -1, *x.shape[1:]), 1, p)
        by_device = halves.reshape(2, p, -1, *x.shape[1:]).swapaxes(0, 1)
        return by_device.reshape(-1, *x.shape[1:])
    unit = config.head_dim if field == "output" else 1
    return _filled_up(x, SHARDED_AXIS[field], unit * p)


def _filled_up(x: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return np.pad(x, widths)


def undealt_field(x, field: str, config: Config, p: int):
    """What `deal_field` was given: a whole weight of that name, from how p devices hold it."""
    if field not in SHARDED_AXIS:
        return x
    size = _sizes(config)[field.removesuffix("_bias").removesuffix("_scale")]
    if field.startswith("gate_up"):
        return gate_and_up(x, p)[:, :size].reshape(2 * size, *x.shape[1:])
    return x[:, :size] if SHARDED_AXIS[field] else x[:size]


def gate_and_up(x, p: int):
    """(2, f, …): the gate's rows and those of "up", of (2·f, …) as p devices hold them."""
    by_device = x.reshape(p, 2, -1, *x.shape[1:])
    return by_device.swapaxes(0, 1).reshape(2, -1, *x.shape[1:])


def undealt(w: Layer, config: Config, p: int) -> Layer:
    """A layer's weights that p devices hold, as whole weights are."""
    return _map_layer(lambda x, name: undealt_field(x, name, config, p), w)


def _map_layer(f: Callable, w: Layer) -> Layer:
    """`map_parts` of each weight that the layer has."""
    items = w._asdict().items()
    return Layer(**{name: map_parts(f, x, name) for name, x in items if x is not None})
