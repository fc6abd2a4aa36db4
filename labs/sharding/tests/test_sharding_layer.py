"""A layer on three axes against the same layer in float64 NumPy, and what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from oracles import dense_attention

import treeattn
from labs.sharding import Cache, Sizes, Weights, cache_specs, layer_step, weight_specs
from labs.sharding.__main__ import axes_crossed, described, program
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
    """The layer for one row, (w,), whose earlier keys are lists; they get the new one."""
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
    # Row i's first keys, in order, out of their stripes.
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


def test_what_crosses_which_axis():
    """A state along the keys, two sums along the heads, of which the MLP's is along both."""
    mesh = mesh_of(2, 2, 2)
    compiled = program(SIZES, 2, SLOTS, mesh)
    found = treeattn.collectives(compiled)
    assert {c.kind for c in found} == {"all-reduce"}
    rows, heads, width, d = 1, SIZES.heads // 2, SIZES.width, SIZES.head_dim
    crossed = [(axes_crossed(c, mesh), c.operand_bytes) for c in found]
    assert crossed == [
        (["kv"], 4 * rows * heads),
        (["kv"], 4 * rows * heads * (d + 1)),
        (["heads"], 4 * rows * width),
        (["heads", "kv"], 4 * rows * width),
    ]


def test_a_device_holds_its_part():
    whole, part = (
        treeattn.memory(program(SIZES, 2, 1024, mesh_of(*s))).argument_bytes
        for s in [(1, 1, 1), (2, 2, 2)]
    )
    cache = 2 * 2 * 1024 * SIZES.kv_heads * SIZES.head_dim * 4
    assert part < whole - cache + cache / 8 + 4096 and part < whole / 6


def test_it_is_lowered_for_cuda():
    names = "batch", "heads", "kv"
    mesh = AbstractMesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)
    real = mesh_of(2, 2, 2)
    weights, cache = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), described(SIZES, 2, SLOTS, real)
    )
    x = jax.ShapeDtypeStruct((2, SIZES.width), jnp.float32)
    step = jax.jit(lambda *given: layer_step(*given, sizes=SIZES, mesh=mesh))
    text = step.trace(x, weights, cache).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.all_reduce") == 5  # XLA joins two of them
