"""What one device does in a decoding step, inside `shard_map`: its shard in, everybody's state out.

`tree`, `ring` and `pass_q` take queries that all devices have, and a shard of the keys, whose
lengths count its own, and return the state of the queries after all devices' keys. The cache may be
dealt in any way: in contiguous shards, as `tree_decode` and its like do it, or in stripes, as a
Llama's is.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from treeattn.devices.exact import exact
from treeattn.devices.merge import METHODS, merge_across
from treeattn.devices.mesh import Axes
from treeattn.devices.message import join_fields, split_fields
from treeattn.devices.shards import no_keys, pass_on
from treeattn.idea.arrays import pad_axis
from treeattn.idea.state import AttentionState, merge
from treeattn.kernel.attend import attend_in_blocks, attend_inputs
from treeattn.kernel.inputs import Inputs


def tree(
    inputs: Inputs,
    axes: Axes,
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
    state = attend_inputs(inputs) if block is None else attend_in_blocks(inputs, block)
    return merge_across(state, axes, method=method, wire=wire)


def ring(inputs: Inputs, axes: Axes) -> AttentionState:
    """Ring Attention: every shard visits every device. The devices agree up to rounding.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    Fields (b, l, h) and (b, l, h, dv), of all keys, on every device.
    """
    p = jax.lax.axis_size(axes)

    def merge_shard(state, shard):
        return merge(state, attend_inputs(inputs.replace(**shard)))

    def visit(carry, _):
        state, shard = carry
        leaving = pass_on(shard, axes)  # under way while this device computes
        return (merge_shard(state, shard), leaving), None

    shard = {name: getattr(inputs, name) for name in ("k", "v", "mask", "bias", "lengths")}
    start = no_keys(inputs), shard
    (state, shard), _ = jax.lax.scan(visit, start, length=p - 1)
    return merge_shard(state, shard)


def pass_q(inputs: Inputs, axes: Axes) -> AttentionState:
    """A ring that moves shares of the queries, and their states, past shards that stay.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    Fields (b, l, h) and (b, l, h, dv), of all keys, the same on all. On the way ⌈l/p⌉ queries.
    """
    p = jax.lax.axis_size(axes)
    rank = jax.lax.axis_index(axes)
    b, l = inputs.q.shape[:2]
    t = inputs.k.shape[1]
    share = -(-l // p)  # queries a device sends off
    lengths = jnp.full(b, t, jnp.int32) if inputs.lengths is None else inputs.lengths

    def rows(x, axis: int, start):
        return jax.lax.dynamic_slice_in_dim(pad_axis(x, axis, p * share), start, share, axis)

    def score_rows(x, start):  # of a mask or bias
        return x if x is None or x.shape[2] == 1 else rows(x, 2, start)

    def visit(carry, step):
        q, state = carry
        start = (rank - step) % p * share  # the visiting queries' first row
        visitors = inputs.replace(
            q=q,
            mask=score_rows(inputs.mask, start),
            bias=score_rows(inputs.bias, start),
            lengths=jnp.where(start < l, lengths, 0),  # a share of padding attends to nothing
        )
        state = merge(state, attend_inputs(visitors))
        return pass_on((q, state), axes), None

    q = rows(inputs.q, 1, rank * share)
    start = q, no_keys(inputs.replace(q=q))
    (_, state), _ = jax.lax.scan(visit, start, jnp.arange(p))  # after p steps all are home
    gathered = jax.lax.all_gather(join_fields(state), axes, axis=1, tiled=True)
    return split_fields(gathered[:, :l])


# By name, and always the same function objects, so that nothing compiles twice.
ON_DEVICE = {method: functools.partial(tree, method=method) for method in METHODS}
ON_DEVICE |= {"exact": exact, "ring": ring, "pass_q": pass_q}
