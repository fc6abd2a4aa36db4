"""Merging across a mesh: every device's state in, the state of all their keys out.

Only states travel, whose size does not depend on the length of the context. (v1 §5.2,
Algorithm 3; v2 §5.2, Algorithm 3.) What follows is usually a projection whose rows are sharded
along the heads, and then a device needs only its own share of the heads: "reduce_scatter" and
"all_to_all" end there, with half of the bytes or fewer.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, from_output, merge, reduce_tree, rescale

Axes = tuple[str, ...]


def merge_across(
    state: AttentionState,
    axis_name: str | Axes,
    *,
    method: str = "allreduce",
    wire: DTypeLike | None = None,
) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along the axis.

    On every device, all of it:

    method: "allreduce":    Algorithm 3 (v2): one Allreduce for the pivot, two for the sums.
            "butterfly":    recursive doubling. Each of log₂ p rounds swaps one packed state with
                            a partner and merges; two rounds more when p is no power of two.
                            Every device gets the same bits.
            "gather":       everybody gets all states, and merges them by itself: the same bits,
                            and, where p is a power of two, those of the butterfly.
            "hierarchical": over several axes. Within a node (the last axis) a reduce-scatter
                            leaves each device a share of the heads, an Allreduce across the
                            nodes merges equal shares, and a gather within the node completes
                            them: a g-th of the state crosses between nodes from each of a node's
                            g devices.

    On each device, its share of the heads, which are the last axis of the state's `max`:

            "reduce_scatter": an Allreduce for the pivot; the sums are scattered.
            "all_to_all":     each device gets everybody's states of its share, and merges them.

    Share r of the h heads is r·s … (r+1)·s − 1 with s = ⌈h/p⌉; heads beyond h are the state of no
    keys. Several axes are outermost first. "allreduce", "butterfly" and "gather" are a tree of
    trees over them, innermost first; the others' shares are numbered along all of them.

    wire:   the dtype in which numerators travel, as the output n / d, so that they fit; None for
            the state's own. A message is rounded once in "gather" and "all_to_all", at every
            round of a butterfly, and where sums travel, every partial sum is.

    Raises ValueError for another method, and a wire that is no floating-point dtype.
    """
    check_method(method)
    if wire is not None and not jnp.issubdtype(wire, jnp.floating):
        raise ValueError(f"wire: expected a floating-point dtype or None, got {wire!r}")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if method in SCATTERED:
        return SCATTERED[method](state, axes, wire)
    if method == "hierarchical":
        share = scatter_by_nodes(state, axes, wire, whole_nodes=False)
        return gather_heads(share, axes[-1:], state.max.shape[-1])
    for axis in reversed(axes):
        state = WHOLE[method](state, axis, wire)
    return state


def _allreduce(state: AttentionState, axis: str | Axes, wire) -> AttentionState:
    m = lax.pmax(lax.stop_gradient(state.max), axis)
    _, d, n = rescale(state, m)
    if wire is None:
        return AttentionState(m, lax.psum(d, axis), lax.psum(n, axis))
    d = lax.psum(d, axis)
    return AttentionState(m, d, _unshrunk(lax.psum(_shrunk(n, d, wire), axis), d))


def _butterfly(state: AttentionState, axis: str, wire) -> AttentionState:
    p, rank = lax.axis_size(axis), lax.axis_index(axis)
    core = 1 << (p.bit_length() - 1)  # the largest power of two that p holds
    extra = p - core

    def swap(state, pairs):  # (its own as the others get it, what arrives; no keys if nothing)
        message = to_message(state, wire)
        arrived = jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), message)
        return from_message(message, wire), from_message(arrived, wire)

    if extra:  # the devices beyond the core hand their states in …
        own, arrived = swap(state, [(core + i, i) for i in range(extra)])
        state = _where(rank < extra, merge(own, arrived), state)
    bit = 1
    while bit < core:
        own, arrived = swap(state, [(i, i ^ bit) for i in range(core)])
        state = merge(own, arrived)  # the partner's merge(arrived, own) has the same bits
        bit *= 2
    if extra:  # … and get the result back
        own, arrived = swap(state, [(i, core + i) for i in range(extra)])
        state = _where(rank < core, own, arrived)
    return state


def _gather(state: AttentionState, axis: str, wire) -> AttentionState:
    gathered = jax.tree.map(lambda x: lax.all_gather(x, axis), to_message(state, wire))
    return reduce_tree(from_message(gathered, wire))


