"""What a user writes, checked by mypy --strict and pyright in strict mode. Nothing here is run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn as ta

ta.simulate_devices(8)
mesh = ta.kv_mesh(nodes=2)
flat_mesh = ta.kv_mesh(jax.devices()[:4], heads=2)
cache = NamedSharding(ta.kv_mesh(), P(None, "kv"))


def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return ta.tree_decode(q, k, v, sharding=cache)


def decode_with_lse(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ta.ring_decode(q, k, v, sharding=cache, return_lse=True)


def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return ta.attention(q, k, v, causal=True) + ta.ring_attention(q, k, v, sharding=cache)


def sink(q: jax.Array, k: jax.Array, v: jax.Array, logits: jax.Array) -> jax.Array:
    out, lse = ta.finalize(ta.attend(q, k, v))
    return out * jax.nn.sigmoid(lse - logits)[..., None]


def chunk(state: ta.AttentionState, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    merged = ta.merge(state, ta.attend(q, k, v))
    pivot: jax.Array = merged.max
    return ta.finalize(merged)[0] + pivot[..., None]


def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return ta.finalize(ta.merge_across(ta.attend(q, k, v), "kv", method="butterfly"))[0]


def softcap(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = 20 * jnp.tanh(jnp.einsum("blhd,bnhd->blhn", q, k) / 20)
    return jnp.einsum("blhn,bnhd->blhd", jax.nn.softmax(s), v), jax.nn.logsumexp(s, axis=-1)


def capped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return ta.attention(q, k, v, implementation=softcap)


out, lse = ta.finalize(ta.merge(ta.from_output([[1.0]], [0.0]), ta.from_output([[4.0]], [0.0])))
empty: ta.AttentionState = ta.AttentionState.identity((2, 3), 4, jnp.bfloat16)
reduced = ta.finalize(ta.reduce_tree(ta.scan_states(empty, axis=1), arity=3))[0]
mean: jax.Array = jax.grad(ta.energy)(jnp.zeros(3), jnp.ones(4), jnp.ones((5, 4)), jnp.ones((5, 3)))
masked = ta.cumulant(2, jnp.ones(4), jnp.ones((2, 4)), jnp.ones((2, 3)), mask=[True, False])

print(ta.depths([-1, 0, 0, 2]), ta.ancestor_mask(np.array([-1, 0])).sum())
packed = ta.pack([[[7, 8], [7, 9]]], [[2, 2]])
indices = ta.packed_token_indices([[[7, 8], [7, 9]]]) + ta.prefix_encoding([[[7, 8], [7, 9]]])
hidden = jnp.ones((1, packed.packed_beam.shape[1], 16))
logits: jax.Array = ta.unpack(hidden, packed.unpack_map) @ jnp.ones((16, 4))

compiled = jax.jit(decode).lower(hidden, hidden, hidden).compile()
sent = [c.sent_bytes * c.count for c in ta.collectives(compiled) if c.groups]
print(ta.collectives_table(ta.collectives(compiled)), ta.memory(compiled).held_bytes, sum(sent))
