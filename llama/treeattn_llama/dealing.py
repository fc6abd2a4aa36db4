"""A Llama's weights dealt over devices: which rows or columns of each matrix a device has.

First among the devices along the heads' axis, each of which has a smaller model (`own_config`);
then, where weights are sharded beside the cache, among those along the text's, each of which has
some rows or columns of that.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from treeattn.devices.mesh import Axes
from treeattn.idea.arrays import namespace
from treeattn_llama.placement import Placement, own_config
from treeattn_llama.reading.config import Config
from treeattn_llama.weights import Layer, Weights, map_fields, map_parts, place, put_whole

# The axis of a weight that is dealt over the devices; those not named here are whole on every
# device. Zeros fill up what the devices do not divide.
SHARDED_AXIS = {
    "embedding": 0,  # the vocabulary
    "head": 0,
    "qkv": 0,  # queries, keys and values one below the other; among a group wherever a head ends
    "qkv_bias": 0,
    "output": 1,  # heads, ⌈h/p⌉ to a device, as a merge scatters them
    "gate_up": 0,  # the MLP's width: each device's rows of the gate, then its own of "up"
    "gate_up_bias": 0,
    "down": 1,
}
# A matrix of 8 bits has a scale for each row, dealt as its rows are.
SHARDED_AXIS |= {f"{field}_scale": 0 for field in ("embedding", "head", "qkv", "gate_up")}
VOCABULARY = "embedding", "head"  # as a whole, whatever the axes: logits come in its order


def deal_field(x, field: str, config: Config, at: Placement):
    """A whole weight of that name in the order in which the devices hold it, filled up with zeros.

    With 6 rows each of gate and up, and 4 devices: gate 0 1, up 0 1, gate 2 3, up 2 3, gate 4 5,
    up 4 5, and four rows of zeros.
    """
    if field not in SHARDED_AXIS:
        return x
    axis = SHARDED_AXIS[field]
    name = _name(field)
    if name in VOCABULARY:
        return _deal(x, axis, (config.vocabulary,), 1, at.groups * at.members)
    groups = np.split(_deal(x, axis, _of_heads(name, config), 1, at.groups), at.groups, axis)
    within = *_of_group(name, own_config(config, at)), at.members
    dealt = [_deal(group, axis, *within) for group in groups]
    return dealt[0] if at.groups == 1 else np.concatenate(dealt, axis)


def undeal_field(x, field: str, config: Config, at: Placement):
    """What `deal_field` was given: a whole weight of that name, from how the devices hold it."""
    if field not in SHARDED_AXIS:
        return x
    axis = SHARDED_AXIS[field]
    name = _name(field)
    if name in VOCABULARY:
        return _undeal(x, axis, (config.vocabulary,), 1, at.groups * at.members)
    own = own_config(config, at)
    groups = [undeal_within(y, field, own, at.members) for y in np.split(x, at.groups, axis)]
    x = groups[0] if at.groups == 1 else np.concatenate(groups, axis)
    return _undeal(x, axis, _of_heads(name, config), 1, at.groups)


def undeal_within(x, field: str, own: Config, members: int):
    """A layer's weight of the smaller model `own`, from how a group's devices hold it."""
    if field not in SHARDED_AXIS:
        return x
    return _undeal(x, SHARDED_AXIS[field], *_of_group(_name(field), own), members)


def _name(field: str) -> str:
    """That of the matrix whose bias or scale it is."""
    return field.removesuffix("_bias").removesuffix("_scale")


def _of_heads(name: str, config: Config) -> tuple[int, ...]:
    """The lengths of what lies one after the other along a weight's `SHARDED_AXIS`, and of which
    each device along the heads' axis has its part."""
    q = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    f = config.mlp_width
    return {"qkv": (q, kv, kv), "output": (q,), "gate_up": (f, f), "down": (f,)}[name]


def _of_group(name: str, own: Config) -> tuple[tuple[int, ...], int]:
    """(such lengths, of which each device of a group has a part; in multiples of so many)."""
    lengths = _of_heads(name, own)
    if name == "qkv":
        return (sum(lengths),), 1
    return lengths, own.head_dim if name == "output" else 1


def _deal(x, axis: int, lengths: tuple[int, ...], unit: int, n: int):
    """Of each block its first n-th, one after the other, then of each its second, and so on."""
    if n == 1:
        return x
    xp = namespace(x)
    blocks = xp.split(x, np.cumsum(lengths)[:-1], axis)
    parts = [xp.split(_filled_up(block, axis, unit * n), n, axis) for block in blocks]
    return xp.concatenate([part[i] for i in range(n) for part in parts], axis)


def _undeal(x, axis: int, lengths: tuple[int, ...], unit: int, n: int):
    """What `_deal` was given."""
    if n == 1:
        return x
    xp = namespace(x)
    own = [-(-length // (unit * n)) * unit for length in lengths]
    shares = [xp.split(share, np.cumsum(own)[:-1], axis) for share in xp.split(x, n, axis)]
    blocks = [xp.concatenate(parts, axis) for parts in zip(*shares, strict=True)]
    cut = [
        xp.split(block, [length], axis)[0] for block, length in zip(blocks, lengths, strict=True)
    ]
    return xp.concatenate(cut, axis)


def _filled_up(x, axis: int, multiple: int):
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return namespace(x).pad(x, widths)


# On the devices


def placing(config: Config, at: Placement) -> Callable[[np.ndarray, str], jax.Array]:
    """What puts a whole weight of a field's name on the devices, as `load_weights` wants it."""
    mesh = None if at.layout is None else at.layout.mesh
    if not at.weight_axes:
        return functools.partial(put_whole, mesh=mesh)

    def put_dealt(x: np.ndarray, field: str) -> jax.Array:
        return place(deal_field(x, field, config, at), mesh, field_spec(field, at.weight_axes))

    return put_dealt


def move(weights: Weights, config: Config, before: Placement, after: Placement) -> Weights:
    """The same weights, from how they lie to how they shall lie."""
    put = placing(config, after)

    def moved(x, field: str) -> jax.Array:
        return put(undeal_field(np.asarray(x), field, config, before), field)

    return map_fields(moved, weights, config.tied)


def field_spec(field: str, axes: Axes) -> P:
    """How a dealt weight of that name lies over the axes."""
    axis = SHARDED_AXIS.get(field)
    return P() if axis is None or not axes else P(*[None] * axis, axes)


def layer_specs(w: Layer, axes: Axes) -> Layer:
    """How each of a layer's dealt weights lies over the axes."""
    return map_layer(lambda _, name: field_spec(name, axes), w)


def map_layer(f: Callable, w: Layer) -> Layer:
    """`map_parts` of each weight that the layer has."""
    items = w._asdict().items()
    return Layer(**{name: map_parts(f, x, name) for name, x in items if x is not None})


def together(w: Layer, config: Config, at: Placement) -> Layer:
    """Inside shard_map: all weights of the smaller model that this device's group has."""
    if not at.parts:
        return w
    own = own_config(config, at)

    def gather(x, field: str):
        if field not in SHARDED_AXIS:
            return x
        whole = jax.lax.all_gather(x, at.parts, axis=SHARDED_AXIS[field], tiled=True)
        return undeal_within(whole, field, own, at.members)

    return map_layer(gather, w)
