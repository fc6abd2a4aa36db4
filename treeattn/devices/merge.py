"""Merging across a mesh: every device's state in, the state of all their keys out.

Only states travel, whose size does not depend on the length of the context. (v1 §5.2,
Algorithm 3; v2 §5.2, Algorithm 3.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, merge, reduce_tree, rescale


def merge_across(
    state: AttentionState, axis_name: str | tuple[str, ...], *, method: str = "allreduce"
) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along the axis, on every device.

    Several axes are a tree of trees: the last, innermost axis first, so that ("node", "device")
    merges within the nodes before anything crosses between them.

    method: "allreduce": Algorithm 3 (v2): one Allreduce for the pivot, two for the sums.
            "butterfly": recursive doubling. Each of log₂ p rounds swaps one packed state with
                         a partner and merges; two rounds more when p is no power of two. Every
                         device gets the same bits.
            "gather":    everybody gets all states, and merges them by itself.

    Raises ValueError for another method.
    """
    check_method(method)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for axis in reversed(axes):
        state = METHODS[method](state, axis)
    return state


def _allreduce(state: AttentionState, axis: str) -> AttentionState:
    m = jax.lax.pmax(jax.lax.stop_gradient(state.max), axis)
    _, d, n = rescale(state, m)
    return AttentionState(m, jax.lax.psum(d, axis), jax.lax.psum(n, axis))


def _butterfly(state: AttentionState, axis: str) -> AttentionState:
    p, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    core = 1 << (p.bit_length() - 1)  # the largest power of two that p holds
    extra = p - core

    if extra:  # the devices beyond the core hand their states in …
        arrived = _send(state, axis, [(core + i, i) for i in range(extra)])
        state = _where(rank < extra, merge(state, arrived), state)
    bit = 1
    while bit < core:
        arrived = _send(state, axis, [(i, i ^ bit) for i in range(core)])
        # Both partners merge in rank order: the same operations, hence the same bits.
        lower = rank & bit == 0
        state = merge(_where(lower, state, arrived), _where(lower, arrived, state))
        bit *= 2
    if extra:  # … and get the result back
        arrived = _send(state, axis, [(i, core + i) for i in range(extra)])
        state = _where(rank < core, state, arrived)
    return state


def _gather(state: AttentionState, axis: str) -> AttentionState:
    return reduce_tree(unpack_state(jax.lax.all_gather(pack_state(state), axis)))


METHODS = {"allreduce": _allreduce, "butterfly": _butterfly, "gather": _gather}


def check_method(method: str) -> None:
    """Raise a ValueError, with the methods there are, for another."""
    if method not in METHODS:
        raise ValueError(f"method: expected one of {tuple(METHODS)}, got {method!r}")


def pack_state(state: AttentionState) -> Float[Array, "... packed"]:
    """The three fields as one array, so that one message carries them: numerator, d, m."""
    m, d, n = state
    return jnp.concatenate([n, d[..., None], m[..., None]], axis=-1)


def unpack_state(packed: Float[Array, "... packed"]) -> AttentionState:
    """The inverse of `pack_state`."""
    return AttentionState(packed[..., -1], packed[..., -2], packed[..., :-2])


def _send(state: AttentionState, axis: str, pairs: list[tuple[int, int]]) -> AttentionState:
    """What arrives from the partner; zeros on devices that no pair (from, to) sends to."""
    return unpack_state(jax.lax.ppermute(pack_state(state), axis, pairs))


def _where(condition, a: AttentionState, b: AttentionState) -> AttentionState:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
