"""A pytree visits the other devices of a ring: the loop of Ring Attention (Liu et al. 2023)."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeattn.across import Axes

State = TypeVar("State")  # a pytree of arrays
Shard = TypeVar("Shard")  # a pytree of arrays; its structure may differ from State's


def visit_shards(
    visit: Callable[[State, Shard, jax.Array], State],
    state: State,
    shard: Shard,
    axis_name: str | Axes,
) -> State:
    """Inside `shard_map`: the state after `visit` was called once for each shard of the others.

    The devices along the axes are a ring, and the shards go around it in p − 1 steps. In step i
    each device sends the shard that it holds to the next device, and calls visit with the arriving
    shard, that of device rank − i.

    visit:     visit(state, shard, owner) returns the new state. owner is the index of the shard's
               device, an int32 scalar.
    state:     a pytree of arrays, usually that of the device's own shard
    shard:     a pytree of arrays, this device's own
    axis_name: an axis of the mesh, or several, outermost first

    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], "kv")
    >>> add = lambda total, shard, owner: total + shard
    >>> body = lambda x: visit_shards(add, x, x, "kv")
    >>> total = jax.shard_map(body, mesh=mesh, in_specs=P("kv"), out_specs=P("kv"))
    >>> print(total(jnp.array([1.0, 2.0, 3.0, 4.0])))
    [10. 10. 10. 10.]
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    p = lax.axis_size(axes)
    if p == 1:
        return state
    rank = lax.axis_index(axes)

    def step(carry, i):
        state, shard = carry
        arrived = _send_next(shard, axes)
        state = visit(state, arrived, (rank - i) % p)
        # Without the barrier XLA may hold one more copy: a quarter more memory with JAX 0.12.
        return lax.optimization_barrier((state, arrived)), None

    counts = jnp.arange(1, p, dtype=jnp.int32)  # int32, as lengths are, even with x64
    (state, _), _ = lax.scan(step, (state, shard), counts)
    return state


def _send_next(tree: Any, axes: Axes) -> Any:
    """Each device's `tree` goes to the next device of the ring, in the order of `axis_index`.

    `ppermute` counts devices in the mesh's order of axes even if `axes` has another order (JAX
    0.8.3; later versions refuse another order), so the pairs are translated.
    """
    order = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes]
    sizes = [lax.axis_size(name) for name in axes]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)  # as axis_index(axes) counts them
    at = np.argsort(ranks.transpose([axes.index(name) for name in order]), axis=None)
    to_next = list(zip(at.tolist(), np.roll(at, -1).tolist(), strict=True))  # in ppermute's numbers
    return jax.tree.map(lambda x: lax.ppermute(x, tuple(order), to_next), tree)
