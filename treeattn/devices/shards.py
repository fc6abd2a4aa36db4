"""What tree and ring decoding share: a cache dealt over the devices of a mesh, in shards.

Shard r holds keys r·t … (r+1)·t − 1, with t = ⌈N/p⌉ (v1's t = N/p). Padding that makes the
last shards whole lies past every row's length, so that nobody attends to it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState
from treeattn.kernel.attend import attend


class Shard(NamedTuple):
    """One device's keys and values, and what says who may see them.

    k, v:        (b, t, h_kv, ·)
    mask, bias:  (b, h, l, t), an axis being 1 where all share an entry; or None
    """

    k: Array
    v: Array
    mask: Array | None
    bias: Array | None


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


def check_implementation(mesh: Mesh | AbstractMesh, implementation: str | None) -> None:
    """Raise ValueError for "flash" on a mesh of other than CUDA devices.

    An AbstractMesh names no devices and passes, so that a program can be lowered for CUDA
    where there is none.
    """
    if implementation == "flash" and isinstance(mesh, Mesh):
        platform = mesh.devices.flat[0].platform
        if platform != "gpu":
            raise ValueError(
                f"implementation: 'flash' needs CUDA devices, and the mesh has {platform} devices"
            )


def count_devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """The number of shards: the devices along the axes."""
    return math.prod(mesh.shape[name] for name in axes)


def pad_axis(x: Array | None, axis: int, size: int) -> Array | None:
    """`x` with zeros (or False) at the end of `axis`, up to `size`."""
    if x is None or x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def attend_shard(q, shard: Shard, rank, *, kv_lengths, scale, implementation) -> AttentionState:
    """The state of `q` after the shard of device `rank`; kv_lengths count all shards' keys."""
    if kv_lengths is not None:
        t = shard.k.shape[1]
        kv_lengths = jnp.clip(kv_lengths - rank * t, 0, t)
    return attend(
        q,
        shard.k,
        shard.v,
        mask=shard.mask,
        bias=shard.bias,
        kv_lengths=kv_lengths,
        scale=scale,
        implementation=implementation,
    )


REPLICATED = P()


def over_shards(
    body, q, k, v, kv_lengths, mask, bias, *, mesh, axes, out_specs=REPLICATED, check=True
):
    """Call body(q, shard, kv_lengths) on every device of the mesh, under `shard_map`.

    q and kv_lengths are whole on every device; the shard is the device's own. Arrays that are
    sharded so already stay where they are. `check` is `shard_map`'s check_vma: False for a
    body whose result is the same on all devices without JAX being able to tell.
    """
    n, p = k.shape[1], count_devices(mesh, axes)
    padded = p * -(-n // p)
    if padded != n and kv_lengths is None:
        kv_lengths = jnp.full(k.shape[0], n, jnp.int32)
    elif padded != n:
        kv_lengths = jnp.minimum(kv_lengths, n)

    def spread(x):  # along the keys, unless all keys share one entry
        if x is None or x.shape[-1] != n or n == 1:
            return x, P()
        return pad_axis(x, -1, padded), P(None, None, None, axes)

    (mask, mask_spec), (bias, bias_spec) = spread(mask), spread(bias)
    if n == 1:  # an entry for the one key holds for all shards: the others have no keys
        kv_lengths = jnp.full(k.shape[0], 1, jnp.int32) if kv_lengths is None else kv_lengths
    shard = Shard(pad_axis(k, 1, padded), pad_axis(v, 1, padded), mask, bias)
    specs = Shard(P(None, axes), P(None, axes), mask_spec, bias_spec)
    return jax.shard_map(
        body, mesh=mesh, in_specs=(P(), specs, P()), out_specs=out_specs, check_vma=check
    )(q, shard, kv_lengths)
