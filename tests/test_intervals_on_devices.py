"""Trees whose keys are sharded: ring and Ulysses by intervals, against a single device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import treeattn
from treeattn import attention
from treeattn.kernel import blockwise

NODES = 75


NODE = np.arange(NODES)
TEXTS = (NODE // 15 + 1) * 15  # five texts side by side, of 15 nodes each
ANSWERS = np.where(NODE < 20, NODES, np.minimum(20 + ((NODE - 20) // 11 + 1) * 11, NODES))


def arrays(rng, b=2, h=8, h_kv=2, d=8):
    shapes = (b, NODES, h, d), (b, NODES, h_kv, d), (b, NODES, h_kv, d)
    return tuple(jnp.array(rng.normal(size=shape)) for shape in shapes)


@pytest.mark.parametrize("prefill", [treeattn.ring_attention, treeattn.ulysses_attention])
@pytest.mark.parametrize("sizes", [(1,), (3,), (8,), (2, 2)])
def test_values_and_gradients(prefill, sizes):
    if prefill is treeattn.ulysses_attention and sizes == (3,):
        pytest.skip("three devices cannot share eight heads")
    names = ("kv", "device")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        ends = np.stack([ANSWERS, TEXTS])
        q, k, v = arrays(rng)
        weights = jnp.array(rng.normal(size=q.shape))

        def total(f, *x):
            out = f(*x)
            return (out * weights).sum(), out

        one = functools.partial(attention, ends=ends)
        many = functools.partial(prefill, mesh=mesh, axis=names, ends=ends)
        run = [
            jax.jit(jax.grad(functools.partial(total, f), (0, 1, 2), has_aux=True))
            for f in (one, many)
        ]
        expected, found = (f(q, k, v) for f in run)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_shards_that_nobody_sees_are_skipped(monkeypatch):
    """Five texts on five devices: of the 25 pairs of shards a ring computes five."""
    rng = np.random.default_rng(0)
    computed = []
    jax.clear_caches()
    compute = blockwise.products.matrix_scores

    def counting(q, k):
        jax.debug.callback(lambda: computed.append(1))
        return compute(q, k)

    monkeypatch.setattr(blockwise.products, "matrix_scores", counting)
    mesh = jax.make_mesh((5,), ("kv",), axis_types=(AxisType.Auto,))
    q, k, v = arrays(rng, b=1)
    for ends, pairs in ((TEXTS, 5), (np.full(NODES, NODES), 15)):
        computed.clear()
        run = functools.partial(treeattn.ring_attention, mesh=mesh, axis="kv", ends=ends[None])
        jax.block_until_ready(run(q, k, v))
        jax.effects_barrier()
        assert len(computed) == pairs


def test_named_rows():
    """A batch along an axis of its own: every device has the trees of its rows."""
    rng = np.random.default_rng(1)
    mesh = jax.make_mesh((2, 3), ("batch", "kv"), axis_types=(AxisType.Auto,) * 2)
    ends = np.stack([ANSWERS, TEXTS])
    q, k, v = arrays(rng)
    run = functools.partial(treeattn.ring_attention, mesh=mesh, axis="kv", batch_axis="batch")
    found = jax.jit(functools.partial(run, ends=ends))(q, k, v)
    np.testing.assert_allclose(found, attention(q, k, v, ends=ends), atol=1e-5)