def _reduce_scatter(state: AttentionState, axes: Axes, wire) -> AttentionState:
    state = pad_heads(state, axes)
    m = lax.pmax(lax.stop_gradient(state.max), axes)
    _, d, n = rescale(state, m)

    def scatter(x, axis):
        return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)

    heads = m.ndim - 1
    if wire is None:
        sums = scatter(jnp.concatenate([n, d[..., None]], axis=-1), heads)
        return AttentionState(own_heads(m, axes), sums[..., -1], sums[..., :-1])
    d = lax.psum(d, axes)
    own = own_heads(d, axes)
    n = _unshrunk(scatter(_shrunk(n, d, wire), heads), own)
    return AttentionState(own_heads(m, axes), own, n)


def _all_to_all(state: AttentionState, axes: Axes, wire) -> AttentionState:
    heads = state.max.ndim - 1
    message = to_message(pad_heads(state, axes), wire)

    def exchange(x):  # (…, h, …) -> (p, …, h / p, …)
        return lax.all_to_all(x[None], axes, split_axis=heads + 1, concat_axis=0, tiled=True)

    return reduce_tree(from_message(jax.tree.map(exchange, message), wire))


def scatter_by_nodes(
    state: AttentionState, axes: Axes, wire=None, *, whole_nodes: bool = True
) -> AttentionState:
    """Each device's share of the heads, merged within its node (the last axis) first.

    whole_nodes: whether the nodes share the heads again among them; the shares are then numbered
                 along the axes in reverse. Otherwise every node has all heads.
    """
    if whole_nodes:
        state = pad_heads(state, axes)  # at the end of all heads, not of each share
    state = _reduce_scatter(state, axes[-1:], wire)
    for axis in reversed(axes[:-1]):
        state = (_reduce_scatter if whole_nodes else _allreduce)(state, (axis,), wire)
    return state


WHOLE = {"allreduce": _allreduce, "butterfly": _butterfly, "gather": _gather}
SCATTERED = {"reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all}
METHODS = (*WHOLE, *SCATTERED, "hierarchical")


def check_method(method: str) -> None:
    """Raise a ValueError, with the methods there are, for another."""
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")


def pad_heads(state: AttentionState, axes: Axes) -> AttentionState:
    """The state with heads that saw no keys at its end, so that the devices share them evenly."""
    added = -state.max.shape[-1] % lax.axis_size(axes)
    if not added:
        return state
    shape, dv = (*state.max.shape[:-1], added), state.numerator.shape[-1]
    more = AttentionState.identity(shape, dv, state.max.dtype)
    heads = state.max.ndim - 1
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=heads), state, more)


def own_heads(x: Float[Array, "..."], axes: Axes, axis: int = -1) -> Float[Array, "..."]:
    """This device's share of an axis that is the same everywhere, the last by default."""
    share = x.shape[axis] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * share, share, axis)


def gather_heads(share, axes: Axes, heads: int, axis: int | None = None):
    """All of `heads` on every device, of arrays that are shared along their axis of heads.

    axis: that axis; None for the last of a state's `max`
    """
    axis = share.max.ndim - 1 if axis is None else axis

    def gather(x):
        whole = lax.all_gather(x, axes, axis=axis, tiled=True)
        return lax.slice_in_dim(whole, 0, heads, axis=axis)

    if isinstance(share, AttentionState):  # in one message
        return unpack_state(gather(pack_state(share)))
    return jax.tree.map(gather, share)


def pack_state(state: AttentionState) -> Float[Array, "... packed"]:
    """The three fields as one array, so that one message carries them: numerator, d, m."""
    m, d, n = state
    return jnp.concatenate([n, d[..., None], m[..., None]], axis=-1)


def unpack_state(packed: Float[Array, "... packed"]) -> AttentionState:
    """The inverse of `pack_state`."""
    return AttentionState(packed[..., -1], packed[..., -2], packed[..., :-2])


def to_message(state: AttentionState, wire: DTypeLike | None):
    """What carries a state: one packed array, or the output in 16 bits and its lse in 32."""
    if wire is None:
        return pack_state(state)
    out, lse = finalize(state)
    return out.astype(wire), lse


def from_message(message, wire: DTypeLike | None) -> AttentionState:
    """The inverse of `to_message`, but for rounding."""
    return unpack_state(message) if wire is None else from_output(*message)


def _shrunk(n, d, wire):
    """A share of the output: numerators by everybody's denominator, in the wire's dtype."""
    return (n / jnp.where(d == 0, 1, d)[..., None]).astype(wire)


def _unshrunk(out, d):
    return out.astype(d.dtype) * d[..., None]


def _where(condition, a: AttentionState, b: AttentionState) -> AttentionState:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
