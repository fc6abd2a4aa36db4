"""Attention by ends against dense attention under the tree's mask, on one device and in a ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_attention, dense_gradients

from labs.training import (
    DEALINGS,
    deal_tree,
    interval_mask,
    pack_rows,
    tree_attention,
    tree_ring_attention,
)
from labs.training import attention as module
from treeattn import kv_mesh, memory

H, H_KV, D, DV = 4, 2, 6, 5


def tree_of(seed, n):
    """(ends, mask) of a random tree of exactly n nodes in depth-first order."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 3, rng.integers(1, 9)) for _ in range(60)]
    (tree,) = pack_rows(rows)
    ends = np.minimum(tree.ends[:n], n)
    return ends, interval_mask(ends)


def draw(seed, n):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, n, H, D))
    k, v = rng.normal(size=(1, n, H_KV, D)), rng.normal(size=(1, n, H_KV, DV))
    return q, k, v, rng.normal(size=(1, n, H, DV))


def with_gradient(f):
    def loss(q, k, v, w, *more):
        out = f(q, k, v, *more)
        return jnp.sum(out * w), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.fixture(scope="module", params=[3, 256], ids=["many blocks", "one block"])
def on_one_device(request):
    """The function with blocks of that size, compiled once for the tests of this module."""
    before, module.BLOCK = module.BLOCK, request.param
    jax.clear_caches()
    yield with_gradient(tree_attention)
    module.BLOCK = before
    jax.clear_caches()


def test_values_and_gradients(on_one_device):
    @settings(max_examples=15)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        n = 23
        q, k, v, w = draw(seed, n)
        ends, mask = tree_of(seed, n)
        (_, out), grads = on_one_device(q, k, v, w, ends[None])
        np.testing.assert_allclose(out, dense_attention(q, k, v, mask=mask[None, None]), atol=1e-12)
        expected = dense_gradients(q, k, v, w, mask=mask[None, None])
        for got, dense in zip(grads, expected, strict=True):
            np.testing.assert_allclose(got, dense, atol=1e-11)

    check()


@pytest.mark.parametrize("dealing", [None, *DEALINGS])
@pytest.mark.parametrize("p", [3, 4])
def test_in_a_ring(p, dealing):
    """Wherever the nodes lie; with a dealing some places are empty."""
    n = 23
    q, k, v, w = draw(p, n)
    ends, mask = tree_of(p, n)
    mesh = kv_mesh(jax.devices()[:p])
    expected = dense_attention(q, k, v, mask=mask[None, None])
    gradients = dense_gradients(q, k, v, w, mask=mask[None, None])
    run = functools.partial(tree_ring_attention, mesh=mesh, ends=ends[None])
    if dealing is None:
        (_, out), grads = with_gradient(run)(q, k, v, w)
    else:
        nodes = deal_tree(ends, p, dealing=dealing)
        there = nodes >= 0
        place = np.empty(n, int)
        place[nodes[there]] = np.flatnonzero(there)

        def in_places(q, k, v):
            dealt = (x[:, nodes] for x in (q, k, v))
            return run(*dealt, nodes=nodes)[:, place]

        (_, out), grads = with_gradient(in_places)(q, k, v, w)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    for got, dense in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(got, dense, atol=1e-11)


def test_memory_does_not_grow_with_the_square(optimized):
    """Four times the nodes take about four times the temporaries, not sixteen."""

    def temporaries(n):
        x = jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32)
        ends = np.full((1, n), n, np.int32)

        def loss(q, k, v):
            return tree_attention(q, k, v, ends).sum()

        return memory(jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()).temporary_bytes

    assert temporaries(8192) < 6 * temporaries(2048)


def test_what_does_not_fit():
    x, ends = np.ones((1, 3, 2, 4)), np.array([[3, 2, 3]])
    with pytest.raises(ValueError, match="ends: expected depth-first order"):
        tree_attention(x, x, x, np.array([[2, 3, 3]]))
    with pytest.raises(ValueError, match="nodes: expected each of 3 nodes at one place"):
        nodes = np.array([0, 1, 1])
        tree_ring_attention(x, x, x, ends, mesh=kv_mesh(jax.devices()[:3]), nodes=nodes)
