"""A cache dealt over the devices of a mesh, in shards: what decoding and prefill share.

Shard r holds keys r·t … (r+1)·t − 1, with t = ⌈N/p⌉ (the papers' t = N/p). Padding that makes the
last shards whole lies past every row's length, so that nobody attends to it.
"""

import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.idea.arrays import pad_axis, varying_like
from treeattn.idea.state import AttentionState
from treeattn.kernel.choice import device_platform, resolve
from treeattn.kernel.inputs import Inputs, check_inputs

Axes = tuple[str, ...]


class Layout(NamedTuple):
    """How the arrays of one attention lie on a mesh.

    axes:  the mesh's axes along which the keys are dealt, outermost first
    batch: those along which the rows are; nothing crosses them
    heads: those along which the heads are, of queries and keys alike; nothing crosses them
    left:  those of which nobody could tell, while tracing: what lies along them is XLA's affair
    """

    mesh: Mesh | AbstractMesh
    axes: Axes
    batch: Axes = ()
    heads: Axes = ()
    left: Axes = ()

    def spec(self, length: Axes = ()) -> P:
        """Of an array (batch, length, heads, …), whose length lies along the given axes."""
        return P(self.batch or None, length or None, self.heads or None)

    def rows(self) -> P:
        """Of an array (batch,)."""
        return P(self.batch or None)

    def scores(self, x, keys: Axes = ()) -> P:
        """Of a mask or bias (batch, heads, q_len, kv_len); an axis of 1 is everybody's."""
        batch = self.batch if x.shape[0] > 1 else ()
        heads = self.heads if x.shape[1] > 1 else ()
        return P(batch or None, heads or None, None, keys or None)


def mesh_axes(mesh: Mesh | AbstractMesh, axis, argument: str = "axis") -> Axes:
    """`axis` as a tuple. Raises ValueError when the mesh lacks it, or it is named twice."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    axes = (axis,) if isinstance(axis, str) else axis
    if not isinstance(axes, tuple | list) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f"{argument}: expected the name of an axis, or a tuple, got {axis!r}")
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(f"{argument}: the mesh has axes {mesh.axis_names}, not {name!r}")
    if len(set(axes)) < len(axes) or (argument == "axis" and not axes):
        raise ValueError(f"{argument}: expected one or more different axes, got {axis!r}")
    return tuple(axes)


def check_call(
    q, k, v, mesh, axis, *, batch_axis=None, head_axis=None, implementation=None, **options
) -> tuple[Inputs, Layout]:
    """(inputs, layout) of a call over a mesh, checked; its devices choose the implementation.

    options: as in `check_inputs`. An AbstractMesh names no devices, so that a program can be
    lowered for CUDA where there is none.
    """
    inputs = check_inputs(q, k, v, **options)
    layout = lay_out(inputs, mesh, mesh_axes(mesh, axis), batch_axis, head_axis)
    platform = device_platform(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else None
    # Along axes that are left to XLA the batch may be sharded: no device has its rows in turn.
    inputs = inputs.replace(by_row=not layout.left and inputs.q.shape[0] > 0)
    inputs = resolve(implementation, inputs, platform)
    if layout.left and inputs.implementation != "blockwise":
        warnings.warn(
            f"Nobody can tell, while JAX traces, whether rows or heads lie along {layout.left}; a "
            "GPU's kernel will be given all of them, gathered. Name these axes as batch_axis or "
            "head_axis, or give batch_axis=() if nothing lies along them.",
            stacklevel=4,
        )
    return inputs, layout


def lay_out(inputs: Inputs, mesh, axes: Axes, batch_axis, head_axis) -> Layout:
    """The layout that a caller names, or that the arrays have, where that can be seen.

    Raises ValueError for axes that the mesh lacks or that are named twice, and for rows or key
    heads that they do not divide.
    """
    named = {"batch_axis": batch_axis, "head_axis": head_axis}
    named = {name: x if x is None else mesh_axes(mesh, x, name) for name, x in named.items()}
    given = [*axes, *(axis for x in named.values() for axis in x or ())]
    if len(set(given)) < len(given):
        raise ValueError(f"batch_axis, head_axis: expected axes besides {axes}, got {named}")
    taken = manual_axes()
    if inside := taken & set(axes):
        raise ValueError(f"axis: {sorted(inside)} are manual here already: call merge_across")
    free = tuple(x for x in mesh.axis_names if x not in given and mesh.shape[x] > 1)
    free = tuple(x for x in free if x not in taken)
    seen = [axes_of_array(x, mesh, free) for x in (inputs.k, inputs.v, inputs.q)]

    def found(axis: int, arrays) -> Axes:
        each = (tuple(name for name in x[axis] if name in free) for x in arrays if x)
        return next(filter(None, each), ())

    batch, heads = named["batch_axis"], named["head_axis"]
    batch = found(0, seen) if batch is None else tuple(x for x in batch if x not in taken)
    heads = found(2, seen[:2]) if heads is None else tuple(x for x in heads if x not in taken)
    heads = tuple(x for x in heads if x not in batch)
    hidden = None in seen and batch_axis is None and head_axis is None and not batch + heads
    for name, along, n, what in [
        ("batch_axis", batch, inputs.q.shape[0], "rows"),
        ("head_axis", heads, inputs.k.shape[2], "key heads"),
    ]:
        if n % count_devices(mesh, along):
            raise ValueError(
                f"{name}: the {count_devices(mesh, along)} devices along {along} cannot share "
                f"{n} {what} evenly"
            )
    return Layout(mesh, axes, batch, heads, free if hidden else ())


def manual_axes() -> set[str]:
    """The axes that an enclosing `shard_map` has made manual."""
    context = jax.sharding.get_abstract_mesh()
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Manual}


def axes_of_array(x, mesh, free: Axes) -> tuple[Axes, ...] | None:
    """For each axis of `x` those of the mesh along which it is sharded; None if nobody can tell.

    That is so while JAX traces, but for Explicit axes, which are part of an array's type.
    free: the axes that matter
    """
    nowhere = ((),) * x.ndim
    if not free or not isinstance(x, jax.Array):
        return nowhere
    if isinstance(x, jax.core.Tracer):
        sharding = jax.typeof(x).sharding
        kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        if any(kinds.get(name) != AxisType.Explicit for name in free):
            return None
    else:
        sharding = x.sharding
        if sharding.is_fully_replicated:
            return nowhere
        if not isinstance(sharding, NamedSharding):
            return None
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        return nowhere
    entries = (*sharding.spec, *[None] * x.ndim)[: x.ndim]
    return tuple((y,) if isinstance(y, str) else tuple(y or ()) for y in entries)


def count_devices(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """The number of devices along the axes: of shards, along those of the keys."""
    return math.prod(mesh.shape[name] for name in axes)


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
    mapped = jax.shard_map(
        lambda *arguments: body(jax.lax.axis_index(axes), *arguments),
        # Explicit axes, as jax.make_mesh makes them, refuse whatever lies otherwise.
        mesh=mesh.update(axis_types=(AxisType.Auto,) * len(mesh.shape)) if context.empty else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(mesh.axis_names) - manual_axes() - frozenset(left),
        check_vma=False,  # Pallas does not say along which axes its results vary
    )

    def place(spec, tree):
        return jax.tree.map(lambda x: _explicitly(x, spec), tree)

    return lambda *arguments: mapped(*jax.tree.map(place, in_specs, arguments))


def _explicitly(x, spec: P):
    """`x` sharded as `spec` says, if its type, or the context's mesh, says how arrays are."""
    mesh = jax.typeof(x).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.reshard(x, NamedSharding(mesh, spec)) if explicit else x


