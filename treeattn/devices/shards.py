"""A cache dealt over the devices of a mesh, in shards, and what runs on each of them.

Shard r holds keys r·t … (r+1)·t − 1, with t = ⌈N/p⌉ (the papers' t = N/p). Padding that makes the
last shards whole lies past every row's length, so that nobody attends to it.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.devices.layout import Layout, count_devices, manual_axes
from treeattn.devices.mesh import Axes
from treeattn.devices.message import join_keys_values, split_keys_values
from treeattn.idea.arrays import pad_axis, varying_like
from treeattn.idea.state import AttentionState
from treeattn.kernel.inputs import Inputs


def deal(inputs: Inputs, layout: Layout) -> tuple[Inputs, Inputs]:
    """(inputs, specs) with the keys padded to whole shards, and where each array lies.

    Arrays that are sharded so already stay where they are. Queries, and lengths, which count the
    keys of all shards, are whole on every device along the keys' axes. 10 keys (b, 10, …) over 4
    devices become (b, 12, …), 3 a device, with lengths of 10.
    """
    n = inputs.k.shape[1]
    p = count_devices(layout.mesh, layout.axes)
    padded = p * -(-n // p)
    lengths = inputs.lengths
    # With a single key, an entry for it holds for all shards: the others have no keys.
    if lengths is None and (padded != n or n == 1):
        lengths = jnp.full(inputs.k.shape[0], n, jnp.int32)

    def spread(x):  # along the keys, unless all keys share one entry
        if x is None:
            return x, P()
        if x.shape[-1] != n or n == 1:
            return x, layout.scores(x)
        return pad_axis(x, -1, padded), layout.scores(x, layout.axes)

    def spread_scale(x):  # one for each key, or one that all of them share
        if x is None or x.shape[1] != n or n == 1:
            return x, layout.spec()
        return pad_axis(x, 1, padded), layout.spec(layout.axes)

    mask, mask_spec = spread(inputs.mask)
    bias, bias_spec = spread(inputs.bias)
    key_scale, key_scale_spec = spread_scale(inputs.key_scale)
    value_scale, value_scale_spec = spread_scale(inputs.value_scale)
    dealt = inputs.replace(
        k=pad_axis(inputs.k, 1, padded),
        v=pad_axis(inputs.v, 1, padded),
        mask=mask,
        bias=bias,
        lengths=lengths,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    specs = dealt.replace(
        q=layout.spec(),
        k=layout.spec(layout.axes),
        v=layout.spec(layout.axes),
        mask=mask_spec,
        bias=bias_spec,
        lengths=layout.rows(),
        factor=P(),
        key_scale=key_scale_spec,
        value_scale=value_scale_spec,
    )
    return dealt, specs


def over_shards(body, mesh, axes, in_specs, out_specs=P(), *, left: Axes = ()):  # noqa: B008
    """body(rank, *arguments) on every device, under `shard_map`; without a mesh, body(0, …).

    All axes of the mesh are manual, so that what the specs do not shard is whole on every device:
    a GPU's kernel is nothing that XLA could split. rank counts along `axes`. Within a `shard_map`,
    and within `jax.set_mesh`, the context's mesh is taken, and what is manual there stays so.

    left: axes of the mesh that stay XLA's, as `Layout` says
    Raises ValueError for another mesh than the context's.
    """
    if mesh is None:
        return lambda *arguments: body(0, *arguments)
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and dict(context.shape) != dict(mesh.shape):
        raise ValueError(f"mesh: expected the context's, {context.shape}, got {mesh.shape}")
    # Explicit axes, as jax.make_mesh makes them, refuse whatever lies otherwise.
    auto = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.shape))
    mapped = jax.shard_map(
        lambda *arguments: body(jax.lax.axis_index(axes), *arguments),
        mesh=auto if context.empty else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(mesh.axis_names) - manual_axes() - frozenset(left),
        check_vma=False,  # Pallas does not say along which axes its results vary
    )

    def place(spec, tree):
        return jax.tree.map(lambda x: reshard_if_explicit(x, spec), tree)

    return lambda *arguments: mapped(*jax.tree.map(place, in_specs, arguments))


def reshard_if_explicit(x, spec: P):
    """`x` sharded as `spec` says, if its type, or the context's mesh, says how arrays are."""
    mesh = jax.typeof(x).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.reshard(x, NamedSharding(mesh, spec)) if explicit else x


def own_lengths(inputs: Inputs, rank) -> Inputs:
    """A shard's inputs with the lengths that count its own keys, from those that count all."""
    if inputs.lengths is None:
        return inputs
    t = inputs.k.shape[1]
    return inputs.replace(lengths=jnp.clip(inputs.lengths - rank * t, 0, t))


def pass_on(tree, axes: Axes):
    """Everybody's `tree` goes to the next device around the ring, in the order of `axis_index`.

    `ppermute` numbers devices in the mesh's order of axes, whatever the order of their names
    (JAX 0.8.3; later ones refuse names in another order): its pairs are translated.
    """
    order = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes]
    sizes = [jax.lax.axis_size(name) for name in axes]
    if math.prod(sizes) == 1:
        return tree  # XLA would send it from each device to itself
    ranks = np.arange(math.prod(sizes)).reshape(sizes)  # as axis_index(axes) counts them …
    at = np.argsort(ranks.transpose([axes.index(name) for name in order]), axis=None)
    to_next = list(zip(at.tolist(), np.roll(at, -1).tolist(), strict=True))  # … and ppermute
    return jax.tree.map(lambda x: jax.lax.ppermute(x, tuple(order), to_next), tree)


def visit_shards(visit: Callable, inputs: Inputs, beside, axes: Axes) -> AttentionState:
    """The state after visit(state, k, v, beside, owner) of every device's shard, one's own first.

    beside: what else of a shard goes around the ring, a pytree of arrays

    Each step sends what it has before it computes with it, so that a GPU's message is under way
    meanwhile. Of two arrays XLA would send one after the other, the first of them alone: keys and
    values are one message there. The barrier holds the next one back: it depends on no state, and
    XLA would send, and hold, all shards first. And the loop has two steps there, one receiving
    where the other has left room; with one, each copied what it got for the next. On a CPU nothing
    overlaps, and all this would only copy.
    """
    p = jax.lax.axis_size(axes)
    rank = jax.lax.axis_index(axes)
    on_gpu = inputs.implementation != "blockwise"  # which is for everything else
    d = inputs.k.shape[-1]

    def visit_arrived(state, arrived, owner):
        keys_values, beside = arrived
        k, v = split_keys_values(keys_values, d) if on_gpu else keys_values
        return visit(state, k, v, beside, owner)

    def step(carry, i):
        state, shard = carry
        arriving = pass_on(shard, axes)
        state = visit_arrived(state, shard, (rank - i) % p)
        return jax.lax.optimization_barrier((state, arriving)), None

    keys_values = inputs.k, inputs.v
    shard = (join_keys_values(*keys_values) if on_gpu else keys_values), beside
    start = no_keys(inputs), shard
    unroll = 2 if on_gpu else 1
    counts = jnp.arange(p - 1, dtype=jnp.int32)  # as lengths are, with x64, too
    (state, shard), _ = jax.lax.scan(step, start, counts, unroll=unroll)
    return visit_arrived(state, shard, (rank + 1) % p)


def no_keys(inputs: Inputs) -> AttentionState:
    """The state of the queries before any key, as a loop's first carry."""
    return varying_like(AttentionState.identity(*inputs.state_shape), *inputs.arrays)
