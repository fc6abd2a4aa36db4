"""Merging across a mesh: all devices' states become the state of all keys.

Merging is associative, so the states may be merged as a tree. The default method, "allreduce",
leaves the choice between a tree and a ring to the library that runs the Allreduce.

Only states are sent, and their size does not depend on the length of the context. (2024 §5.2,
Algorithm 3; 2025 §5.2, Algorithm 3.) The methods other than "allreduce" send the three fields of a
state as one array, because such small messages cost little but latency.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treeattn.checks import check_choice
from treeattn.state import AttentionState, check_state, merge, reduce_tree, rescale, where

Axes = tuple[str, ...]  # of a mesh, by name
Method = str | Callable[..., object]


def merge_across(
    state: Any, axis_name: str | Axes, *, method: Method = "allreduce"
) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along one axis, or several.

    state:     each device's own AttentionState, fields (..., h) and (..., h, dv), of the same shape
               on all devices
    axis_name: an axis of the mesh, or several, outermost first
    method:    how the states are merged. The first four give every device the merged state. Along
               several axes the first three run once for each axis, the innermost axis first, over
               the p devices along it.

        "allreduce":    2025 Algorithm 3: one Allreduce for the pivot, then one for each of the
                        sums, which XLA may combine into one. How an Allreduce travels depends on
                        what runs it: NCCL takes a tree or a ring, a TPU a ring over its torus, gloo
                        (between CPU processes) a ring of 2 (p − 1) rounds.
        "butterfly":    recursive doubling: in each of ⌊log₂ p⌋ rounds a device swaps its state
                        with a partner and merges; two more rounds if p is not a power of two. All
                        devices get the same bits. A ring takes 2 (p − 1) rounds, so for many
                        devices a butterfly is faster where latency dominates, as between CPU
                        processes.
        "gather":       every device gets all states and merges them as a tree. For 256 TPUs XLA
                        makes one Allreduce of it, which sends twice the bytes.
        "hierarchical": in three steps. First, the devices of a node (the last axis) share the
                        heads. By an all-to-all each device gets the states of its heads from all
                        devices of the node, and merges them. Second, the devices that have the same
                        heads in different nodes gather each other's merged states, and merge those.
                        Third, a gather within the node gives every device all heads. With more than
                        two axes, the second step runs once for each outer axis.
        "all_to_all":   runs once, over the p devices along all axes together. Each device has a
                        share of ⌈h/p⌉ heads. It gets all devices' states of these heads, and keeps
                        their merge. The h heads are padded at their end to p·⌈h/p⌉, with states
                        of no keys.

               Or a function (state, axes) that returns the merged AttentionState. Its `state` is
               not checked: in `tree_decode` it is the state that your `implementation` made, which
               may be a pytree of its own kind, but for no queries or no keys an AttentionState.
               `axes` is a tuple of names, perhaps empty. The merging function must return the same
               state on every device along `axes`, which is not checked.

    Take a gradient outside of `shard_map`, as below: that is right for every method and both
    settings of check_vma. A gradient taken inside is right with check_vma=True, if each device's
    loss is the whole loss; with "all_to_all", if the losses add up to it. With check_vma=False, JAX
    differentiates the sum of all devices' losses: divide the loss by p, and add up the replicated
    arrays' gradients by `lax.psum`. With check_vma=True, "butterfly", "gather" and "hierarchical"
    send one Allreduce more, because JAX knows of no other result that all devices have the same.
    With "all_to_all" `out_specs` must shard the heads along the axes.

    Raises ValueError if the method is unknown or an axis is named twice. For a named method, raises
    TypeError or ValueError if `state` is not an AttentionState whose fields fit each other. For a
    function, raises TypeError if it cannot be hashed or does not return an AttentionState.

    >>> from jax.sharding import PartitionSpec as P
    >>> from treeattn import attend, finalize, kv_mesh
    >>> mesh = kv_mesh(jax.devices()[:1])
    >>> body = lambda *qkv: finalize(merge_across(attend(*qkv), "kv"))[0]
    >>> rows = P(None, "kv")
    >>> decode = jax.shard_map(body, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P())
    >>> gradients = jax.grad(lambda *qkv: decode(*qkv).sum(), (0, 1, 2))  # outside of shard_map
    >>> q = jnp.ones((1, 2, 1, 4))
    >>> print([x.shape for x in gradients(q, q, q)])
    [(1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4)]
    """
    check_choice("method", method, tuple(METHODS))
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis_name: expected each axis once, got {axes}")
    if callable(method):
        merged = method(state, axes)
        if not isinstance(merged, AttentionState):
            kind = type(merged).__name__
            raise TypeError(f"method: expected it to return an AttentionState, got {kind}")
        return merged
    check_state(state=state)
    if not axes:
        return state
    way = METHODS[method]
    if state.max.ndim == 0 and not way.per_axis:
        raise ValueError(f"state: expected an axis of heads for {method!r}, got shape ()")
    # The innermost axis first: within a node, then across nodes.
    for along in reversed(axes) if way.per_axis else [axes]:
        state = way.run(state, along)
    return state if way.shards_heads else _replicated(state, axes)