def deal(inputs: Inputs, layout: Layout) -> tuple[Inputs, Inputs]:
    """(inputs, specs) with the keys padded to whole shards, and where each array lies.

    Arrays that are sharded so already stay where they are. Queries, and lengths, which count the
    keys of all shards, are whole on every device along the keys' axes.
    """
    axes = layout.axes
    n, p = inputs.k.shape[1], count_devices(layout.mesh, axes)
    padded, lengths = p * -(-n // p), inputs.lengths
    # With a single key, an entry for it holds for all shards: the others have no keys.
    if lengths is None and (padded != n or n == 1):
        lengths = jnp.full(inputs.k.shape[0], n, jnp.int32)

    def spread(x):  # along the keys, unless all keys share one entry
        if x is None:
            return x, P()
        if x.shape[-1] != n or n == 1:
            return x, layout.scores(x)
        return pad_axis(x, -1, padded), layout.scores(x, axes)

    mask, mask_spec = spread(inputs.mask)
    bias, bias_spec = spread(inputs.bias)
    k, v = (pad_axis(x, 1, padded) for x in (inputs.k, inputs.v))
    dealt = inputs.replace(k=k, v=v, mask=mask, bias=bias, lengths=lengths)
    along = layout.spec(axes)
    specs = dealt.replace(
        q=layout.spec(), k=along, v=along, mask=mask_spec, bias=bias_spec,
        lengths=layout.rows(), factor=P(),
    )  # fmt: skip
    return dealt, specs


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
    ranks = np.arange(math.prod(sizes)).reshape(sizes)  # as axis_index(axes) counts them …
    at = np.argsort(ranks.transpose([axes.index(name) for name in order]), axis=None)
    to_next = list(zip(at.tolist(), np.roll(at, -1).tolist(), strict=True))  # … and ppermute
    return jax.tree.map(lambda x: jax.lax.ppermute(x, tuple(order), to_next), tree)


def no_keys(inputs: Inputs) -> AttentionState:
    """The state of the queries before any key, as a loop's first carry."""
    return varying_like(AttentionState.identity(*inputs.state_shape), *inputs.arrays)
