"""What a user writes, checked by mypy --strict and pyright in strict mode. Nothing here is run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn

treeattn.simulate_devices(8)
mesh = treeattn.kv_mesh(nodes=2)
flat_mesh = treeattn.kv_mesh(jax.devices()[:4], heads=2)
cache = NamedSharding(treeattn.kv_mesh(), P(None, "kv"))


def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return treeattn.tree_decode(q, k, v, sharding=cache)


def decode_with_lse(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, lse = treeattn.ring_decode(q, k, v, sharding=P(None, "kv"), return_lse=True)
    return out, lse


def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    ring = treeattn.ring_attention(q, k, v, sharding=cache)
    ulysses = treeattn.ulysses_attention(q, k, v, sharding=cache)
    return treeattn.attention(q, k, v, causal=True) + ring.astype(q.dtype) + ulysses


def chunk(state: treeattn.AttentionState, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    merged = treeattn.merge(state, treeattn.attend(q, k, v))
    pivot: jax.Array = merged.max
    out, lse = treeattn.finalize(merged)
    return out + (pivot + lse)[..., None]


def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return treeattn.finalize(
        treeattn.merge_across(treeattn.attend(q, k, v), "kv", method="butterfly")
    )[0]


def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q, jax.nn.logsumexp(q, axis=-1)


def by_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return treeattn.attention(q, k, v, implementation=kernel)


one = treeattn.from_output([[1.0]], [0.0])
empty: treeattn.AttentionState = treeattn.AttentionState.identity((2, 3), 4, jnp.bfloat16)
reduced = treeattn.reduce_tree(treeattn.scan_states(treeattn.merge(one, empty), axis=1), arity=3)
x = jnp.ones((2, 4))
mean: jax.Array = jax.grad(treeattn.energy)(x[0], x[0], x, x)
masked = treeattn.cumulant(2, x[0], x, x, mask=[True, False])

print(treeattn.depths([-1, 0, 0, 2]), treeattn.ancestor_mask(np.array([-1, 0])).sum())
beam = [[[7, 8], [7, 9]]]
packed = treeattn.pack(beam, [[2, 2]])
indices = treeattn.packed_token_indices(beam) + treeattn.prefix_encoding(beam)
logits = jnp.asarray(treeattn.unpack(jnp.ones(packed.packed_beam.shape), packed.unpack_map))

treeattn.initialize("host0:1234", num_processes=4, process_id=2)
slots = treeattn.striped_slot(jnp.arange(8), 8, 4)
positions = treeattn.striped_position(slots, 8, 4)
lengths = treeattn.shard_lengths(jnp.array([5, 3]), 0, 8, 4, striped=True)
chain: treeattn.AttentionState = treeattn.reduce_chain(one)
average: jax.Array = treeattn.attention_from_energy(x[0], x, x)
total: jax.Array = treeattn.causal_energy(x, x, x, x) + treeattn.log_likelihood(
    x[0], x[0], x[0], x, x
)
ours: treeattn.PackedBeam = packed
methods: list[str] = list(treeattn.METHODS)


def visit(
    state: treeattn.AttentionState, shard: jax.Array, owner: jax.Array
) -> treeattn.AttentionState:
    return treeattn.merge(state, treeattn.from_output(shard, owner))


visited: treeattn.AttentionState = treeattn.visit_shards(visit, one, x, "kv")

compiled = jax.jit(decode).lower(x, x, x).compile()
found = treeattn.collectives(compiled)
sent = [c.sent_bytes * c.count for c in found if c.groups]
print(treeattn.collectives_table(found), treeattn.memory(compiled).held_bytes, sum(sent))
print(slots.sum(), positions.shape, lengths.max(), x[positions])
