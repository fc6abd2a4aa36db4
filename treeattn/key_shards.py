"""How the arrays of one attention are sharded over a mesh, and what runs on each of its devices.

NamedSharding(mesh, P(batch, keys, heads)) says how keys and values are sharded: shard r holds the
slots r·t … (r+1)·t − 1 with t = ⌈n/p⌉ on p devices (N/p in the papers). Key i of a contiguous cache
is in slot i, so a half-full cache keeps half of the devices busy. Key i of a striped cache is in
slot (i mod p)·t + i div p: neighbouring keys are on neighbouring devices, and all are busy.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.across import Axes
from treeattn.inputs import Inputs, pad_axis
from treeattn.slots import shard_lengths

Sharding = NamedSharding | P | None  # None: that of the keys; a spec: over the context's mesh


class KeyShards(NamedTuple):
    """The axes of a mesh that shard texts, keys and heads; and whether the keys are striped.

    Nothing is sent along the axes of texts and heads. Along the mesh's other axes, arrays are
    replicated.
    """

    mesh: Mesh | AbstractMesh
    batch: Axes
    keys: Axes
    heads: Axes
    striped: bool

    @property
    def devices(self) -> int:
        """The number of devices that share the keys."""
        return math.prod(self.mesh.shape[name] for name in self.keys)

    def padded_length(self, n: int) -> int:
        """n rounded up so that all shards are equally long; at least one slot a shard."""
        return self.devices * max(-(-n // self.devices), 1)

    def spec(self, length: Axes = ()) -> P:
        """The spec of (batch, length, heads, …) with axis 1 sharded along the axes `length`."""
        return P(self.batch, length, self.heads)


def key_shards_of(inputs: Inputs, sharding: Sharding, striped: bool) -> KeyShards:
    """The shards that the caller names, or else those of the keys.

    Raises TypeError if `sharding` is not a NamedSharding, a spec or None; ValueError if a size is
    symbolic, as `jax.export` has them, k's sharding is unknown, the spec is not P(batch, keys,
    heads), k or v has another sharding, or an enclosing `shard_map` has split the keys' axes.
    """
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        for axis, size in zip(("batch", "length", "heads", "head_dim"), x.shape, strict=False):
            if not isinstance(size, int):
                raise ValueError(
                    f"{name}: expected a {axis} that is a number, got the symbolic {size}: XLA "
                    "fails on sharded programs of symbolic sizes; export one for each size"
                )
    if sharding is None:
        sharding = _sharding_of(inputs.k)
    elif isinstance(sharding, P):
        sharding = _in_the_contexts_mesh(sharding)
    elif not isinstance(sharding, NamedSharding):
        kind = type(sharding).__name__
        raise TypeError(f"sharding: expected a NamedSharding, a PartitionSpec or None, got {kind}")
    manual = manual_axes()
    shards = _key_shards(sharding, bool(striped), manual)
    if manual:  # arrays here are local to a device along these axes
        sharding = NamedSharding(shards.mesh, shards.spec(shards.keys))
    _check_sharded_as("k", inputs.k, sharding)
    _check_sharded_as("v", inputs.v, sharding)
    return shards


def _sharding_of(k) -> NamedSharding:
    """The sharding of k, if k is concrete or its mesh has no Auto axis."""
    sharding = None
    if isinstance(k, jax.core.Tracer):
        sharding = jax.typeof(k).sharding
        if any(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
            sharding = None  # XLA decides later
    elif isinstance(k, jax.Array):
        sharding = k.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        raise ValueError(
            "sharding: k's sharding is unknown here; pass it, as in "
            "sharding=NamedSharding(mesh, P(None, 'kv'))"
        )
    return sharding


def _in_the_contexts_mesh(spec: P) -> NamedSharding:
    """The sharding by a spec, over the mesh that `jax.set_mesh` has set."""
    mesh = jax.sharding.get_abstract_mesh()
    with contextlib.suppress(ValueError):  # JAX refuses to tell the devices inside a trace
        mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            f"sharding: expected a mesh set by jax.set_mesh for {spec}, got none; pass "
            "NamedSharding(mesh, spec)"
        )
    return NamedSharding(mesh, spec)


@functools.lru_cache(maxsize=256)
def _key_shards(sharding: NamedSharding, striped: bool, manual: frozenset[str]) -> KeyShards:
    """The shards of a NamedSharding, without axes that an enclosing `shard_map` has split."""
    if P.UNCONSTRAINED in sharding.spec or len(_entries(sharding.spec)) > 3:
        expected = "P(batch, keys, heads) of axes' names or None"
        raise ValueError(f"sharding: expected {expected}, got {sharding.spec}")
    batch, keys, heads = (*_entries(sharding.spec), (), (), ())[:3]
    if inside := manual & set(keys):
        axes = sorted(inside)
        raise ValueError(f"sharding: shard_map has split {axes} already: call attend, merge_across")
    batch, heads = (tuple(x for x in axes if x not in manual) for axes in (batch, heads))
    return KeyShards(sharding.mesh, batch, keys, heads, striped)


def manual_axes() -> frozenset[str]:
    """The axes that an enclosing `shard_map` has made manual."""
    context = jax.sharding.get_abstract_mesh()
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def _check_sharded_as(name: str, x, wanted: NamedSharding) -> None:
    """Raise a ValueError for an array that is sharded in another way than `wanted`.

    NumPy arrays, and arrays on one device or replicated, are accepted.
    """
    if isinstance(x, jax.core.Tracer):
        found = jax.typeof(x).sharding
        if not any(found.spec):
            return
        matches = _entries(found.spec) == _entries(_explicit(wanted.spec, found.mesh))
    elif isinstance(x, jax.Array) and not x.is_fully_replicated and x.ndim == 4:
        found = x.sharding
        abstract = isinstance(wanted.mesh, AbstractMesh)
        matches = abstract or found.is_equivalent_to(wanted, x.ndim)
    else:
        return
    if not matches:
        texts = [str(getattr(s, "spec", s)) for s in (found, wanted)]
        if texts[0] == texts[1]:  # other devices, another order of them, or another memory
            texts = [f"{s} on devices {s.mesh.device_ids.tolist()}" for s in (found, wanted)]
        raise ValueError(
            f"sharding: expected {name} sharded as {texts[1]}, got {texts[0]}; pass its own "
            "sharding, or jax.device_put it first"
        )


def _explicit(spec: P, mesh: AbstractMesh | Mesh) -> P:
    """`spec` without the mesh's Auto and Manual axes, which a traced array's type does not show.

    An axis that the mesh does not have stays, so that `_check_sharded_as` refuses an array that is
    sharded over another mesh.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    hidden = [name for name, kind in kinds if kind != AxisType.Explicit]
    entries = [[x for x in axes if x not in hidden] for axes in _entries(spec)]
    return P(*map(tuple, entries))


