"""A cache dealt over the devices of a mesh, in shards: what decoding and prefill share.

Shard r holds keys r·t … (r+1)·t − 1, with t = ⌈N/p⌉ (v1's t = N/p). Padding that makes the
last shards whole lies past every row's length, so that nobody attends to it.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState
from treeattn.kernel.attend import device_platform, pad_axis, resolve
from treeattn.kernel.inputs import Inputs, check_inputs


def mesh_axes(mesh: Mesh | AbstractMesh, axis: str | tuple[str, ...]) -> tuple[str, ...]:
    """`axis` as a tuple. Raises ValueError when the mesh lacks it, or it is named twice."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(f"axis: the mesh has axes {mesh.axis_names}, not {name!r}")
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"axis: expected one or more different axes, got {axis!r}")
    return axes


def check_call(
    q, k, v, mesh, axis, *, implementation=None, **options
) -> tuple[Inputs, tuple[str, ...]]:
    """(inputs, axes) of a call over a mesh, checked; the mesh's devices choose the implementation.

    options: as in `check_inputs`. An AbstractMesh names no devices, so that a program can be
    lowered for CUDA where there is none.
    """
    inputs = check_inputs(q, k, v, **options)
    axes = mesh_axes(mesh, axis)
    platform = device_platform(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else None
    # Along other axes of the mesh the batch may be sharded: then no device has its rows in turn.
    inputs = inputs.replace(by_row=count_devices(mesh, axes) == mesh.size)
    return resolve(implementation, inputs, platform), axes


def count_devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """The number of shards: the devices along the axes."""
    return math.prod(mesh.shape[name] for name in axes)


def over_shards(body, mesh, axes, in_specs, out_specs=P(), *, check: bool = False):  # noqa: B008
    """body(rank, *arguments) on every device, under `shard_map`; without a mesh, body(0, …).

    Axes of the mesh that are not in `axes` stay XLA's: what is sharded along them remains so.
    check: `shard_map`'s check_vma: False for a body whose result is the same on all devices
           without JAX being able to tell
    """
    if mesh is None:
        return lambda *arguments: body(0, *arguments)
    # Explicit axes, as jax.make_mesh makes them from JAX 0.9 on, refuse whatever lies otherwise.
    mapped = jax.shard_map(
        lambda *arguments: body(jax.lax.axis_index(axes), *arguments),
        mesh=mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(axes),
        check_vma=check,
    )

    def place(spec, tree):
        return jax.tree.map(lambda x: _explicitly(x, spec), tree)

    return lambda *arguments: mapped(*jax.tree.map(place, in_specs, arguments))


def _explicitly(x, spec: P):
    """`x` sharded as `spec` says, if its type says how it is sharded."""
    mesh = jax.typeof(x).sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.reshard(x, NamedSharding(mesh, spec)) if explicit else x


def deal(inputs: Inputs, mesh, axes) -> tuple[Inputs, Inputs]:
    """(inputs, specs) with the keys padded to whole shards, and where each array lies.

    Arrays that are sharded so already stay where they are. Queries, and lengths, which count the
    keys of all shards, are whole on every device.
    """
    n, p = inputs.k.shape[1], count_devices(mesh, axes)
    padded, lengths = p * -(-n // p), inputs.lengths
    # With a single key, an entry for it holds for all shards: the others have no keys.
    if lengths is None and (padded != n or n == 1):
        lengths = jnp.full(inputs.k.shape[0], n, jnp.int32)

    def spread(x):  # along the keys, unless all keys share one entry
        if x is None or x.shape[-1] != n or n == 1:
            return x, P()
        return pad_axis(x, -1, padded), P(None, None, None, axes)

    (mask, mask_spec), (bias, bias_spec) = spread(inputs.mask), spread(inputs.bias)
    k, v = (pad_axis(x, 1, padded) for x in (inputs.k, inputs.v))
    dealt = inputs.replace(k=k, v=v, mask=mask, bias=bias, lengths=lengths)
    along = P(None, axes)
    specs = dealt.replace(
        q=P(), k=along, v=along, mask=mask_spec, bias=bias_spec, lengths=P(), factor=P()
    )
    return dealt, specs


def own_lengths(inputs: Inputs, rank) -> Inputs:
    """A shard's inputs with the lengths that count its own keys, from those that count all."""
    if inputs.lengths is None:
        return inputs
    t = inputs.k.shape[1]
    return inputs.replace(lengths=jnp.clip(inputs.lengths - rank * t, 0, t))


def pass_on(tree, axes, p: int):
    """Everybody's `tree` goes to the next device around the ring."""
    to_next = [(i, (i + 1) % p) for i in range(p)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), tree)


def no_keys(inputs: Inputs) -> AttentionState:
    """The state of the queries before any key, as a loop's first carry."""
    return varying_like(AttentionState.identity(*inputs.state_shape), *inputs.arrays)
