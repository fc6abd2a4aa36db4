"""Merging across a mesh: every device's state in, the state of all their keys out.

Only states travel, whose size does not depend on the length of the context. (2024 §5.2,
Algorithm 3; 2025 §5.2, Algorithm 3.) What follows is usually a projection whose rows are sharded
along the heads, and then a device needs only its own share of the heads: "reduce_scatter" and
"all_to_all" end there, with half of the bytes or fewer.
"""

import functools
import math
import os

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from treeattn.devices.auto import fastest, state_size, surrounding_mesh
from treeattn.devices.exact import merge_exact, merge_rounded
from treeattn.devices.heads import gather_heads, own_heads, pad_heads
from treeattn.devices.mesh import Axes, AxisNames
from treeattn.devices.message import check_wire, move_state
from treeattn.idea.state import (
    AttentionState,
    check_state,
    finalize,
    from_output,
    merge,
    reduce_tree,
    rescale,
    where,
)
from treeattn.kernel.exact import ExactState
from treeattn.measured import CollectiveTimes, find_measured


def merge_across(
    state: AttentionState | ExactState,
    axis_name: AxisNames,
    *,
    method: str = "allreduce",
    wire: DTypeLike | None = None,
    measured: CollectiveTimes | str | os.PathLike | None = None,
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
            "hierarchical": over several axes. Within a node (the last axis) an all-to-all leaves
                            each device a share of the heads, a gather across the nodes merges
                            equal shares, and one within the node completes them: three
                            collectives, and one more for each axis beyond two. To each other
                            node a g-th of the state goes from each of a node's g devices.

            "exact":        the same bits in whatever order, tree or mesh: Algorithm 3 on integers,
                            in three Allreduces. An `ExactState` (of `attend_exact`) is merged
                            exactly and rounded once, so that the result depends on the set of the
                            keys alone. An `AttentionState`, rounded already, counts as one key,
                            its lse for a score and its output for a value: the same states, in any
                            order, give the same bits, another partition of the keys others. The
                            result is the state (lse, 1, out) in float32, its gradient that of
                            "allreduce".
            "auto":         of these but "exact", the one whose collectives take least by a file of
                            times measured on these devices (`treeattn.measured`): measured, or
                            else what TREEATTN_MEASURED names; without either "allreduce"

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
            hierarchical                    those of its parts, 1 each

            A message is rounded once in "gather" and "all_to_all", at every round of a
            butterfly and each part of "hierarchical", and where sums travel, every partial sum is.
            Gradients travel so, too: the outputs' in the wire's dtype, those of lse in a message
            of their own.

    JAX can tell by itself that a result is the same on all devices for "allreduce" without wire
    and for "exact" only. For every other method, "auto" among them, and whenever wire is given,
    call `shard_map` with check_vma=False if its `out_specs` say so: P() for "gather", say. JAX
    raises otherwise.

    Raises ValueError for another method, a wire that is no floating-point dtype of 16 bits or
    more, for "exact" any wire, and a state in float64, and for "auto" axes of no mesh (`vmap`'s),
    and a file that cannot be read, or that is of other devices, of fewer than the mesh has, or of
    no groups as large as the axes; TypeError for what is no state, and for an `ExactState` with
    another method.
    """
    if method != "exact" or not isinstance(state, ExactState):
        check_state(state=state)
    check_method(method)
    check_wire(wire, method)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if isinstance(state, ExactState):
        return merge_exact(state, axes)
    if method == "auto":
        method = _fastest_merge(state, axes, wire, find_measured(measured))
    if method == "exact":
        if state.max.dtype == jnp.float64:
            raise ValueError("state: method 'exact' takes float32 or narrower, got float64")
        return merge_rounded(state, axes)
    if method in SCATTERED:
        return SCATTERED[method](state, axes, wire)
    if method == "hierarchical":
        return _hierarchical(state, axes, wire)
    for axis in reversed(axes):
        state = WHOLE[method](state, axis, wire)
    return state


def _fastest_merge(state: AttentionState, axes: Axes, wire, times: CollectiveTimes | None) -> str:
    """The fastest of the methods that end with all heads on every device."""
    *rows, heads = state.max.shape or (1,)
    values = state.numerator.shape[-1]
    size = state_size(math.prod(rows), heads, values, state.max.dtype, wire)
    methods = (*WHOLE, *(["hierarchical"] if len(axes) > 1 else []))
    return fastest(times, methods, size, surrounding_mesh(axes), axes)


def _allreduce(state: AttentionState, axis: AxisNames, wire) -> AttentionState:
    """2025 Algorithm 3: the largest pivot, then the sums of d and n relative to it.

    Fields (..., h) and (..., h, dv) in and out, the same on all devices of the axis. With `wire`
    the sum is that of weighted outputs, (..., h, dv) in the wire's dtype.
    """
    if wire is None:
        m = lax.pmax(lax.stop_gradient(state.max), axis)
        _, d, n = rescale(state, m)
        return AttentionState(m, lax.psum(d, axis), lax.psum(n, axis))
    total, share = _weigh_output(state, axis, wire)
    m, d, _ = total
    return AttentionState(m, d, lax.psum(share, axis).astype(d.dtype) * d[..., None])


def _butterfly(state: AttentionState, axis: str, wire) -> AttentionState:
    """Recursive doubling: in round i device r swaps its state with device r XOR 2ⁱ, and merges.

    Fields (..., h) and (..., h, dv) in and out, the same on all devices of the axis. Of 6 devices
    4 are a butterfly of 2 rounds; before it, devices 4 and 5 hand theirs to 0 and 1, and get the
    result after it.
    """
    p = lax.axis_size(axis)
    rank = lax.axis_index(axis)
    core = 1 << (p.bit_length() - 1)  # the largest power of two that p holds
    extra = p - core

    def swap(state, pairs):  # (its own as the others get it, what arrives; no keys if nothing)
        send = functools.partial(lax.ppermute, axis_name=axis, perm=pairs)
        return move_state(lambda x: x, state, wire), move_state(send, state, wire)

    if extra:
        sent, arrived = swap(state, [(core + i, i) for i in range(extra)])
        state = where(rank < extra, merge(sent, arrived), state)
    bit = 1
    while bit < core:
        sent, arrived = swap(state, [(i, i ^ bit) for i in range(core)])
        state = merge(sent, arrived)  # the partner's merge(arrived, sent) has the same bits
        bit *= 2
    if extra:
        sent, arrived = swap(state, [(i, core + i) for i in range(extra)])
        state = where(rank < core, sent, arrived)
    return state


def _gather(state: AttentionState, axis: str, wire) -> AttentionState:
    """Every device gets all p states, (p, ..., h) and (p, ..., h, dv), and merges them as a tree.

    Fields (..., h) and (..., h, dv) in and out, the same on all devices of the axis.
    """
    states = move_state(lambda x: lax.all_gather(x, axis), state, wire)
    return reduce_tree(states)


def _reduce_scatter(state: AttentionState, axes: Axes, wire) -> AttentionState:
    """As `_allreduce`, but each device gets the sums of its share of the heads only.

    Fields (..., h) and (..., h, dv) in, (..., ⌈h/p⌉) and (..., ⌈h/p⌉, dv) out.
    """
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
    total, share = _weigh_output(state, axes, wire)
    d = own_heads(total.denominator, axes)
    n = scatter(share).astype(d.dtype) * d[..., None]
    return AttentionState(own_heads(total.max, axes), d, n)


def _all_to_all(state: AttentionState, axes: Axes, wire) -> AttentionState:
    """Each device gets everybody's states of its share, (p, ..., ⌈h/p⌉, ·), and merges them.

    Fields (..., h) and (..., h, dv) in, (..., ⌈h/p⌉) and (..., ⌈h/p⌉, dv) out.
    """
    heads = state.max.ndim - 1

    def exchange(x):  # (…, h, …) -> (p, …, h / p, …)
        return lax.all_to_all(x[None], axes, split_axis=heads + 1, concat_axis=0, tiled=True)

    return reduce_tree(move_state(exchange, pad_heads(state, axes), wire))


def _hierarchical(state: AttentionState, axes: Axes, wire) -> AttentionState:
    """Shares of the heads within a node (the last axis), merged with other nodes' equal shares.

    Fields (..., h) and (..., h, dv) in and out, the same on all devices; in between, with g
    devices a node, (..., ⌈h/g⌉) and (..., ⌈h/g⌉, dv).

    Between n nodes a gather sends n − 1 shares from each device in one message; an Allreduce sends
    2 (n − 1)/n of one in two, the pivot's first. For states of a few rows the message counts more.
    """
    share = _all_to_all(state, axes[-1:], wire)
    for axis in reversed(axes[:-1]):
        share = _gather(share, axis, wire)
    h = state.max.shape[-1]

    def gather(x):
        return gather_heads(x, axes[-1:], h, axis=state.max.ndim - 1)

    return move_state(gather, share, wire)


def scatter_by_nodes(state: AttentionState, axes: Axes, wire=None) -> AttentionState:
    """Each device's share of the heads, merged within its node (the last axis) first.

    Fields (..., h) and (..., h, dv) in, (..., ⌈h/p⌉) and (..., ⌈h/p⌉, dv) out: the shares of a node
    are shared again between the nodes, so that they are numbered along the axes in reverse.
    """
    state = pad_heads(state, axes)  # at the end of all heads, not of each share
    for axis in reversed(axes):
        state = _all_to_all(state, (axis,), wire)
    return state


WHOLE = {"allreduce": _allreduce, "butterfly": _butterfly, "gather": _gather}
SCATTERED = {"reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all}
METHODS = (*WHOLE, *SCATTERED, "hierarchical")  # of states in floating point


def check_method(method: str) -> None:
    """Raise a ValueError, with the methods there are, for another."""
    methods = (*METHODS, "exact", "auto")
    if method not in methods:
        raise ValueError(f"method: expected one of {methods}, got {method!r}")


def _weigh_output(state: AttentionState, axes: AxisNames, wire):
    """(the merge of everybody's states without values, this device's share of the output).

    The first has fields (..., h) and a numerator (..., h, 0). The share is (..., h, dv) in the
    wire's dtype: this device's numerator by everybody's denominator; those of all add up to the
    output.
    """
    out, lse = finalize(state)
    everybody = lax.all_gather(lse, axes)
    without_values = jnp.zeros((*everybody.shape, 0), everybody.dtype)
    total = reduce_tree(from_output(without_values, everybody))
    n = rescale(from_output(out, lse), total.max).numerator
    d = jnp.where(total.denominator == 0, 1, total.denominator)
    return total, (n / d[..., None]).astype(wire)