def _entries(spec: P) -> list[Axes]:
    """The axes of each entry of a spec, without empty entries at its end."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def move_to_mesh(inputs: Inputs, shards: KeyShards) -> Inputs:
    """The inputs, with arrays committed to one device moved to the mesh.

    `jax.jit` refuses arguments that are committed to different devices. Keys and values are moved
    to their shards if the devices can share them evenly. Other arrays that are on one device are
    replicated.
    """
    held = [_on_one_device(x) for x in jax.tree.leaves(inputs)]
    if isinstance(shards.mesh, AbstractMesh) or not any(held):
        return inputs

    def put(x, spec: P):
        if not _on_one_device(x):
            return x
        sharding = NamedSharding(shards.mesh, spec)
        try:
            sharding.shard_shape(x.shape)
        except ValueError:  # the devices cannot share it evenly
            sharding = NamedSharding(shards.mesh, P())
        return jax.device_put(x, sharding)

    of_keys = shards.spec(shards.keys)
    inputs = inputs.replace(k=put(inputs.k, of_keys), v=put(inputs.v, of_keys))
    return jax.tree.map(lambda x: put(x, P()), inputs)


def _on_one_device(x) -> bool:
    """Whether a concrete array is committed to one device."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return False
    return x.committed and len(x.devices()) == 1


