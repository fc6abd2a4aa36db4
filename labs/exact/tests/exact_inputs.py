"""Shared by the tests of exact sums: random inputs, the function on one device, and its bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from labs.exact import exact_attend
from treeattn import finalize


@functools.partial(jax.jit, static_argnames="causal")
def exact(q, k, v, scale=None, **options):
    """(out, lse) on one device."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return finalize(exact_attend(q, k, v, scale=scale, **options))


def inputs(b=1, l=1, h=2, h_kv=1, d=16, dv=8, n=24, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()
