"""Gradients of `merge_across` that a user takes, outside of `shard_map` and inside.

JAX's rule inside (https://github.com/jax-ml/jax/issues/3970): with check_vma=False, the gradient is
that of the sum of all devices' losses. With check_vma=True, it is that of one loss, if the loss has
the type of something that all devices have.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import over
from jax import lax
from jax.sharding import PartitionSpec as P

from treeattn import METHODS, attend, finalize, merge_across

p, MESH, ROWS = 4, over(keys=4).mesh, P(None, "keys")
RNG = np.random.default_rng(0)
Q, W = RNG.normal(size=(2, 1, 3, 4, 5))
K, V = RNG.normal(size=(2, 1, 8, 4, 5))


def score(q, out, lse, w):
    """A loss in which queries count apart from attention, as in a residual connection."""
    return jnp.sum(w * (out + q)) + jnp.sum(lse**2)


def dense(q, k, v):
    return score(q, *finalize(attend(q, k, v)), W)


def merged(q, k, v, *, method):
    """(q, out, lse, w) of all heads, or of the device's own."""
    out, lse = finalize(merge_across(attend(q, k, v), "keys", method=method))
    w = jnp.asarray(W)
    if METHODS[method].shards_heads:
        i = lax.axis_index("keys")
        q, w = (lax.dynamic_slice_in_dim(x, i, 1, axis=2) for x in (q, w))
    return q, out, lse, w


def outside(q, k, v, *, method, check):
    def body(q, k, v):
        return merged(q, k, v, method=method)[1:3]

    result = P(None, None, "keys") if METHODS[method].shards_heads else P()
    specs = {"in_specs": (P(), ROWS, ROWS), "out_specs": result, "check_vma": check}
    f = jax.shard_map(body, mesh=MESH, **specs)
    return jax.grad(lambda *x: score(x[0], *f(*x), W), (0, 1, 2))(q, k, v)


def inside(q, k, v, *, method, check):
    """With check_vma=False each device takes its share of the loss, and dq is added up. Without the
    share, gradients are p times what they should be."""
    shares = METHODS[method].shards_heads  # the devices' losses add up to the loss

    def on_device(q, k, v):
        def loss(*x):
            found = score(*merged(*x, method=method))
            return found if check or shares else found / p

        dq, dk, dv = jax.grad(loss, (0, 1, 2))(q, k, v)
        return dq if check else lax.psum(dq, "keys"), dk, dv

    specs = {"in_specs": (P(), ROWS, ROWS), "out_specs": (P(), ROWS, ROWS), "check_vma": check}
    return jax.shard_map(on_device, mesh=MESH, **specs)(q, k, v)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_outside_and_inside(method, check):
    expected = jax.grad(dense, (0, 1, 2))(Q, K, V)
    for way in outside, inside:
        found = jax.jit(functools.partial(way, method=method, check=check))(Q, K, V)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-10)
