"""Tree decoding against dense attention in float64, and what its compiled programs send."""

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

import treeattn
from treeattn.cost.program import collectives, count, memory, total_bytes
from treeattn.devices.merge import METHODS, merge_across

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
MESHES = [(p,) for p in range(1, 10)] + [(2, 2), (2, 3), (3, 2), (4, 2)]


def make_mesh(shape):
    devices = jax.devices()[: np.prod(shape)]
    return treeattn.kv_mesh(devices, nodes=shape[0] if len(shape) == 2 else None)


@functools.cache
def value_and_gradients(shape, method):
    """(out, lse, gradients of Σ w·out + Σ u·lse over the rows with keys), compiled once."""
    mesh = make_mesh(shape)

    def loss(q, k, v, options, w, u):
        out, lse = treeattn.tree_decode(
            q, k, v, mesh=mesh, axis=mesh.axis_names, method=method, return_lse=True, **options
        )
        seen = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(w * out) + jnp.sum(u * seen), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def draw_inputs(seed: int, kv_len: int, batch: int = 2, q_len: int = 2):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, q_len, HEADS, DIM)) * 3
    k = rng.normal(size=(batch, kv_len, KV_HEADS, DIM))
    v = rng.normal(size=(batch, kv_len, KV_HEADS, VALUE_DIM))
    options = {
        "mask": rng.random((batch, 1, q_len, kv_len)) < rng.choice([0.05, 0.5, 1.0]),
        "bias": rng.normal(size=(1, HEADS, 1, kv_len)),
        "kv_lengths": rng.integers(0, kv_len + 1, batch).astype(np.int32),
    }
    w = rng.normal(size=(batch, q_len, HEADS, VALUE_DIM))
    u = rng.normal(size=(batch, q_len, HEADS))
    return (q, k, v), options, w, u


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", MESHES, ids=lambda s: "x".join(map(str, s)))
def test_values_and_gradients(shape, method):
    if method == "gather" and shape not in [(1,), (3,), (2, 3)]:
        pytest.skip("gather is one collective, whatever the number")
    if method == "allreduce" and shape in [(4,), (5,), (7,), (3, 2), (4, 2)]:
        pytest.skip("covered by the other numbers: an Allreduce does not depend on their factors")
    # 5 keys: fewer than devices on some meshes; 37 divides by none of them.
    kv_len = 5 if shape in [(6,), (9,), (4, 2)] else 37

    @settings(max_examples=8, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        (q, k, v), options, w, u = draw_inputs(seed, kv_len)
        (_, (out, lse)), grads = value_and_gradients(shape, method)(q, k, v, options, w, u)
        _, expected_lse = dense_weights(q, k, **options)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-12)
        for got, expected in zip(grads, dense_gradients(q, k, v, w, u, **options), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-11)
        if method == "butterfly":
            copies = [np.asarray(s.data).tobytes() for s in out.addressable_shards]
            assert len(set(copies)) == 1

    check()


@pytest.mark.parametrize("kv_len", [1, 8, 40])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 4, 4), (3, 4, 4), (3, 6, 2)])
def test_float32_without_options(kv_len, batch, heads, kv_heads):
    rng = np.random.default_rng(kv_len)
    q = rng.normal(size=(batch, 1, heads, 16)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_len, kv_heads, 16)).astype(np.float32)
    mesh = make_mesh((8,))
    out, lse = treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv", return_lse=True)
    assert out.dtype == jnp.float32 and lse.dtype == jnp.float32
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-5)


def test_no_keys_at_all():
    q, k, v = np.ones((1, 1, 2, 4)), np.zeros((1, 0, 2, 4)), np.zeros((1, 0, 2, 4))
    for method in METHODS:
        out, lse = treeattn.tree_decode(
            q, k, v, mesh=make_mesh((3,)), axis="kv", method=method, return_lse=True
        )
        assert not np.any(out) and np.all(np.isneginf(lse))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_sums_in_float32(dtype):
    rng = np.random.default_rng(0)
    # Scores to ±500: exp of any of them overflows half precision, and most float32.
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, n, 4, 64)) * s, dtype)
        for n, s in [(1, 8), (4096, 8), (4096, 1)]
    )
    out, lse = treeattn.tree_decode(q, k, v, mesh=make_mesh((8,)), axis="kv", return_lse=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(out, np.float64), dense_attention(q, k, v), atol=0.02, rtol=0.02
    )
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-4)


# What the compiled program sends.


@functools.cache
def compiled(p: int, kv_len: int, method: str = "allreduce", batch: int = 1, sharded: bool = True):
    mesh = make_mesh((p,))
    spec = NamedSharding(mesh, P(None, "kv") if sharded else P())
    cache = jax.ShapeDtypeStruct((batch, kv_len, 16, 128), jnp.float32, sharding=spec)
    q = jax.ShapeDtypeStruct((batch, 1, 16, 128), jnp.float32, sharding=NamedSharding(mesh, P()))
    f = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", method=method)
    return jax.jit(f).lower(q, cache, cache).compile()


@pytest.mark.parametrize("batch", [1, 3])
def test_allreduce_sends_equation_34(batch):
    """b·d + 2·b·n_h elements, in at most two collectives, whatever the context."""
    elements = batch * 16 * 128 + 2 * batch * 16
    for kv_len in (2048, 32768):
        found = collectives(compiled(8, kv_len, batch=batch))
        assert {c.kind for c in found} == {"all-reduce"}
        assert count(found) <= 2
        assert total_bytes(found) == 4 * elements


