"""Attention within a tree whose nodes are in depth-first order: the mask is one integer a node.

    query i sees key j  ⟺  j ≤ i < ends[j]

A block of queries skips a block of keys if it sees none of them: all their subtrees have ended, or
all keys are still to come. For other pairs `attend` runs under the pair's small mask, and the
states merge.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labs.training.rows import check_ends
from treeattn import AttentionState, attend, finalize, merge, visit_shards

BLOCK = 256  # queries, and keys, of a pair
NOBODY = np.iinfo(np.int32).max  # the number of a place without a node: it sees no key


def tree_attention(q, k, v, ends):
    """Attention of every node of a tree over itself and its ancestors, (b, n, h, dv) in q's dtype.

    q:    (b, n, h, d); k (b, n, h_kv, d), v (b, n, h_kv, dv), as in `treeattn.attend`
    ends: (b, n) where each node's subtree ends, of nodes in depth-first order (`pack_rows`)

    Memory does not grow with n², and the gradient's does not either. Raises ValueError if the order
    is not depth first, and the errors of `treeattn.attend`.
    """
    numbers = jnp.arange(q.shape[1], dtype=jnp.int32)
    state = tree_states(q, k, v, numbers, numbers, check_ends(ends))
    return finalize(state)[0].astype(q.dtype)


@jax.jit
def tree_states(q, k, v, query_numbers, key_numbers, ends) -> AttentionState:
    """The states of some nodes of a tree over others' keys: fields (b, l, h) and (b, l, h, dv).

    query_numbers: (l,) the nodes of the queries, in any order
    key_numbers:   (n,) the nodes of the keys
    ends:          (b, n) where each key's subtree ends; 0 for a key that no query sees
    """
    b, l, h, _ = q.shape
    n = k.shape[1]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    nothing = AttentionState.identity((b, min(l, BLOCK), h), v.shape[3], dtype)
    if l == 0 or n == 0:
        return AttentionState.identity((b, l, h), v.shape[3], dtype)
    queries = _blocks((q, jnp.broadcast_to(query_numbers, (b, l))), l, NOBODY)
    keys = _blocks((k, v, jnp.broadcast_to(key_numbers, (b, n)), ends), n, 0)

    @jax.checkpoint  # backward computes a pair again, instead of keeping its scores
    def visit(state, block, q, i):
        k, v, j, end = block
        visible = (j[:, None] <= i[:, :, None]) & (i[:, :, None] < end[:, None])  # (b, l, n)

        def see(state):
            return merge(state, attend(q, k, v, mask=visible[:, None]))

        return lax.cond(visible.any(), see, lambda state: state, state), None

    @jax.checkpoint
    def states_of(block):
        q, i = block
        return lax.scan(lambda state, keys: visit(state, keys, q, i), nothing, keys)[0]

    states = lax.map(states_of, queries)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :l], states)


def _blocks(arrays, length: int, filler: int):
    """Arrays (b, length, …) as (blocks, b, size, …), the last block padded."""
    size = min(BLOCK, length)
    missing = -length % size

    def split(x):
        widths = [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]
        value = filler if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, widths, constant_values=value)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, arrays)


def tree_ring_attention(q, k, v, ends, *, mesh):
    """`tree_attention` with the nodes sharded over a mesh: keys visit the queries in a ring.

    The ring goes along all axes of the mesh, and the nodes are in order. Keys travel with the two
    integers of their mask. A device passes on even shards that its queries do not see.

    Raises the errors of `tree_attention`.
    """
    n = q.shape[1]
    missing = -n % mesh.size
    q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    ends = jnp.pad(check_ends(ends), ((0, 0), (0, missing)))  # no query sees an added key
    numbers = jnp.arange(n + missing, dtype=jnp.int32)
    return _ring(q, k, v, numbers, ends, mesh)[:, :n]


@functools.partial(jax.jit, static_argnums=5)
def _ring(q, k, v, numbers, ends, mesh):
    axes = mesh.axis_names

    def on_device(q, k, v, own, ends):
        def visit(state, shard, owner):
            return merge(state, tree_states(q, shard[0], shard[1], own, *shard[2:]))

        shard = k, v, own, ends
        state = visit_shards(visit, tree_states(q, k, v, own, own, ends), shard, axes)
        return finalize(state)[0].astype(q.dtype)

    along = P(None, axes)
    specs = along, along, along, P(axes), along
    arrays = [
        lax.with_sharding_constraint(x, NamedSharding(mesh, s))
        for x, s in zip((q, k, v, numbers, ends), specs, strict=True)
    ]
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=along, check_vma=False)
    return mapped(*arrays)
