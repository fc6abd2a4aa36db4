"""What a user writes beyond the examples of the docstrings, checked with these by mypy --strict.
Nothing here is run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn

flat_mesh = treeattn.kv_mesh(jax.devices()[:4], heads=2)
cache = NamedSharding(treeattn.kv_mesh(), P(None, "kv"))
methods: list[str] = list(treeattn.METHODS)


def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q, jax.nn.logsumexp(q, axis=-1)


def visit(
    state: treeattn.AttentionState, shard: jax.Array, owner: jax.Array
) -> treeattn.AttentionState:
    return treeattn.merge(state, treeattn.from_output(shard, owner))


q = jnp.ones((1, 8, 2, 4))
out: jax.Array = treeattn.tree_decode(q, q, q, sharding=cache)
out, lse = treeattn.ring_decode(q, q, q, sharding=P(None, "kv"), return_lse=True)
by_kernel: jax.Array = treeattn.attention(q, q, q, implementation=kernel)
x = jnp.ones((2, 4))
empty: treeattn.AttentionState = treeattn.AttentionState.identity((2, 3), 4, jnp.bfloat16)
visited: treeattn.AttentionState = treeattn.visit_shards(visit, empty, x, "kv")
mean: jax.Array = jax.grad(treeattn.energy)(x[0], x[0], x, x)
masked = treeattn.cumulant(2, x[0], x, x, mask=[True, False])
ancestors = treeattn.ancestor_mask(np.array([-1, 0])).sum()
ours: treeattn.PackedBeam = treeattn.pack([[[7, 8], [7, 9]]], [[2, 2]])
logits = jnp.asarray(treeattn.unpack(jnp.ones(ours.packed_beam.shape), ours.unpack_map))
positions = treeattn.striped_position(treeattn.striped_slot(jnp.arange(8), 8, 4), 8, 4)
lengths = treeattn.shard_lengths(jnp.array([5, 3]), 0, 8, 4, striped=True)

compiled = jax.jit(treeattn.tree_decode).lower(q, q, q).compile()
found = treeattn.collectives(compiled)
sent = [c.sent_bytes * c.count for c in found if c.groups]
print(treeattn.collectives_table(found), treeattn.memory(compiled).held_bytes, sum(sent))
