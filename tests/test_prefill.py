"""The sharded prefills against dense attention, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients
from test_decode import cache_over

import treeattn
from treeattn.program import collectives, total_bytes

PREFILLS = {
    "ring": treeattn.ring_attention,
    "Ulysses": treeattn.ulysses_attention,
}


@functools.cache
def prefill_value_and_gradients(shape, name, causal):
    def loss(q, k, v, w):
        out = PREFILLS[name](q, k, v, sharding=cache_over(shape), causal=causal)
        return jnp.sum(w * out), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


# 12 query heads read 2 key heads: Ulysses repeats these 1, 3 or 2 times.
SHAPES = [((2, 2), 19, True), ((6,), 4, True), ((3,), 19, False)]
CASES = [(name, *shape) for name in ("ring", "Ulysses") for shape in SHAPES]
CASES += [pytest.param(name, (3,), 19, True, marks=pytest.mark.slow) for name in PREFILLS]


@pytest.mark.parametrize(("name", "shape", "length", "causal"), CASES)
def test_prefill_values_and_gradients(shape, length, name, causal):
    mask = np.tri(length, dtype=bool)[None, None] if causal else None

    @settings(max_examples=5, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        rng = np.random.default_rng(seed)
        q, w = rng.normal(size=(2, length, 12, 8)) * 2, rng.normal(size=(2, length, 12, 6))
        k, v = rng.normal(size=(2, length, 2, 8)), rng.normal(size=(2, length, 2, 6))
        (_, out), grads = prefill_value_and_gradients(shape, name, causal)(q, k, v, w)
        np.testing.assert_allclose(out, dense_attention(q, k, v, mask=mask), atol=1e-12)
        for got, expected in zip(grads, dense_gradients(q, k, v, w, mask=mask), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-11)

    check()


def test_what_a_shard_is_filled_up_with_does_not_count(optimized):
    """XLA:CPU has left NaN there in one call of four."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((1, 8, 2, 8), (1, 8, 1, 8), (1, 8, 1, 4)))
    q, k, v = map(jnp.asarray, (q, k, v))
    expected = dense_attention(q, k, v, mask=np.tri(8, dtype=bool)[None, None])
    for _ in range(60):
        out = treeattn.ring_attention(q, k, v, sharding=cache_over((3,)))
        np.testing.assert_allclose(out, expected, atol=1e-12)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_of_explicit_axes_that_cannot_share_the_text_evenly(name):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 5, 4, 8))
    sharding = cache_over((4,), AxisType.Explicit)
    expected = dense_attention(q, k, v, mask=np.tri(5, dtype=bool)[None, None])
    np.testing.assert_allclose(PREFILLS[name](q, k, v, sharding=sharding), expected, atol=1e-12)
    with jax.set_mesh(sharding.mesh):
        out = jax.jit(functools.partial(PREFILLS[name], sharding=sharding))(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-12)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_of_no_keys(name):
    q, k = np.ones((1, 5, 4, 8)), np.ones((1, 0, 4, 8))
    assert not PREFILLS[name](q, k, k, causal=False, sharding=cache_over((4,))).any()
    assert PREFILLS[name](k, k, k, sharding=cache_over((4,))).shape == (1, 0, 4, 8)


def test_full_prefill_takes_more_keys_than_queries():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 5, 4, 8))
    k, v = rng.normal(size=(2, 1, 11, 2, 8))
    for prefill in PREFILLS.values():
        out = prefill(q, k, v, sharding=cache_over((2,)), causal=False)
        np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)


# What the compiled programs send.


def shapes(mesh, kv_len, heads, kv_heads, dim, q_len=1):
    spec = NamedSharding(mesh, P(None, "kv"))
    q_spec = NamedSharding(mesh, P(None, "kv") if q_len == kv_len else P())
    kv = jax.ShapeDtypeStruct((2, kv_len, kv_heads, dim), jnp.float32, sharding=spec)
    return jax.ShapeDtypeStruct((2, q_len, heads, dim), jnp.float32, sharding=q_spec), kv, kv


def test_ulysses_exchanges_four_times():
    sharding = cache_over((4,))
    f = jax.jit(functools.partial(treeattn.ulysses_attention, sharding=sharding))
    found = collectives(f.lower(*shapes(sharding.mesh, 256, 8, 4, 32, q_len=256)).compile())
    assert {c.kind for c in found} == {"all-to-all"}
    elements = 2 * 64 * 32 * (8 + 4 + 4 + 8)  # q, k and v there, the output back
    assert total_bytes(found) == 4 * elements


def test_flash_prefill_is_lowered_with_its_causal_kernel(flash):
    sharding = NamedSharding(AbstractMesh((8,), ("kv",)), P(None, "kv"))
    q = jax.ShapeDtypeStruct((1, 4096, 16, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    for prefill in PREFILLS.values():
        f = functools.partial(prefill, sharding=sharding, implementation="flash")
        text = jax.jit(f).trace(q, kv, kv).lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @flash_mha_fwd" in line]
        assert any("is_causal = true" in line for line in calls)
        assert "4096x4096" not in text  # no mask anywhere


# What is refused.


@pytest.mark.parametrize("f", PREFILLS.values())
def test_what_does_not_fit_is_refused(f, unchecked):
    x = jnp.ones((1, 4, 4, 8), jnp.float32)
    sharding = cache_over((2,))
    with pytest.raises(TypeError, match="sharding: expected a NamedSharding"):
        f(x, x, x, sharding=sharding.mesh)
    with pytest.raises(ValueError, match=r"q: expected .*, its heads a multiple of k"):
        f(x, x[:, :, :3], x[:, :, :3], sharding=sharding)
    with pytest.raises(TypeError, match="q: expected a floating-point"):
        f(x.astype(int), x, x, sharding=sharding)
    with pytest.raises(TypeError, match="expected one dtype"):
        f(x, x.astype(jnp.bfloat16), x, sharding=sharding)
    with pytest.raises(ValueError, match="'flash' needs a CUDA"):
        f(x, x, x, sharding=sharding, implementation="flash")


def test_causal_prefill_wants_as_many_queries_as_keys():
    q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 4, 4, 8))
    for prefill in PREFILLS.values():
        with pytest.raises(ValueError, match="as many queries as keys, 4, got 3"):
            prefill(q, kv, kv, sharding=cache_over((2,)))


def test_ulysses_wants_heads_for_everybody(unchecked):
    x = jnp.ones((1, 4, 4, 8))
    with pytest.raises(ValueError, match="q: expected heads that 3 devices can share"):
        treeattn.ulysses_attention(x, x, x, sharding=cache_over((3,)))
