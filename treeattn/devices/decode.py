"""Decoding from a sharded cache: by a tree of states, and by the rings it is compared with.

`tree`, `ring` and `pass_q` are what one device does, inside `shard_map`: with queries that all
devices have, and with a shard of the keys whose lengths count its own, to the state of the queries
after all devices' keys. The cache may be dealt in any way: in contiguous shards, as `tree_decode`
and its like do it, or in stripes, as a Llama's is.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Integer

from treeattn.devices.merge import (
    METHODS,
    SCATTERED,
    WHOLE,
    check_method,
    gather_heads,
    merge_across,
    scatter_by_nodes,
)
from treeattn.devices.message import as_one, check_wire, pack_state, unpack_state
from treeattn.devices.shards import (
    Layout,
    check_call,
    count_devices,
    deal,
    no_keys,
    over_shards,
    own_lengths,
    pass_on,
)
from treeattn.idea.arrays import Array, integer, pad_axis
from treeattn.idea.state import AttentionState, finalize, merge
from treeattn.kernel.attend import attend_in_blocks, attend_inputs
from treeattn.kernel.inputs import Inputs


def tree(
    inputs: Inputs,
    axes: tuple[str, ...],
    *,
    method: str = "allreduce",
    block: int | None = None,
    wire: DTypeLike | None = None,
) -> AttentionState:
    """Tree Attention: every device attends to its shard, and the states merge across the mesh.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    Fields (b, l, h) and (b, l, h, dv), the same on all; by "reduce_scatter" and "all_to_all" each
    device gets the state of its share of the heads, ⌈h/p⌉ of them.
    """
    own = attend_inputs(inputs) if block is None else attend_in_blocks(inputs, block)
    return merge_across(own, axes, method=method, wire=wire)


def ring(inputs: Inputs, axes: tuple[str, ...]) -> AttentionState:
    """Ring Attention: every shard visits every device. The devices agree up to rounding.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    Fields (b, l, h) and (b, l, h, dv), of all keys, on every device.
    """
    p, shard = jax.lax.axis_size(axes), ("k", "v", "mask", "bias", "lengths")

    def visit(carry, _):
        state, arrived = carry
        leaving = pass_on(arrived, axes)  # under way while this device computes
        return (merge(state, attend_inputs(inputs.replace(**arrived))), leaving), None

    start = no_keys(inputs), {name: getattr(inputs, name) for name in shard}
    (state, arrived), _ = jax.lax.scan(visit, start, length=p - 1)
    return merge(state, attend_inputs(inputs.replace(**arrived)))


def pass_q(inputs: Inputs, axes: tuple[str, ...]) -> AttentionState:
    """A ring that moves shares of the queries, and their states, past shards that stay.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    Fields (b, l, h) and (b, l, h, dv), of all keys, the same on all. On the way ⌈l/p⌉ queries.
    """
    p, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    (b, l), t = inputs.q.shape[:2], inputs.k.shape[1]
    share = -(-l // p)  # queries a device sends off
    lengths = jnp.full(b, t, jnp.int32) if inputs.lengths is None else inputs.lengths

    def rows(x, axis, start):
        return jax.lax.dynamic_slice_in_dim(pad_axis(x, axis, p * share), start, share, axis)

    def visit(carry, step):
        q, state = carry
        start = (rank - step) % p * share  # the visiting queries' first row
        mask, bias = (
            x if x is None or x.shape[2] == 1 else rows(x, 2, start)
            for x in (inputs.mask, inputs.bias)
        )
        seen = jnp.where(start < l, lengths, 0)  # a share of padding attends to nothing
        here = attend_inputs(inputs.replace(q=q, mask=mask, bias=bias, lengths=seen))
        return pass_on((q, merge(state, here)), axes), None

    q = rows(inputs.q, 1, rank * share)
    start = q, no_keys(inputs.replace(q=q))
    (_, state), _ = jax.lax.scan(visit, start, jnp.arange(p))  # after p steps all are home
    whole = jax.lax.all_gather(pack_state(state), axes, axis=1, tiled=True)
    return unpack_state(whole[:, :l])


# By name, and always the same function objects, so that nothing compiles twice.
ON_DEVICE = {method: functools.partial(tree, method=method) for method in METHODS}
ON_DEVICE |= {"ring": ring, "pass_q": pass_q}


def tree_decode(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    kv_lengths: Integer[Array, " b"] | None = None,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    method: str = "allreduce",
    implementation: str | None = None,
    return_lse: bool = False,
    scatter: bool = False,
    block: int | None = None,
    wire: DTypeLike | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
):
    """Attention of q, present on every device, over keys and values sharded along `axis`.

    Layouts, mask, bias, kv_lengths and scale are those of `attend`, and implementation is, too.
    The keys are dealt to the devices in contiguous shards; kv_len need not divide by their
    number, and may be smaller. A cache that is already sharded so stays where it is.
    axis names one axis of the mesh, or several in any order, outermost first; method is
    `merge_across`'s, and so is wire, the dtype in which numerators travel.
    A program is compiled for each number given as scale, an array's as well; one that is traced,
    inside `jax.jit`, is an argument of the program.

    batch_axis, head_axis: the mesh's axes, one or several each, along which rows are sharded, and
             heads: query and key heads alike, so that each device has the queries that read its
             keys. Rows and key heads must divide by the devices along them. Nothing crosses
             these axes, and the result stays sharded along them. None: as k, v or q lie, where
             that can be seen: outside of `jax.jit` and other transformations, and along Explicit
             axes; () for none. Where it cannot be seen, axes that are not named here are left to
             XLA. It splits the plain implementation as the arrays lie, though "gather",
             "reduce_scatter", "all_to_all" and pass-Q then send states along them, too; a GPU's
             kernel it cannot split, and **gathers the whole cache along them**, with a warning:
             name them there. In a `shard_map` over some of them these are split already.

    scatter: "reduce_scatter", "all_to_all" and "hierarchical" can leave each device with its share
             of the heads, as a projection that is sharded along them wants it. The result is then
             sharded so, and has ⌈h/p⌉·p heads; those beyond h have output 0 and lse −∞. By
             "hierarchical", neighbouring shares lie in different nodes.

    block:   for the same bits from every number of devices. Each block of so many keys is attended
             to by itself, and the blocks' states merge along one tree, of which the devices hold
             subtrees: the order of all sums depends on block alone. The number of devices, and
             that of a shard's blocks, must be powers of two, and method "gather", "butterfly" or
             "all_to_all". It costs a state for each block, and time: with blocks of 1,024 keys
             1.2 to 1.5 times as much on a CPU. Without it, the devices' number decides the bits.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), the natural
    logarithm of the sum of exponentials, in float32 or wider. Both are the same on every device,
    unless scattered.

    Raises ValueError for an axis that the mesh lacks or that `shard_map` has made manual, rows or
    heads that do not divide, an unknown method or wire, a method that does not scatter when asked
    to, a block that does not make such a tree, another mesh than that of `jax.set_mesh`, and
    whatever `attend` refuses.
    """
    check_method(method)
    check_wire(wire)
    if scatter and method in WHOLE:
        can = (*SCATTERED, "hierarchical")
        raise ValueError(f"scatter: expected one of the methods {can}, got {method!r}")
    return _decode(
        method, q, k, v, return_lse, mesh, axis, scatter=scatter, block=block, wire=wire,
        kv_lengths=kv_lengths, mask=mask, bias=bias, scale=scale, implementation=implementation,
        batch_axis=batch_axis, head_axis=head_axis,
    )  # fmt: skip


def ring_decode(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    kv_lengths: Integer[Array, " b"] | None = None,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
):
    """Ring Attention for decoding: every shard of the cache visits every device.

    (Liu et al. 2023; 2024 §6.3.) Arguments, result and errors as `tree_decode`, without those that
    are about merging. In
    each of p − 1 steps a device sends the shard it holds to its neighbour: 2·b·t·d_kv·(p − 1)
    elements from each device (2024 eq. 31–32 counts p steps; the last would bring the shards home).
    """
    return _decode(
        "ring", q, k, v, return_lse, mesh, axis, kv_lengths=kv_lengths, mask=mask, bias=bias,
        scale=scale, implementation=implementation, batch_axis=batch_axis, head_axis=head_axis,
    )  # fmt: skip


def pass_q_decode(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    kv_lengths: Integer[Array, " b"] | None = None,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
):
    """A ring that moves the queries and their states ("pass-Q"); the cache stays where it is.

    Arguments, result and errors as `ring_decode`. The queries are dealt to the
    devices along q_len; each share, with the state it has gathered, visits every device and
    comes home: p steps of b·⌈l/p⌉·h·(d + dv + 2) elements from each device, whatever the
    context, and a gather of the states. A single query is on one device only; the other shares
    travel empty.
    """
    return _decode(
        "pass_q", q, k, v, return_lse, mesh, axis, kv_lengths=kv_lengths, mask=mask, bias=bias,
        scale=scale, implementation=implementation, batch_axis=batch_axis, head_axis=head_axis,
    )  # fmt: skip


def _decode(
    name: str,
    q,
    k,
    v,
    return_lse: bool,
    mesh,
    axis,
    scatter=False,
    block=None,
    wire=None,
    **options,
):
    inputs, layout = check_call(q, k, v, mesh, axis, **options)
    if block is not None:
        n, p = inputs.k.shape[1], count_devices(mesh, layout.axes)
        _check_block(integer("block", block), name, n, p, wire)
    wire = wire if wire is None else jnp.dtype(wire)
    how = {"name": name, "scatter": scatter, "block": block, "wire": wire}
    out, lse = _decode_jit(inputs, **how, layout=layout)
    return (out, lse) if return_lse else out


def _check_block(block: int, method: str, n: int, p: int, wire) -> None:
    """Raise a ValueError unless blocks of a cache of n keys are the leaves of one binary tree."""
    if method not in ("gather", "butterfly", "all_to_all"):
        raise ValueError(f"block: method {method!r} has no order of its own to keep")
    if wire is not None:
        raise ValueError(
            f"wire: what {jnp.dtype(wire)} rounds depends on the devices, which block is against"
        )
    blocks, rest = divmod(n, p * block) if block > 0 else (0, n)
    if rest or blocks.bit_count() != 1 or p.bit_count() != 1:
        raise ValueError(
            f"block: expected shards of 1, 2, 4, … blocks on 1, 2, 4, … devices, got {n} keys on "
            f"{p} devices in blocks of {block}"
        )


@functools.partial(jax.jit, static_argnames=("name", "scatter", "block", "wire", "layout"))
def _decode_jit(inputs: Inputs, *, name: str, scatter: bool, block, wire, layout: Layout):
    axes = layout.axes
    by_nodes = scatter and name == "hierarchical"
    options = {"block": block, "wire": wire} if name in METHODS else {}

    def body(rank, inputs):
        inputs = own_lengths(inputs, rank)
        if by_nodes:
            state = scatter_by_nodes(attend_inputs(inputs), axes, wire)
        else:
            state = ON_DEVICE[name](inputs, axes, **options)
        out, lse = finalize(state)
        out = out.astype(inputs.q.dtype)
        if name in SCATTERED and not scatter:
            heads = functools.partial(gather_heads, axes=axes, heads=inputs.q.shape[2], axis=2)
            return as_one(heads, out, lse)
        return out, lse

    inputs, specs = deal(inputs, layout)
    heads = layout.heads
    if scatter:  # each device's share is one of its own heads
        heads += axes[::-1] if by_nodes else axes
    result = P(layout.batch or None, None, heads or None)
    return over_shards(body, layout.mesh, axes, (specs,), result, left=layout.left)(inputs)