def _replicated(state: AttentionState, axes: Axes) -> AttentionState:
    """A state that all devices have, with a type that says so.

    With `check_vma=True`, JAX knows only of an Allreduce's result that it is the same on all
    devices, so the first device's state is added to zeros of the others. Without the type, JAX's
    gradient inside `shard_map` is that of the sum of all devices' losses.
    """
    kind = jax.typeof(state.max)  # with check_vma=False, no type varies
    varies = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    varying = tuple(axis for axis in axes if axis in varies)
    if not varying:
        return state
    first = lax.axis_index(varying) == 0
    return _send_as_one(lambda x: lax.psum(jnp.where(first, x, 0), varying), state)


def _allreduce(state: AttentionState, axis: str) -> AttentionState:
    """2025 Algorithm 3: the largest pivot, then the sums of d and n relative to it."""
    m = lax.stop_gradient(state.max)
    # On a CPU, pmax of NaN and −∞ is −∞, so send NaN as ∞, and ∞ as the largest number.
    largest = jnp.finfo(m.dtype).max
    m = lax.pmax(jnp.where(jnp.isnan(m), jnp.inf, jnp.minimum(m, largest)), axis)
    m = jnp.where(m == jnp.inf, jnp.nan, m)
    _, d, n = rescale(state, m)
    return AttentionState(m, lax.psum(d, axis), lax.psum(n, axis))


def _butterfly(state: AttentionState, axis: str) -> AttentionState:
    """Recursive doubling: in round i device r swaps its state with device r XOR 2ⁱ, and merges.

    Of 6 devices, 0 … 3 are a butterfly of 2 rounds. Before it, devices 4 and 5 send their states to
    0 and 1; after it, they receive the result. Three rounds would be enough for 6, and ⌈log₂ p⌉ for
    every p, if devices merged in different orders. But then their last bits would differ.
    """
    p = lax.axis_size(axis)
    rank = lax.axis_index(axis)
    core = 1 << (p.bit_length() - 1)  # the largest power of two up to p
    extra = p - core

    def send(state, pairs):  # the state that arrives: zeros on a device that receives nothing
        return _send_as_one(lambda x: lax.ppermute(x, axis, pairs), state)

    if extra:
        arrived = send(state, [(core + i, i) for i in range(extra)])
        state = where(rank < extra, merge(state, arrived), state)
    bit = 1
    while bit < core:
        # The partner merges in the other order, with the same bits, because merge commutes.
        state = merge(state, send(state, [(i, i ^ bit) for i in range(core)]))
        bit *= 2
    if extra:
        state = where(rank < core, state, send(state, [(i, core + i) for i in range(extra)]))
    return state


def _gather(state: AttentionState, axis: str) -> AttentionState:
    """Every device gets all states, (p, ..., h) and (p, ..., h, dv), and merges them as a tree."""
    return reduce_tree(_send_as_one(lambda x: lax.all_gather(x, axis), state))


def _all_to_all(state: AttentionState, axes: Axes) -> AttentionState:
    """Each device gets all devices' states of its share, (p, ..., ⌈h/p⌉, ·), and merges them.

    Fields (..., h) and (..., h, dv) in, (..., ⌈h/p⌉) and (..., ⌈h/p⌉, dv) out.
    """
    *queries, h = state.max.shape
    heads = len(queries)
    if added := -h % lax.axis_size(axes):
        no_keys = AttentionState.identity(
            (*queries, added), state.numerator.shape[-1], state.max.dtype
        )
        state = jax.tree.map(lambda *x: jnp.concatenate(x, axis=heads), state, no_keys)

    def exchange(x):  # (…, h, …) -> (p, …, h / p, …)
        return lax.all_to_all(x[None], axes, split_axis=heads + 1, concat_axis=0, tiled=True)

    return reduce_tree(_send_as_one(exchange, state))


def _hierarchical(state: AttentionState, axes: Axes) -> AttentionState:
    """Split the heads within a node (the last axis), then merge the same heads across nodes.

    The states are merged across nodes by a gather, although it sends more bytes: N − 1 shares from
    each device across N nodes, against 2 (N − 1)/N of a share by Allreduces along a ring. But the
    gather is one collective. Of Allreduces it takes at least two, one after the other, because the
    sums cannot be sent before the pivot is known. With messages this small, each collective costs
    its latency, and bytes hardly count.
    """
    h = state.max.shape[-1]
    heads = state.max.ndim - 1
    share = _all_to_all(state, axes[-1:])
    for axis in reversed(axes[:-1]):
        share = _gather(share, axis)

    def complete(x):
        if h == 0:  # all_gather refuses an axis of size 0
            return x
        padded = lax.all_gather(x, axes[-1], axis=heads, tiled=True)
        return lax.slice_in_dim(padded, 0, h, axis=heads)

    return _send_as_one(complete, share)


def _send_as_one(collective: Callable, state: AttentionState) -> AttentionState:
    """The state that arrives when `collective` sends all fields as one array (..., h, dv + 2)."""
    m, d, n = state
    joined = jnp.concatenate([n, d[..., None], m[..., None]], axis=-1)
    arrived = collective(joined)
    return AttentionState(arrived[..., -1], arrived[..., -2], arrived[..., :-2])


class Way(NamedTuple):
    """How a method merges: run(state, axis) for each axis, or run(state, axes) once."""

    run: Callable
    per_axis: bool = True
    shards_heads: bool = False  # the result's heads are sharded along the axes


# Every method by its name; tests, benchmarks and labs iterate over the table.
METHODS = {
    "allreduce": Way(_allreduce),
    "butterfly": Way(_butterfly),
    "gather": Way(_gather),
    "hierarchical": Way(_hierarchical, per_axis=False),
    "all_to_all": Way(_all_to_all, per_axis=False, shards_heads=True),
}
