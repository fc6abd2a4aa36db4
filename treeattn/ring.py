"""A pytree carried once around a ring of devices: the loop of Ring Attention (Liu et al. 2023)."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeattn.across import Axes

State = TypeVar("State")  # a pytree of arrays
Shard = TypeVar("Shard")  # another one


def visit_shards(
    visit: Callable[[State, Shard, jax.Array], State],
    state: State,
    shard: Shard,
    axis_name: str | Axes,
) -> State:
    """Inside `shard_map`: the state after visit(state, shard, owner) of every other device's shard.

    The shards go around the ring of the devices along an axis, or several, outermost first, in
    p − 1 steps: this is the loop of Ring Attention. In step i each device sends the shard that it
    holds to the next device, and visits the one that arrives, which is device rank − i's.

    visit: returns the new state. owner is the index of the shard's device, an int32 scalar.
    state: a pytree of arrays, most often the state after the device's own shard
    shard: a pytree of arrays, this device's own

    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "kv")
    >>> add = lambda total, shard, owner: total + shard
    >>> body = lambda x: visit_shards(add, x, x, "kv")
    >>> total = jax.shard_map(body, mesh=mesh, in_specs=P("kv"), out_specs=P("kv"))
    >>> print(total(jnp.array([1.0, 2.0, 3.0, 4.0])))
    [10. 10. 10. 10.]
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    p = lax.axis_size(axes) if axes else 1
    if p == 1:
        return state
    rank = lax.axis_index(axes)

    def step(carry, i):
        state, shard = carry
        arrived = _send_next(shard, axes)
        state = visit(state, arrived, (rank - i) % p)
        # A message depends on no state: without the barrier XLA would send, and hold, all shards
        # before the first visit.
        return lax.optimization_barrier((state, arrived)), None

    counts = jnp.arange(1, p, dtype=jnp.int32)  # int32 as lengths are, with x64, too
    (state, _), _ = lax.scan(step, (state, shard), counts)
    return state


def _send_next(tree: Any, axes: Axes) -> Any:
    """Each device's `tree` goes to the next device of the ring, in the order of `axis_index`.

    `ppermute` numbers devices in the mesh's order of axes, whatever the order of their names
    (JAX 0.8.3; later ones refuse names in another order), so the pairs are translated.
    """
    order = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes]
    sizes = [lax.axis_size(name) for name in axes]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)  # as axis_index(axes) counts them
    at = np.argsort(ranks.transpose([axes.index(name) for name in order]), axis=None)
    to_next = list(zip(at.tolist(), np.roll(at, -1).tolist(), strict=True))  # as ppermute does
    return jax.tree.map(lambda x: lax.ppermute(x, tuple(order), to_next), tree)
