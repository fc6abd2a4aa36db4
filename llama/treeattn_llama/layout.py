"""How a model's texts lie on the devices of a mesh."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh (None: one device), and what its axes are for.

    batch: the axes that share out the texts of a batch: nothing crosses them
    keys:  those that share out the keys of each text
    """

    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """How many devices share the keys of a text."""
        return _count(self.mesh, self.keys)

    @property
    def rows(self) -> int:
        """Into how many parts a batch is cut."""
        return _count(self.mesh, self.batch)

    @property
    def of_rows(self) -> P:
        """(batch, …), the same on every device that shares the text."""
        return P(self.batch or None)

    @property
    def of_keys(self) -> P:
        """(batch, tokens, …), as a cache lies."""
        return P(self.batch or None, self.keys or None)

    def sharding(self, spec: P) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def put(self, x: np.ndarray, spec: P | None = None) -> jax.Array:
        """An array of the host on the devices, as `spec` says; None: whole on each of them.
        Simulated devices share one copy."""
        if self.mesh is None:
            return jax.device_put(x)
        where = self.sharding(spec or P())
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    def on_each_device(self, body: Callable, given: tuple, result) -> Callable:
        """`body` as every device runs it on its parts of the arguments.

        given, result: `PartitionSpec`s, how the arguments and the result lie
        """
        if self.mesh is None:
            return body
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=given, out_specs=result, check_vma=False
        )


def layout_of(mesh: Mesh | None) -> Layout:
    """The axis called "batch" shares out texts, all others the keys.

    The axes become Auto ones, whatever they were: the model says itself how its arrays lie.
    Raises a TypeError for what is no mesh.
    """
    if mesh is None:
        return Layout()
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh or None, got {mesh!r:.80}")
    names = mesh.axis_names
    return Layout(
        Mesh(mesh.devices, names),
        batch=tuple(name for name in names if name == "batch"),
        keys=tuple(name for name in names if name != "batch"),
    )


def _count(mesh: Mesh | None, axes: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[name] for name in axes], dtype=int)) if mesh is not None else 1
