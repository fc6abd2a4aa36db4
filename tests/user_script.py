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
    out: jax.Array = treeattn.tree_decode(q, k, v, sharding=cache)
    return out


def decode_with_lse(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    out: jax.Array
    lse: jax.Array
    out, lse = treeattn.ring_decode(q, k, v, sharding=cache, return_lse=True)
    return out, lse


def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    out: jax.Array = treeattn.ring_attention(q, k, v, sharding=cache)
    return treeattn.attention(q, k, v, causal=True) + out


def sink(q: jax.Array, k: jax.Array, v: jax.Array, logits: jax.Array) -> jax.Array:
    out, lse = treeattn.finalize(treeattn.attend(q, k, v))
    return out * jax.nn.sigmoid(lse - logits)[..., None]


def chunk(state: treeattn.AttentionState, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    merged = treeattn.merge(state, treeattn.attend(q, k, v))
    pivot: jax.Array = merged.max
    return treeattn.finalize(merged)[0] + pivot[..., None]


def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return treeattn.finalize(
        treeattn.merge_across(treeattn.attend(q, k, v), "kv", method="butterfly")
    )[0]


def softcap(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = 20 * jnp.tanh(jnp.einsum("blhd,bnhd->blhn", q, k) / 20)
    return jnp.einsum("blhn,bnhd->blhd", jax.nn.softmax(s), v), jax.nn.logsumexp(s, axis=-1)


def capped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return treeattn.attention(q, k, v, implementation=softcap)


out, lse = treeattn.finalize(
    treeattn.merge(treeattn.from_output([[1.0]], [0.0]), treeattn.from_output([[4.0]], [0.0]))
)
empty: treeattn.AttentionState = treeattn.AttentionState.identity((2, 3), 4, jnp.bfloat16)
reduced = treeattn.finalize(treeattn.reduce_tree(treeattn.scan_states(empty, axis=1), arity=3))[0]
mean: jax.Array = jax.grad(treeattn.energy)(
    jnp.zeros(3), jnp.ones(4), jnp.ones((5, 4)), jnp.ones((5, 3))
)
masked = treeattn.cumulant(2, jnp.ones(4), jnp.ones((2, 4)), jnp.ones((2, 3)), mask=[True, False])

print(treeattn.depths([-1, 0, 0, 2]), treeattn.ancestor_mask(np.array([-1, 0])).sum())
packed = treeattn.pack([[[7, 8], [7, 9]]], [[2, 2]])
indices = treeattn.packed_token_indices([[[7, 8], [7, 9]]]) + treeattn.prefix_encoding(
    [[[7, 8], [7, 9]]]
)
hidden = jnp.ones((1, packed.packed_beam.shape[1], 16))
logits = jnp.asarray(treeattn.unpack(hidden, packed.unpack_map)) @ jnp.ones((16, 4))

compiled = jax.jit(decode).lower(hidden, hidden, hidden).compile()
sent = [c.sent_bytes * c.count for c in treeattn.collectives(compiled) if c.groups]
print(
    treeattn.collectives_table(treeattn.collectives(compiled)),
    treeattn.memory(compiled).held_bytes,
    sum(sent),
)
