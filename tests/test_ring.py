"""Rings, pass-Q and the sharded prefills against dense attention, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights
from test_tree import draw_inputs, make_mesh

import treeattn
from treeattn.cost.program import collectives, count, total_bytes
from treeattn.idea.state import finalize
from treeattn.kernel import attend as kernel
from treeattn.kernel.attend import CAUSAL_BLOCK

DECODERS = {"ring": treeattn.ring_decode, "pass-Q": treeattn.pass_q_decode}
PREFILLS = {"ring": treeattn.ring_attention, "Ulysses": treeattn.ulysses_attention}


def check_dense(result, q, k, v, w, u, **options):
    """((_, (out, lse)), gradients of Σ w·out + Σ u·lse) is what dense attention gives."""
    (_, (out, lse)), grads = result
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
    for got, expected in zip(grads, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-11)


@functools.cache
def decode_value_and_gradients(shape, name):
    mesh = make_mesh(shape)

    def loss(q, k, v, options, w, u):
        out, lse = DECODERS[name](
            q, k, v, mesh=mesh, axis=mesh.axis_names, return_lse=True, **options
        )
        seen = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(w * out) + jnp.sum(u * seen), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (6,), (8,), (2, 3)], ids=str)
def test_decoding_values_and_gradients(shape, name):
    kv_len = 5 if shape == (6,) else 37

    @settings(max_examples=8, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        (q, k, v), options, w, u = draw_inputs(seed, kv_len)
        result = decode_value_and_gradients(shape, name)(q, k, v, options, w, u)
        check_dense(result, q, k, v, w, u, **options)

    check()


@functools.cache
def prefill_value_and_gradients(shape, name, causal):
    mesh = make_mesh(shape)

    def loss(q, k, v, w):
        out = PREFILLS[name](q, k, v, mesh=mesh, axis=mesh.axis_names, causal=causal)
        return jnp.sum(w * out), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", PREFILLS)
# 12 query heads read 2 key heads: Ulysses repeats these 1, 3 or 2 times.
@pytest.mark.parametrize(("shape", "length"), [((2,), 16), ((3,), 19), ((2, 2), 19), ((6,), 4)])
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


def test_full_prefill_takes_more_keys_than_queries():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 5, 4, 8))
    k, v = rng.normal(size=(2, 1, 11, 2, 8))
    for prefill in PREFILLS.values():
        out = prefill(q, k, v, mesh=make_mesh((2,)), axis="kv", causal=False)
        np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)


# A whole text on one device: halved until its parts are short.


@functools.cache
def causal_value_and_gradients(_length):
    def loss(q, k, v, w, u):
        out, lse = finalize(treeattn.attend(q, k, v, causal=True, scale=0.3))
        return jnp.sum(w * out) + jnp.sum(u * lse), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("length", [CAUSAL_BLOCK, CAUSAL_BLOCK + 1, 3 * CAUSAL_BLOCK + 5])
def test_causal_halves_values_and_gradients(length):
    options = {"mask": np.tri(length, dtype=bool)[None, None], "scale": 0.3}

    @settings(max_examples=4, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        rng = np.random.default_rng(seed)
        q, w = rng.normal(size=(2, length, 6, 8)) * 2, rng.normal(size=(2, length, 6, 5))
        k, v = rng.normal(size=(2, length, 2, 8)), rng.normal(size=(2, length, 2, 5))
        u = rng.normal(size=(2, length, 6))
        result = causal_value_and_gradients(length)(q, k, v, w, u)
        check_dense(result, q, k, v, w, u, **options)

    check()


def test_causal_halves_compute_few_hidden_scores(monkeypatch):
    seen = []
    attend = kernel.attend_blockwise

    def counting(inputs):
        seen.append(inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[1])
        return attend(inputs)

    monkeypatch.setattr(kernel, "attend_blockwise", counting)
    n, block = 1024, CAUSAL_BLOCK
    q = jnp.ones((1, n, 2, 8))
    jax.make_jaxpr(functools.partial(treeattn.attend, causal=True))(q, q, q)
    assert sum(seen) == n * (n - block) // 2 + n * block  # half of n², and half of each diagonal


# What the compiled programs send.


def shapes(mesh, kv_len, heads, kv_heads, dim, q_len=1):
    spec = NamedSharding(mesh, P(None, "kv"))
    q_spec = NamedSharding(mesh, P(None, "kv") if q_len == kv_len else P())
    kv = jax.ShapeDtypeStruct((2, kv_len, kv_heads, dim), jnp.float32, sharding=spec)
    return jax.ShapeDtypeStruct((2, q_len, heads, dim), jnp.float32, sharding=q_spec), kv, kv


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_ring_sends_every_shard_round_but_home(p, kv_heads):
    """2·b·t·d_kv·(p − 1) elements from each device, of the key heads as they are."""
    mesh, kv_len, dim = make_mesh((p,)), 1024, 32
    f = jax.jit(functools.partial(treeattn.ring_decode, mesh=mesh, axis="kv"))
    found = collectives(f.lower(*shapes(mesh, kv_len, 8, kv_heads, dim)).compile())
    assert {c.kind for c in found} == {"collective-permute"}
    assert total_bytes(found) == 4 * 2 * 2 * (kv_len // p) * (kv_heads * dim) * (p - 1)
    assert count(found) == 2 * (p - 1)


def test_pass_q_sends_the_same_for_every_context():
    mesh, sent = make_mesh((4,)), set()
    for kv_len in (256, 4096):
        f = jax.jit(functools.partial(treeattn.pass_q_decode, mesh=mesh, axis="kv"))
        found = collectives(f.lower(*shapes(mesh, kv_len, 8, 2, 32)).compile())
        sent.add(total_bytes([c for c in found if c.kind == "collective-permute"]))
    # b queries of one share, and their states, go all the way round.
    assert sent == {4 * 4 * 2 * 8 * (32 + 32 + 2)}


def test_ulysses_exchanges_four_times():
    mesh = make_mesh((4,))
    f = jax.jit(functools.partial(treeattn.ulysses_attention, mesh=mesh, axis="kv"))
    found = collectives(f.lower(*shapes(mesh, 256, 8, 4, 32, q_len=256)).compile())
    assert {c.kind for c in found} == {"all-to-all"}
    elements = 2 * 64 * 32 * (8 + 4 + 4 + 8)  # q, k and v there, the output back
    assert total_bytes(found) == 4 * elements


def test_flash_prefill_is_lowered_with_its_causal_kernel(monkeypatch):
    from treeattn.kernel import flash

    for module in flash.load():
        monkeypatch.setattr(module, "get_sm_count", lambda *_: 132)
    mesh = AbstractMesh((8,), ("kv",))
    q = jax.ShapeDtypeStruct((1, 4096, 16, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    for prefill in PREFILLS.values():
        f = functools.partial(prefill, mesh=mesh, axis="kv", implementation="flash")
        text = jax.jit(f).trace(q, kv, kv).lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @flash_mha_fwd" in line]
        assert any("is_causal = true" in line for line in calls)
        assert "4096x4096" not in text  # no mask anywhere


# What is refused.


@pytest.mark.parametrize("f", [*DECODERS.values(), *PREFILLS.values()])
def test_what_does_not_fit_is_refused(f, unchecked):
    x = jnp.ones((1, 4, 4, 8), jnp.float32)
    mesh = make_mesh((2,))
    with pytest.raises(ValueError, match="axis: the mesh has axes"):
        f(x, x, x, mesh=mesh, axis="heads")
    with pytest.raises(ValueError, match="q: expected a number of heads"):
        f(x, x[:, :, :3], x[:, :, :3], mesh=mesh, axis="kv")
    with pytest.raises(TypeError, match="q: expected a floating-point"):
        f(x.astype(int), x, x, mesh=mesh, axis="kv")
    with pytest.raises(TypeError, match="expected one dtype"):
        f(x, x.astype(jnp.bfloat16), x, mesh=mesh, axis="kv")
    with pytest.raises(ValueError, match="'flash' needs CUDA"):
        f(x, x, x, mesh=mesh, axis="kv", implementation="flash")


def test_causal_prefill_wants_as_many_queries_as_keys():
    q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 4, 4, 8))
    for prefill in PREFILLS.values():
        with pytest.raises(ValueError, match="as many queries as keys, 4, got 3"):
            prefill(q, kv, kv, mesh=make_mesh((2,)), axis="kv")


def test_ulysses_wants_heads_for_everybody(unchecked):
    x = jnp.ones((1, 4, 4, 8))
    with pytest.raises(ValueError, match="q: expected heads that 3 devices can share"):
        treeattn.ulysses_attention(x, x, x, mesh=make_mesh((3,)), axis="kv")
