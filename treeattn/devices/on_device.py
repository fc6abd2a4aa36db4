"""What one device does in a decoding step, inside `shard_map`: its shard in, everybody's state out.

`tree`, `ring` and `pass_q` take queries that all devices have, and a shard of the keys, whose
lengths count its own, and return the state of the queries after all devices' keys. The cache may be
dealt in any way: in contiguous shards, as `tree_decode` and its like do it, or in stripes, as a
Llama's is.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from treeattn.devices.exact import exact
from treeattn.devices.merge import METHODS, merge_across
from treeattn.devices.mesh import Axes
from treeattn.devices.message import move_state
from treeattn.devices.shards import pass_on, visit_shards
from treeattn.idea.arrays import Array, pad_axis
from treeattn.idea.state import AttentionState, merge, reduce_tree
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


def ring(
    inputs: Inputs, axes: Axes, *, lengths_of: Callable[[Array], Array] | None = None
) -> AttentionState:
    """Ring Attention: every shard visits every device. The devices agree up to rounding.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    lengths_of: where inputs have lengths, those of the shard of device r, (b,), a function of r:
            they need not travel
    Fields (b, l, h) and (b, l, h, dv), of all keys, on every device.
    """
    if inputs.lengths is not None and lengths_of is None:
        raise ValueError("lengths_of: expected the lengths of every device's shard, got None")

    beside = {name: getattr(inputs, name) for name in ("mask", "bias", "key_scale", "value_scale")}

    def merge_shard(state, k, v, beside, owner):
        lengths = inputs.lengths if lengths_of is None else lengths_of(owner)
        visited = inputs.replace(k=k, v=v, lengths=lengths, **beside)
        return merge(state, attend_inputs(visited))

    return visit_shards(merge_shard, inputs, beside, axes)


def pass_q(inputs: Inputs, axes: Axes, *, wire: DTypeLike | None = None) -> AttentionState:
    """A ring that moves shares of the queries past shards that stay; then their states come home.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    wire:   as in `merge_across`, for the states
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

    def state_of(q, step):
        start = (rank - step) % p * share  # the visiting queries' first row
        visitors = inputs.replace(
            q=q,
            mask=score_rows(inputs.mask, start),
            bias=score_rows(inputs.bias, start),
            lengths=jnp.where(start < l, lengths, 0),  # a share of padding attends to nothing
        )
        return attend_inputs(visitors)

    def visit(q, step):
        # Under way while this device attends, and not only while the state is put with the others.
        return jax.lax.optimization_barrier((pass_on(q, axes), state_of(q, step)))

    def send_home(x):  # (p, …), by owner -> (p, …), of one's own queries, by who has the keys
        return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    def gather(x):
        return jax.lax.all_gather(x, axes, axis=1, tiled=True)

    q, states = jax.lax.scan(visit, rows(inputs.q, 1, rank * share), jnp.arange(p - 1))
    last = state_of(q, p - 1)
    by_step = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), states, last)
    owners = (rank - jnp.arange(p)) % p  # in step i the queries of device rank − i were here
    by_owner = jax.tree.map(lambda x: jnp.take(x, owners, axis=0), by_step)
    own = reduce_tree(move_state(send_home, by_owner, wire))
    state = move_state(gather, own, wire)
    return jax.tree.map(lambda x: x[:, :l], state)


# By name, and always the same function objects, so that nothing compiles twice.
ON_DEVICE = {method: functools.partial(tree, method=method) for method in METHODS}
ON_DEVICE |= {"exact": exact, "ring": ring, "pass_q": pass_q}
