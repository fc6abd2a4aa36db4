"""How the arrays of one attention lie on a mesh: along which of its axes keys, rows and heads.

A caller names the axes, or the arrays show them. Nobody can see them while JAX traces.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.devices.mesh import AnyMesh, Axes, AxisNames
from treeattn.kernel.choice import device_platform, resolve
from treeattn.kernel.inputs import Implementation, Inputs


class Layout(NamedTuple):
    """How the arrays of one attention lie on a mesh.

    axes:  the mesh's axes along which the keys are dealt, outermost first
    batch: those along which the rows are; nothing crosses them
    heads: those along which the heads are, of queries and keys alike; nothing crosses them
    left:  those of which nobody could tell, while tracing: what lies along them is XLA's affair
    """

    mesh: AnyMesh
    axes: Axes
    batch: Axes = ()
    heads: Axes = ()
    left: Axes = ()

    def spec(self, length: Axes = ()) -> P:
        """Of an array (batch, length, heads, …), whose length lies along the given axes."""
        if not self.heads:  # as XLA says it: one more None would be another program
            return P(self.batch or None, length or None)
        return P(self.batch or None, length or None, self.heads)

    def rows(self) -> P:
        """Of an array (batch,)."""
        return P(self.batch or None)

    def scores(self, x, keys: Axes = ()) -> P:
        """Of a mask or bias (batch, heads, q_len, kv_len); an axis of 1 is everybody's."""
        batch = self.batch if x.shape[0] > 1 else ()
        heads = self.heads if x.shape[1] > 1 else ()
        return P(batch or None, heads or None, None, keys or None)


def lay_out(
    inputs: Inputs,
    mesh: AnyMesh,
    axis: AxisNames,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
) -> Layout:
    """The layout that a caller names, or that the arrays have, where that can be seen.

    Arguments as in `tree_decode`. Raises TypeError for what is no mesh or name, and ValueError for
    axes that the mesh lacks or that are named twice, and for rows or key heads that they do not
    divide.
    """
    axes = mesh_axes(mesh, axis)
    batch = None if batch_axis is None else mesh_axes(mesh, batch_axis, "batch_axis")
    heads = None if head_axis is None else mesh_axes(mesh, head_axis, "head_axis")
    named = [*axes, *(batch or ()), *(heads or ())]
    if len(set(named)) < len(named):
        came = {"batch_axis": batch, "head_axis": heads}
        raise ValueError(f"batch_axis, head_axis: expected axes besides {axes}, got {came}")
    taken = manual_axes()
    if inside := taken & set(axes):
        raise ValueError(f"axis: {sorted(inside)} are manual here already: call merge_across")
    unnamed = (name for name in mesh.axis_names if name not in named and mesh.shape[name] > 1)
    free = tuple(name for name in unnamed if name not in taken)
    k, v, q = (axes_of_array(x, mesh, free) for x in (inputs.k, inputs.v, inputs.q))
    # What an enclosing `shard_map` has split already is no concern of this one.
    batch = _axes_found(0, (k, v, q), free) if batch is None else _without(batch, taken)
    heads = _axes_found(2, (k, v), free) if heads is None else _without(heads, taken)
    heads = _without(heads, batch)
    _check_divides("batch_axis", mesh, batch, inputs.q.shape[0], "rows")
    _check_divides("head_axis", mesh, heads, inputs.k.shape[2], "key heads")
    all_seen = None not in (k, v, q)
    told = batch_axis is not None or head_axis is not None or batch or heads
    return Layout(mesh, axes, batch, heads, left=() if all_seen or told else free)


def mesh_axes(mesh: AnyMesh, axis: AxisNames, argument: str = "axis") -> Axes:
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


def manual_axes() -> set[str]:
    """The axes that an enclosing `shard_map` has made manual."""
    context = jax.sharding.get_abstract_mesh()
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Manual}


def axes_of_array(x, mesh: AnyMesh, free: Axes) -> tuple[Axes, ...] | None:
    """For each axis of `x` those of the mesh along which it is sharded; None if nobody can tell.

    Of keys (b, n, h_kv, d) that lie as P(None, "kv"): ((), ("kv",), (), ()). Nobody can tell while
    JAX traces, but of Explicit axes, which are part of an array's type.
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
    return tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)


def _axes_found(axis: int, arrays: Sequence[tuple[Axes, ...] | None], free: Axes) -> Axes:
    """The free axes along which the first of the arrays that has any lies with its axis `axis`."""
    for along in arrays:
        if along is None:
            continue
        found = tuple(name for name in along[axis] if name in free)
        if found:
            return found
    return ()


def _without(axes: Axes, others) -> Axes:
    return tuple(name for name in axes if name not in others)


def _check_divides(argument: str, mesh: AnyMesh, along: Axes, n: int, what: str) -> None:
    devices = count_devices(mesh, along)
    if n % devices:
        raise ValueError(
            f"{argument}: the {devices} devices along {along} cannot share {n} {what} evenly"
        )


def count_devices(mesh: AnyMesh, axes: Axes) -> int:
    """The number of devices along the axes: of shards, along those of the keys."""
    return math.prod(mesh.shape[name] for name in axes)


def refuse_exact(implementation: Implementation) -> None:
    """A ValueError for "exact" where devices merge states that are rounded."""
    if implementation == "exact":
        raise ValueError(
            "implementation: 'exact' would have other bits on other numbers of devices here, where "
            "their states are rounded and then merged: take tree_decode(method='exact'), or "
            "ulysses_attention for a prompt"
        )


def resolve_on_mesh(implementation: Implementation, inputs: Inputs, layout: Layout) -> Inputs:
    """`resolve` for the mesh's devices; with a warning where they would gather the cache.

    An AbstractMesh names no devices, so that a program can be lowered for CUDA where there is none.
    """
    mesh = layout.mesh
    platform = device_platform(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else None
    # Along axes that are left to XLA the batch may be sharded: no device has its rows in turn.
    inputs = inputs.replace(by_row=not layout.left and inputs.q.shape[0] > 0)
    inputs = resolve(implementation, inputs, platform)
    if layout.left and inputs.implementation not in ("blockwise", "exact"):
        warnings.warn(
            f"Nobody can tell, while JAX traces, whether rows or heads lie along {layout.left}; a "
            "kernel that XLA cannot split, as a GPU's, will be given all of them, gathered. Name "
            "these axes as batch_axis or head_axis, or give batch_axis=() if nothing lies there.",
            stacklevel=3,
        )
    return inputs