@pytest.mark.parametrize("p", [2, 4, 8])
def test_butterfly_sends_one_packed_state_a_round(p):
    found = collectives(compiled(p, 4096, "butterfly"))
    assert {c.kind for c in found} == {"collective-permute"}
    assert count(found) == (p - 1).bit_length()
    assert total_bytes(found) == 4 * count(found) * (16 * 128 + 2 * 16)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 9])
def test_butterfly_needs_two_more_rounds_for_other_numbers(p):
    found = collectives(compiled(p, 4096 * p, "butterfly"))
    assert count(found) == p.bit_length() - 1 + 2


def test_gather_sends_once():
    found = collectives(compiled(8, 4096, "gather"))
    assert [c.kind for c in found] == ["all-gather"]


def test_a_sharded_cache_stays_where_it_is():
    """Nothing as large as a shard is sent or copied: argument and temporary memory together
    stay within a tenth of what v1 eq. 30 says must be held."""
    kv_len, p, width = 32768, 8, 16 * 128
    t = kv_len // p
    eq_30 = 4 * (2 * t * width + 2 * width + 2 * 16)
    held = memory(compiled(p, kv_len))
    assert eq_30 * 0.9 < held.total_bytes <= 1.1 * eq_30


# The flash kernel, lowered for CUDA without a GPU.


@pytest.fixture
def flash(monkeypatch):
    from treeattn.kernel import flash

    modules = flash.load()
    for module in modules:
        monkeypatch.setattr(module, "get_sm_count", lambda *_: 132)  # it would ask a driver
    return flash


def lower_for_cuda(kv_len, kv_lengths=None, gradient=False, **options):
    mesh = AbstractMesh((8,), ("kv",))

    def f(q, k, v, lengths):
        return treeattn.tree_decode(
            q, k, v, mesh=mesh, axis="kv", kv_lengths=lengths, implementation="flash", **options
        )

    def loss(*arguments, decode=f):
        return jnp.sum(decode(*arguments).astype(jnp.float32))

    q = jax.ShapeDtypeStruct((2, 1, 16, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, kv_len, 4, 128), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, (0, 1, 2)) if gradient else f).trace(
        q, cache, cache, kv_lengths
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.parametrize(
    ("kv_len", "lengths", "kernel", "shapes"),
    [
        (4096, None, "flash_mha_fwd", ["2x1x16x128", "2x512x4x128"]),
        (4096, LENGTHS, "flash_mha_varlen_fwd", ["2x16x128", "1024x4x128"]),
        (4001, None, "flash_mha_varlen_fwd", ["2x16x128", "1002x4x128"]),  # padded shards
        (3, None, "flash_mha_varlen_fwd", ["2x16x128", "2x4x128"]),  # fewer keys than devices
    ],
)
def test_flash_is_lowered_once_with_grouped_heads(flash, kv_len, lengths, kernel, shapes):
    text = lower_for_cuda(kv_len, lengths)
    (call,) = [line for line in text.splitlines() if "custom_call @flash" in line]
    assert f"@{kernel}(" in call
    assert all(f"tensor<{shape}xbf16>" in call for shape in shapes)  # k and v not repeated
    assert text.count("stablehlo.all_reduce") == 3
    assert "all_gather" not in text and "collective_permute" not in text


def test_flash_by_butterfly(flash):
    text = lower_for_cuda(4096, method="butterfly")
    assert text.count("custom_call @flash_mha_fwd") == 1
    assert text.count("stablehlo.collective_permute") == 3
    assert "all_reduce" not in text


def test_the_gradient_of_flash_is_the_blockwise_one(flash):
    text = lower_for_cuda(4096, gradient=True)
    assert "flash_mha_bwd" not in text and text.count("stablehlo.while") >= 1


# What is refused.


def inputs(**changes):
    shapes = {"q": (1, 1, 4, 8), "k": (1, 6, 2, 8), "v": (1, 6, 2, 8)} | changes
    return [jnp.ones(shape, jnp.float32) for shape in shapes.values()]


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "axis: the mesh has axes", inputs(), {"axis": "heads"}),
        (ValueError, "axis: expected one or more", inputs(), {"axis": ()}),
        (ValueError, "axis: expected one or more", inputs(), {"axis": ("kv", "kv")}),
        (ValueError, "method: expected one of", inputs(), {"method": "ring"}),
        (ValueError, "implementation: 'flash' needs CUDA", inputs(), {"implementation": "flash"}),
        (ValueError, "implementation: expected", inputs(), {"implementation": "cudnn"}),
        (ValueError, "q: expected a number of heads", inputs(q=(1, 1, 3, 8)), {}),
        (ValueError, "k: expected", inputs(k=(2, 6, 2, 8)), {}),
        (ValueError, "v: expected", inputs(v=(1, 5, 2, 8)), {}),
        (ValueError, "k: expected 4 axes", inputs(k=(6, 2, 8)), {}),
        (TypeError, "q: expected a floating-point", [x.astype(int) for x in inputs()], {}),
        (TypeError, "one dtype", [inputs()[0].astype(jnp.bfloat16), *inputs()[1:]], {}),
        (ValueError, "mask: expected", inputs(), {"mask": jnp.ones((1, 1, 1, 5), bool)}),
        (ValueError, "kv_lengths: expected", inputs(), {"kv_lengths": jnp.ones(2, int)}),
        (TypeError, "mesh: expected", inputs(), {"mesh": "kv"}),
    ],
)
def test_what_does_not_fit_is_refused(error, message, arguments, options, unchecked):
    with pytest.raises(error, match=message):
        treeattn.tree_decode(*arguments, **{"mesh": make_mesh((2,)), "axis": "kv"} | options)


def test_merge_across_refuses_another_method():
    with pytest.raises(ValueError, match="method"):
        merge_across(treeattn.AttentionState.identity((1,), 1), "kv", method="sum")
