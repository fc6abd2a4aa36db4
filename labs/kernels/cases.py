"""Random inputs for the kernels, and the right answers."""

import jax.numpy as jnp
import numpy as np

import treeattn_conformance


def draw(shape, dtype, seed: int = 0) -> list:
    """q, k and v for a shape (batch, queries, heads, key heads, keys, head_dim, value head_dim)."""
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def right(q, k, v, **options):
    """(out, lse) in float64, by the conformance suite."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    return treeattn_conformance.attend(q, k, v, scale=q.shape[3] ** -0.5, **options)
