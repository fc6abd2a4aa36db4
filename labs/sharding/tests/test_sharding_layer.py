"""A layer on three axes against the same layer in float64 NumPy.

The notebook's stored outputs and results/h100s.md have the bytes that it sends and holds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from oracles import dense_attention

import treeattn
from labs.sharding import Cache, Sizes, Weights, cache_specs, layer_step, weight_specs
from labs.sharding.__main__ import described
from labs.sharding.layer import BASE, EPSILON

SIZES = Sizes(width=24, heads=8, kv_heads=4, head_dim=4, mlp_width=32)
SLOTS = 16


def mesh_of(batch, heads, kv):
    return treeattn.kv_mesh(jax.devices()[: batch * heads * kv], batch=batch, heads=heads)


def draw(batch, mesh):
    rng = np.random.default_rng(0)
    shapes, cache = described(SIZES, batch, SLOTS, mesh)
    weights = Weights(*(rng.normal(size=x.shape) / x.shape[0] ** 0.5 for x in shapes))
    k, v = (rng.normal(size=x.shape) for x in cache[:2])
    lengths = rng.integers(0, SLOTS - 3, batch).astype(np.int32)
    return rng.normal(size=(3, batch, SIZES.width)), weights, k, v, lengths


def norm(x, gain):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * gain


def rotate(x, position):
    half = SIZES.head_dim // 2
    angle = position * BASE ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def plain_row(x, w, keys, values):
    """The layer for one row, (w,). Its earlier keys are lists, to which it appends the new key."""
    normed = norm(x, w.attention_norm)
    q, k, v = ((normed @ m).reshape(-1, SIZES.head_dim) for m in (w.query, w.key, w.value))
    q, k = rotate(q, len(keys)), rotate(k, len(keys))
    keys.append(k)
    values.append(v)
    out = dense_attention(q[None, None], np.stack(keys)[None], np.stack(values)[None])
    x = x + out.ravel() @ w.output
    normed = norm(x, w.mlp_norm)
    gate = normed @ w.gate
    return x + (gate / (1 + np.exp(-gate)) * (normed @ w.up)) @ w.down


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 4, 2), (1, 1, 8)], ids=str)
def test_three_tokens_are_those_of_one_device(shape):
    mesh = mesh_of(*shape)
    p = shape[2]
    tokens, weights, k, v, lengths = draw(2, mesh)
    # Row i's first keys, in order, collected from the stripes.
    slots = [[(j % p) * (SLOTS // p) + j // p for j in range(n)] for n in lengths]
    keys = [list(k[i, slots[i]]) for i in range(2)]
    values = [list(v[i, slots[i]]) for i in range(2)]
    placed = [
        jax.tree.map(lambda x, s: jax.device_put(jnp.asarray(x), NamedSharding(mesh, s)), *pair)
        for pair in [(weights, weight_specs()), (Cache(k, v, lengths), cache_specs())]
    ]
    step = jax.jit(lambda x, w, cache: layer_step(x, w, cache, sizes=SIZES, mesh=mesh))
    cache = placed[1]
    for x in tokens:
        out, cache = step(x, placed[0], cache)
        expected = [plain_row(x[i], weights, keys[i], values[i]) for i in range(2)]
        np.testing.assert_allclose(out, expected, atol=1e-10)
    assert list(cache.lengths) == list(lengths + 3)
