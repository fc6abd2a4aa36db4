"""Prefill with the sequence sharded: the queries of a whole prompt, dealt out like its keys.

Tree decoding has one query that every device can hold; a prompt has as many queries as keys.
`ring_attention` lets the keys visit the queries, `gather_attention` brings all of them at once,
`ulysses_attention` trades shards of the sequence for shards of the heads.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from treeattn.devices.layout import (
    Layout,
    count_devices,
    lay_out,
    refuse_exact,
    resolve_on_mesh,
)
from treeattn.devices.mesh import AnyMesh, AxisNames
from treeattn.devices.shards import no_keys, over_shards, own_lengths, visit_shards
from treeattn.idea.arrays import Scale, pad_axis
from treeattn.idea.state import finalize, merge
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.inputs import (
    DealtEnds,
    Implementation,
    Inputs,
    Intervals,
    Keys,
    Nodes,
    Output,
    Queries,
    Values,
    check_inputs,
)
from treeattn.kernel.intervals import blocks_seen


def ring_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mesh: AnyMesh,
    axis: AxisNames,
    causal: bool = True,
    ends: DealtEnds | None = None,
    nodes: Nodes | None = None,
    scale: Scale = None,
    implementation: Implementation = None,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
) -> Output:
    """Ring Attention with the queries sharded like the keys: prefill (Liu et al. 2023).

    Every device keeps its queries and sees all shards of the cache pass. With `causal`, query
    i sees keys 0 … i, and a device skips the shards that lie after its queries. The result is
    sharded along its length. Without `causal`, q may be of another length than k. batch_axis and
    head_axis are `tree_decode`'s, and as important where nobody can see how the arrays lie.

    With `ends`, as in `attend`, a device skips the shards of whose trees its queries see nothing.
    nodes: (kv_len,) the node at each place of q, k, v and the result, as `deal_tree` deals them; −1
           at an empty place, which sees nothing and is not seen. `ends` is (b, number of nodes)
           then, each row's tree in its own order. None: place i has node i

    Raises ValueError for a causal q whose length is not k's, an axis that the mesh lacks, the
    implementation "exact", since the devices merge states that are rounded, nodes without ends or
    that are not each at one place, and whatever `attend` refuses.
    """
    refuse_exact(implementation)
    inputs = check_inputs(q, k, v, scale=scale, causal=causal, ends=ends, nodes=nodes)
    layout = lay_out(inputs, mesh, axis, batch_axis, head_axis)
    inputs = resolve_on_mesh(implementation, inputs, layout)
    return _prefill(inputs, layout, _ring, layout.axes)


def gather_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mesh: AnyMesh,
    axis: AxisNames,
    causal: bool = True,
    ends: DealtEnds | None = None,
    nodes: Nodes | None = None,
    scale: Scale = None,
    implementation: Implementation = None,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
) -> Output:
    """Prefill by one Allgather: every device gets all keys, and keeps its queries.

    What Llama 3 was trained with on long texts (Grattafiori et al. 2024, §3.3.2). The bytes are the
    ring's, in one message, and every device needs room for all keys and values. It attends to them
    shard by shard, and skips what the ring skips; but no device waits for another's shard, so that
    only what each computes in all has to be even. Arguments, result and errors as in
    `ring_attention`.
    """
    refuse_exact(implementation)
    inputs = check_inputs(q, k, v, scale=scale, causal=causal, ends=ends, nodes=nodes)
    layout = lay_out(inputs, mesh, axis, batch_axis, head_axis)
    inputs = resolve_on_mesh(implementation, inputs, layout)
    return _prefill(inputs, layout, _gather, layout.axes)


def ulysses_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mesh: AnyMesh,
    axis: AxisNames,
    causal: bool = True,
    ends: DealtEnds | None = None,
    nodes: Nodes | None = None,
    scale: Scale = None,
    implementation: Implementation = None,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
) -> Output:
    """Prefill by two all-to-alls: shards of the sequence become shards of the heads, and back.

    Each device attends over the whole sequence for h / p heads (Jacobs et al. 2023, DeepSpeed
    Ulysses). When p does not divide the key heads, they are repeated just as often as needed.
    Same arguments and result as `ring_attention`; with head_axis, h and p are those of one of its
    devices. No states merge here, so implementation "exact" has the bits of one device.

    Raises ValueError when p does not divide the query heads, and as `ring_attention` does.
    """
    inputs = check_inputs(q, k, v, scale=scale, causal=causal, ends=ends, nodes=nodes)
    layout = lay_out(inputs, mesh, axis, batch_axis, head_axis)
    inputs = resolve_on_mesh(implementation, inputs, layout)
    p = count_devices(mesh, layout.axes)
    groups = count_devices(mesh, layout.heads)
    h = q.shape[2] // groups  # of a device along the heads
    kv_heads = k.shape[2] // groups
    if h % p:
        raise ValueError(f"q: expected heads that {p} devices can share evenly, got {h}")
    repeats = p // math.gcd(p, kv_heads)
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    return _prefill(inputs.replace(k=k, v=v), layout, _ulysses, ())


@functools.partial(jax.jit, static_argnames=("layout", "attention", "along_keys"))
def _prefill(inputs: Inputs, layout: Layout, attention, along_keys):
    """`out` (b, l, h, dv): queries and keys dealt along their lengths, and what each device does.

    attention: (inputs, rank, axes), with shards of the queries (b, ⌈l/p⌉, h, d) and of the keys
               (b, t, …), to a shard of `out`
    along_keys: the axes along which it wants the intervals of trees; () for whole ones
    """
    axes = layout.axes
    b, l = inputs.q.shape[:2]
    n = inputs.k.shape[1]
    p = count_devices(layout.mesh, axes)
    q, k, v = (pad_axis(x, 1, p * -(-x.shape[1] // p)) for x in (inputs.q, inputs.k, inputs.v))
    # Padded keys come after all real queries, so causality hides them as well.
    hidden = inputs.causal or inputs.intervals is not None or k.shape[1] == n
    lengths = None if hidden else jnp.full(b, n, jnp.int32)
    intervals = _pad_intervals(inputs.intervals, k.shape[1])
    inputs = inputs.replace(q=q, k=k, v=v, lengths=lengths, intervals=intervals)
    along = layout.spec(axes)
    nodes = P(along_keys or None)
    interval_specs = intervals and Intervals(nodes, nodes, P(layout.batch or None, *nodes))
    specs = inputs.replace(
        q=along, k=along, v=along, lengths=layout.rows(), factor=P(), intervals=interval_specs
    )

    def on_device(rank, inputs):
        return attention(inputs, rank, axes)

    mapped = over_shards(on_device, layout.mesh, axes, (specs,), along, left=layout.left)
    return mapped(inputs)[:, :l]


def _pad_intervals(intervals: Intervals | None, size: int) -> Intervals | None:
    """The intervals of `size` nodes, of which nobody sees those that were added."""
    if intervals is None:
        return None
    missing = size - intervals.ends.shape[1]
    queries = jnp.pad(intervals.queries, (0, missing), mode="edge")
    keys = jnp.pad(intervals.keys, (0, missing), mode="edge")
    return Intervals(queries, keys, jnp.pad(intervals.ends, ((0, 0), (0, missing))))


def _ring(inputs: Inputs, rank, axes):
    """The keys visit the queries: in step i device r sees the shard of device r − i.

    A shard of `out` (b, ⌈l/p⌉, h, dv), from those of q (b, ⌈l/p⌉, h, d), k and v (b, t, …).
    """

    def merge_shard(state, k, v, intervals, owner):
        return _merge_shard(state, inputs, rank, (k, v, intervals), owner)

    *_, intervals = _shard(inputs)
    out, _ = finalize(visit_shards(merge_shard, inputs, intervals, axes))
    return out.astype(inputs.q.dtype)


def _gather(inputs: Inputs, rank, axes):
    """All shards at once, and then one after the other. Takes and returns what `_ring` does."""
    p = jax.lax.axis_size(axes)

    def gather(x):  # (p, …), where XLA gathers no arrays of no elements
        return jax.lax.all_gather(x, axes) if x.size else jnp.zeros((p, *x.shape), x.dtype)

    def visit(state, shard):
        return _merge_shard(state, inputs, rank, *shard), None

    shards = jax.tree.map(gather, _shard(inputs))
    state, _ = jax.lax.scan(visit, no_keys(inputs), (shards, jnp.arange(p)))
    out, _ = finalize(state)
    return out.astype(inputs.q.dtype)


def _shard(inputs: Inputs):
    """What other devices need of this one: k, v, and the intervals of its keys."""
    intervals = inputs.intervals
    return inputs.k, inputs.v, intervals and (intervals.keys, intervals.ends)


def _merge_shard(state, inputs: Inputs, rank, shard, owner):
    """The state of device `rank`'s queries after the shard of `owner`, too; skipped if unseen."""
    k, v, intervals = shard
    unseen = no_keys(inputs)

    def state_of_whole_shard():
        return attend_inputs(own_lengths(inputs.replace(k=k, v=v, causal=False), owner))

    def state_of_diagonal():
        return attend_inputs(inputs.replace(k=k, v=v))

    def state_of_nothing():
        return unseen

    if intervals is not None:
        keys, ends = intervals
        intervals = inputs.intervals.replace(keys=keys, ends=ends)

        def state_of_trees():
            return attend_inputs(inputs.replace(k=k, v=v, intervals=intervals))

        seen = blocks_seen(intervals, max(k.shape[1], 1)).any()
        return merge(state, jax.lax.cond(seen, state_of_trees, state_of_nothing))
    if not inputs.causal:
        return merge(state, state_of_whole_shard())
    case = jnp.sign(owner - rank) + 1  # 0 earlier keys, 1 the queries' own, 2 later ones
    cases = state_of_whole_shard, state_of_diagonal, state_of_nothing
    return merge(state, jax.lax.switch(case, cases))


def _ulysses(inputs: Inputs, rank, axes):
    """Shards of the text become shards of the heads, (b, p·⌈l/p⌉, h/p, d), and back.

    Takes and returns what `_ring` does.
    """
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axes, tiled=True)

    def by_heads(x):
        return exchange(x, split_axis=2, concat_axis=1)

    whole_text = inputs.replace(q=by_heads(inputs.q), k=by_heads(inputs.k), v=by_heads(inputs.v))
    out, _ = finalize(attend_inputs(whole_text))
    return exchange(out.astype(inputs.q.dtype), split_axis=1, concat_axis=2)
