"""What a user writes beyond the examples of the docstrings, checked with these by mypy --strict.
Nothing here is run."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn

cache = NamedSharding(treeattn.kv_mesh(), P(None, "kv"))
methods: list[str] = list(treeattn.METHODS)


def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q, jax.nn.logsumexp(q, axis=-1)


q = jnp.ones((1, 8, 2, 4))
out: jax.Array = treeattn.tree_decode(q, q, q, sharding=cache)
out, lse = treeattn.ring_decode(q, q, q, sharding=P(None, "kv"), return_lse=True)
by_kernel: jax.Array = treeattn.attention(q, q, q, implementation=kernel)
x = jnp.ones((2, 4))
empty: treeattn.AttentionState = treeattn.AttentionState.identity((2, 3), 4, jnp.bfloat16)
masked = treeattn.cumulant(2, x[0], x, x, mask=[True, False])
lengths = treeattn.shard_lengths(jnp.array([5, 3]), 0, 8, 4, striped=True)
