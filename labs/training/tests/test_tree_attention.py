"""Attention by ends against dense attention under the tree's mask, on one device and in a ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_attention, dense_gradients

from labs.training import attention as module
from labs.training import interval_mask, pack_rows, tree_attention, tree_ring_attention
from treeattn import kv_mesh, memory

N, H, H_KV, D, DV = 23, 4, 2, 6, 5


def compare(f, seed):
    """Values and gradients of f(q, k, v, w, ends) for a random tree of N nodes."""
    rng = np.random.default_rng(seed)
    shapes = (1, N, H, D), (1, N, H_KV, D), (1, N, H_KV, DV), (1, N, H, DV)
    q, k, v, w = (rng.normal(size=shape) for shape in shapes)
    tree = pack_rows([rng.integers(0, 3, rng.integers(1, 9)) for _ in range(60)])
    ends = np.minimum(tree.ends[:N], N)
    (_, out), grads = f(q, k, v, w, ends[None])
    mask = interval_mask(ends)[None, None]
    np.testing.assert_allclose(out, dense_attention(q, k, v, mask=mask), atol=1e-12)
    for got, dense in zip(grads, dense_gradients(q, k, v, w, mask=mask), strict=True):
        np.testing.assert_allclose(got, dense, atol=1e-11)


def with_gradient(f):
    def loss(q, k, v, w, ends):
        out = f(q, k, v, ends)
        return jnp.sum(out * w), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


@pytest.mark.parametrize("block", [3, 256], ids=["many blocks", "one block"])
def test_values_and_gradients(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    jax.clear_caches()
    f = jax.jit(with_gradient(tree_attention))

    @settings(max_examples=15)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        compare(f, seed)

    check()
    jax.clear_caches()


@pytest.mark.parametrize("p", [3, 4])
def test_in_a_ring(p):
    """The devices do not share the nodes evenly, so some places are empty."""
    mesh = kv_mesh(jax.devices()[:p])
    compare(jax.jit(with_gradient(functools.partial(tree_ring_attention, mesh=mesh))), p)


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
    x = np.ones((1, 3, 2, 4))
    ring = functools.partial(tree_ring_attention, mesh=kv_mesh(jax.devices()[:3]))
    for f in (tree_attention, ring):
        with pytest.raises(ValueError, match="ends: expected depth-first order"):
            f(x, x, x, np.array([[2, 3, 3]]))