def deal(inputs: Inputs, shards: KeyShards) -> tuple[Inputs, Inputs]:
    """(inputs, specs): the keys padded to whole shards, and the spec of each array.

    10 keys (b, 10, …) over 4 devices become (b, 12, …), 3 on each device, with lengths of 10.
    Causal attention needs no lengths, because the padded keys come after every query. Queries and
    lengths are replicated along the keys' axes. Lengths count the keys of all shards. Raises
    ValueError if the devices cannot share the texts, heads or stripes evenly.
    """
    b, n, h_kv, _ = inputs.k.shape
    striped = shards.keys if shards.striped else ()
    wholes = ("texts", b, shards.batch), ("key heads", h_kv, shards.heads), ("slots", n, striped)
    for what, size, axes in wholes:
        devices = math.prod(shards.mesh.shape[name] for name in axes)
        if size % devices:
            raise ValueError(
                f"sharding: the {devices} devices along {axes} cannot share {size} {what} evenly"
            )
    padded = shards.padded_length(n)
    lengths = inputs.lengths
    if lengths is None and padded != n and not inputs.causal:
        lengths = jnp.full(b, n, jnp.int32)

    def spread(x):  # axes of size 1 of a mask or bias are not sharded, because they broadcast
        if x is None:
            return x, P()
        axes = shards.batch, shards.heads, (), shards.keys
        sharded = zip(axes, x.shape, strict=True)
        spec = P(*(names if size != 1 else () for names, size in sharded))
        return x if x.shape[-1] == 1 else pad_axis(x, -1, padded), spec

    mask, mask_spec = spread(inputs.mask)
    bias, bias_spec = spread(inputs.bias)
    k, v = pad_axis(inputs.k, 1, padded), pad_axis(inputs.v, 1, padded)
    dealt = inputs.replace(k=k, v=v, mask=mask, bias=bias, lengths=lengths)
    of_keys = shards.spec(shards.keys)
    specs = dealt.replace(
        q=shards.spec(),
        k=of_keys,
        v=of_keys,
        mask=mask_spec,
        bias=bias_spec,
        lengths=P(shards.batch),
        traced_scale=P(),
    )
    return dealt, specs


def local_lengths(inputs: Inputs, shards: KeyShards, rank):
    """(b,) for each text the number of its keys that are on device `rank`.

    `inputs.lengths` counts the keys of a text on all devices together.
    """
    if inputs.lengths is None:
        return None
    kv_len = shards.devices * inputs.k.shape[1]  # k is the device's own shard
    return shard_lengths(inputs.lengths, rank, kv_len, shards.devices, striped=shards.striped)


def on_each_device(body, shards: KeyShards, inputs: Inputs, specs: Inputs, out_specs):
    """body(rank, inputs) on every device, under `shard_map`; rank counts along the keys' axes.

    specs, out_specs: the specs of the inputs and of the result

    All axes of the mesh are manual, so XLA decides nothing: arrays are replicated along axes that
    their specs do not name. Inside `shard_map` or `jax.set_mesh`, the context's mesh is used, and
    axes that are manual already stay manual. Inside a `vmap` along a sharded Explicit axis, JAX
    leaves out this axis, if it is left to name the axes. Raises ValueError if the context has
    another mesh.
    """
    mesh = shards.mesh
    manual = manual_axes()
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and tuple(context.shape.items()) != tuple(mesh.shape.items()):
        expected, got = dict(context.shape), dict(mesh.shape)
        raise ValueError(f"sharding: expected the context's mesh {expected}, got {got}")

    def with_rank(inputs):
        return body(lax.axis_index(shards.keys), inputs)

    mapped = jax.shard_map(
        with_rank,
        mesh=mesh if context.empty else None,
        in_specs=(specs,),
        out_specs=out_specs,
        axis_names=manual and frozenset(mesh.axis_names) - manual,
        check_vma=False,  # JAX cannot infer for most merges that results are replicated
    )
    return mapped(place(inputs, specs, shards))


def place(tree, specs, shards: KeyShards):
    """`tree` resharded to `specs` along Explicit axes; along Auto axes XLA does that.

    `shard_map` refuses arrays with another sharding along Explicit axes.
    """
    context = jax.sharding.get_abstract_mesh()
    mesh = shards.mesh if context.empty else context
    if AxisType.Explicit not in mesh.axis_types:
        return tree

    def reshard(spec, x):
        return jax.reshard(x, NamedSharding(mesh, _explicit(spec, mesh)))

    return jax.tree.map(reshard, specs, tree)
