"""How a model's texts are sharded over the devices of a mesh."""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class TextShards:
    """A mesh (None: one device), and the roles of its axes.

    batch: the axes that shard the texts of a batch. Nothing is sent along them.
    keys:  the axes that shard the keys of each text
    """

    mesh: Mesh | None = None
    batch: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices that share the keys of a text."""
        return math.prod(self.mesh.shape[name] for name in self.keys)

    @property
    def parts(self) -> int:
        """The number of parts of a batch."""
        return math.prod(self.mesh.shape[name] for name in self.batch)

    @property
    def of_texts(self) -> P:
        """The spec of (batch, …): replicated over the devices that share a text."""
        return P(self.batch or None)

    @property
    def of_keys(self) -> P:
        """The spec of (batch, tokens, …), a cache's."""
        return P(self.batch or None, self.keys or None)

    def sharding(self, spec: P) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def put(self, x: np.ndarray, spec: P | None = None) -> jax.Array:
        """An array of the host, sharded over the devices by `spec`, or replicated if it is None.

        Simulated devices share one copy of a replicated array.
        """
        if self.mesh is None:
            return jax.device_put(x)
        sharding = self.sharding(spec or P())
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def on_each_device(self, body: Callable, in_specs: tuple, out_specs) -> Callable:
        """`body` under `shard_map`: every device runs it on its own parts of the arguments."""
        if self.mesh is None:
            return body
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def text_shards_of(mesh: Mesh | None) -> TextShards:
    """The shards over a mesh: its axis called "batch" shards texts, all others shard keys.

    All axes become Auto, because the package's own programs say how arrays are sharded. Raises
    TypeError unless `mesh` is a Mesh or None.
    """
    if mesh is None:
        return TextShards()
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh or None, got {mesh!r:.80}")
    names = mesh.axis_names
    return TextShards(
        Mesh(mesh.devices, names),
        tuple(name for name in names if name == "batch"),
        tuple(name for name in names if name != "batch"),
    )
