"""Long texts: in chunks on one device, and with the text sharded over devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from labs.recurrent.maps import Map, compose, identity
from labs.recurrent.rule import Updates, check
from labs.recurrent.tree import map_to, outputs, solve

UNCHANGED = Updates(k=0, v=0, gate=1, erase=0, write=0)  # a token that changes no state


def in_chunks(q, updates: Updates, state, *, size: int = 64):
    """`step_by_step`, by chunks: solves all chunks at once, then computes the states in turn."""
    return _by_chunks(_run, q, updates, state, size, 1)


def over_devices(q, updates: Updates, state, *, mesh: Mesh, axis: str = "kv", size: int = 64):
    """`step_by_step`, for a text whose tokens are sharded along an axis of the mesh.

    Every device composes its tokens to one map. A scan over the devices sends one map, of
    dk · (dk + dv) numbers, in each of ⌈log₂ p⌉ rounds. Then the last device broadcasts the state
    after the text, dk · dv numbers.
    """

    def on_device(q, updates, state):
        out, after = _run(q, updates, state, axis)
        last = lax.axis_index(axis) == lax.axis_size(axis) - 1
        return out, lax.psum(jnp.where(last, after, 0), axis)

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(axis), P(axis), P()),
        out_specs=(P(axis), P()),
        check_vma=False,  # with it, jax 0.8.3 cannot vmap a psum
    )
    return _by_chunks(run, q, updates, state, size, mesh.shape[axis])


def before_me(mine: Map, axis: str) -> Map:
    """Inside `shard_map`: the map of all tokens on lower ranks, in the order of the ranks.

    After the rounds with steps 1, 2, … s, `mine` is the map of the 2s ranks that end with this
    rank, and `before` is the map of these ranks without this rank.
    """
    p, rank, dk = lax.axis_size(axis), lax.axis_index(axis), len(mine.term)
    none = before = identity(mine)
    for step in (1 << i for i in range((p - 1).bit_length())):
        later = [(i, i + step) for i in range(p - step)]
        message = lax.ppermute(jnp.hstack(mine), axis, later)  # zeros where no rank sends
        factor = jnp.where(rank < step, none.factor, message[:, :dk])
        earlier = Map(factor, message[:, dk:])
        before, mine = compose(earlier, before), compose(earlier, mine)
    return before


def _run(q, updates: Updates, state, axis: str | None = None):
    """(the tokens' outputs, the state after them) for chunks (n, size, …)."""
    causal = jnp.tri(q.shape[1], dtype=bool)
    solved = jax.vmap(solve, (0, None))(updates, causal)
    maps = jax.vmap(map_to, (0, None))(solved, -1)
    if axis is not None:
        whole = jax.tree.map(lambda x: x[-1], lax.associative_scan(compose, maps))
        state = before_me(whole, axis)(state)
    after, starts = lax.scan(lambda state, chunk: (chunk(state), state), state, maps)
    return jax.vmap(outputs)(solved, q, starts), after


def _by_chunks(run, q, updates: Updates, state, size: int, devices: int):
    """Call `run` with chunks, the same number for each device, padded by tokens without effect."""
    check(q, updates, state)
    length = max(len(q), 1)
    size = min(size, -(-length // devices))
    count = -(-length // (size * devices)) * devices

    def cut(x, fill):
        widths = [(0, count * size - len(x))] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=fill).reshape(count, size, *x.shape[1:])

    out, state = run(cut(q, 0), jax.tree.map(cut, updates, UNCHANGED), state)
    return out.reshape(-1, out.shape[-1])[: len(q)], state
