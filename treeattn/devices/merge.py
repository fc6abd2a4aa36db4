"""Merging across a mesh: every device's state in, the state of all their keys out.

Only states travel, whose size does not depend on the length of the context. (2024 §5.2,
Algorithm 3; 2025 §5.2, Algorithm 3.) What follows is usually a projection whose rows are sharded
along the heads, and then a device needs only its own share of the heads: "reduce_scatter" and
"all_to_all" end there, with half of the bytes or fewer.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float

from treeattn.devices.message import check_wire, travel
from treeattn.idea.arrays import Array
from treeattn.idea.state import (
    AttentionState,
    check_state,
    finalize,
    from_output,
    merge,
    reduce_tree,
    rescale,
)

Axes = tuple[str, ...]


def merge_across(
    state: AttentionState,
    axis_name: str | Axes,
    *,
    method: str = "allreduce",
    wire: DTypeLike | None = None,
) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along the axis.

    state: each device's own, (..., h) and numerator (..., h, dv), of the same shape on all.

    On every device, all of it, in the same shape:

    method: "allreduce":    2025 Algorithm 3: one Allreduce for the pivot, two for the sums.
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
            the state's own. With it, a state is its output and, exactly, its lse:

            butterfly, gather, all_to_all   (..., h, dv) in the wire's dtype and the bits of lse
                                            beside them, as one array of integers: as many
                                            collectives as without, of dv + 2 numbers of 16 bits
                                            a head instead of dv + 2 of 32
            allreduce, reduce_scatter       two collectives: a gather of lse (..., h), from which
                                            every device has the whole sum and so its weight in
                                            it, and the sum of weighted outputs (..., h, dv) in
                                            the wire's dtype
            hierarchical                    those of its parts: 2, 2 and 1

            A message is rounded once in "gather" and "all_to_all", at every round of a
            butterfly, and where sums travel, every partial sum is. Gradients travel so, too: the
            outputs' in the wire's dtype, those of lse in a message of their own.

    JAX can tell by itself that a result is the same on all devices for "allreduce" without wire
    alone. Where `out_specs` say so of another method's, call `shard_map` with check_vma=False.

    Raises ValueError for another method, and a wire that is no floating-point dtype of 16 bits or
    more; TypeError for what is no state.
    """
    check_state(state=state)
    check_method(method)
    check_wire(wire)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if method in SCATTERED:
        return SCATTERED[method](state, axes, wire)
    if method == "hierarchical":
        share = scatter_by_nodes(state, axes, wire, whole_nodes=False)
        heads = functools.partial(gather_heads, axes=axes[-1:], heads=state.max.shape[-1])
        return travel(functools.partial(heads, axis=state.max.ndim - 1), share, wire)
    for axis in reversed(axes):
        state = WHOLE[method](state, axis, wire)
    return state


def _allreduce(state: AttentionState, axis: str | Axes, wire) -> AttentionState:
    """Fields (..., h) and (..., h, dv) in and out, the same on all devices of the axis."""
    if wire is None:
        m = lax.pmax(lax.stop_gradient(state.max), axis)
        _, d, n = rescale(state, m)
        return AttentionState(m, lax.psum(d, axis), lax.psum(n, axis))
    (m, d, _), share = _weighted(state, axis, wire)
    return AttentionState(m, d, lax.psum(share, axis).astype(d.dtype) * d[..., None])


def _butterfly(state: AttentionState, axis: str, wire) -> AttentionState:
    """Fields (..., h) and (..., h, dv) in and out, the same on all devices of the axis."""
    p, rank = lax.axis_size(axis), lax.axis_index(axis)
    core = 1 << (p.bit_length() - 1)  # the largest power of two that p holds
    extra = p - core

    def swap(state, pairs):  # (its own as the others get it, what arrives; no keys if nothing)
        send = functools.partial(lax.ppermute, axis_name=axis, perm=pairs)
        return travel(lambda x: x, state, wire), travel(send, state, wire)

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
    """Fields (..., h) and (..., h, dv) in and out; between, (p, ..., h) and (p, ..., h, dv)."""
    return reduce_tree(travel(lambda x: lax.all_gather(x, axis), state, wire))


def _reduce_scatter(state: AttentionState, axes: Axes, wire) -> AttentionState:
    """Fields (..., h) and (..., h, dv) in, (..., ⌈h/p⌉) and (..., ⌈h/p⌉, dv) out."""
    state = pad_heads(state, axes)
    heads = state.max.ndim - 1
    if state.max.shape[heads] == 0:
        return state

    def scatter(x):
        return lax.psum_scatter(x, axes, scatter_dimension=heads, tiled=True)

    if wire is None:
        m = lax.pmax(lax.stop_gradient(state.max), axes)
        _, d, n = rescale(state, m)
        sums = scatter(jnp.concatenate([n, d[..., None]], axis=-1))
        return AttentionState(own_heads(m, axes), sums[..., -1], sums[..., :-1])
    total, share = _weighted(state, axes, wire)
    m, d = (own_heads(x, axes) for x in total[:2])
    return AttentionState(m, d, scatter(share).astype(d.dtype) * d[..., None])


def _all_to_all(state: AttentionState, axes: Axes, wire) -> AttentionState:
    """Fields (..., h) and (..., h, dv) in, (..., ⌈h/p⌉) and (..., ⌈h/p⌉, dv) out."""
    heads = state.max.ndim - 1

    def exchange(x):  # (…, h, …) -> (p, …, h / p, …)
        return lax.all_to_all(x[None], axes, split_axis=heads + 1, concat_axis=0, tiled=True)

    return reduce_tree(travel(exchange, pad_heads(state, axes), wire))


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

    if heads == 0:  # XLA gathers no arrays of no elements
        return share

    def gather(x):
        whole = lax.all_gather(x, axes, axis=axis, tiled=True)
        return lax.slice_in_dim(whole, 0, heads, axis=axis)

    if isinstance(share, AttentionState):  # in one message
        return travel(gather, share, None)
    return jax.tree.map(gather, share)


def _weighted(state: AttentionState, axes: str | Axes, wire):
    """(the merge of everybody's states without values, this device's share of the output).

    The share is (..., h, dv) in the wire's dtype: its numerator by everybody's denominator.
    """
    out, lse = finalize(state)
    everybody = lax.all_gather(lse, axes)
    without_values = jnp.zeros((*everybody.shape, 0), everybody.dtype)
    total = reduce_tree(from_output(without_values, everybody))
    n = rescale(from_output(out, lse), total.max).numerator
    d = jnp.where(total.denominator == 0, 1, total.denominator)
    return total, (n / d[..., None]).astype(wire)


def _where(condition, a: AttentionState, b: AttentionState) -> AttentionState:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
