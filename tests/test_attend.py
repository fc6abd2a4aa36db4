"""attend against dense attention in float64: values, gradients, dtypes, extremes, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from oracles import dense_attention, dense_gradients, dense_weights

from treeattn import AttentionState, attend, attention, finalize, merge
from treeattn.program import memory
from treeattn.kernel import causal
from treeattn.kernel.causal import CAUSAL_BLOCK
from treeattn.kernel.products import BLOCK

# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "one query, streams": (1, 1, 2, 2, 1300, 16, 8),
    "grouped, streams, rows": (3, 1, 4, 2, 640, 32, 16),
    "multi-query": (2, 1, 4, 1, 600, 8, 6),
    "many queries": (2, 5, 4, 2, 1100, 8, 6),
    "more queries than head_dim": (1, 12, 4, 2, 70, 4, 4),
    "fewer keys than anything": (3, 2, 2, 2, 3, 5, 7),
    "one key": (2, 3, 2, 1, 1, 4, 4),
}
RTOL = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def draw(seed, shape, *, which=("mask", "bias", "kv_lengths"), dtype=np.float64):
    """(q, k, v), options: everything but the shapes comes from the seed."""
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(b, l, h, d)) * rng.choice([0.1, 1.0, 5.0])
    k, v = rng.normal(size=(b, n, h_kv, d)), rng.normal(size=(b, n, h_kv, dv))
    bias = rng.normal(size=(1, h, 1, n)) * 3
    bias[rng.random(bias.shape) < rng.choice([0.0, 0.5])] = -np.inf
    options = {
        "mask": rng.random((b, 1, l, n)) < rng.choice([0.0, 0.05, 0.5, 1.0]),
        "bias": bias,
        # Below 0 counts as 0, and beyond the keys as all of them.
        "kv_lengths": rng.integers(-2, n + 3, b).astype(np.int32),
    }
    arrays = tuple(x.astype(dtype) for x in (q, k, v))
    return arrays, {name: options[name] for name in which}, rng


@functools.cache
def value_and_gradients(_shape, _which):
    """(out, lse) and gradients of Σ w·out + Σ u·lse over the rows with keys, compiled once."""

    def loss(q, k, v, bias, w, u, options):
        out, lse = finalize(attend(q, k, v, bias=bias, **options))
        seen = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(w * out) + jnp.sum(u * seen), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize("which", [("bias",), ("mask", "bias", "kv_lengths")], ids="+".join)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(name, which):
    shape = SHAPES[name]
    run = value_and_gradients(shape, which)

    @settings(max_examples=12)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        (q, k, v), options, rng = draw(seed, shape, which=which)
        w, u = rng.normal(size=(*q.shape[:3], shape[-1])), rng.normal(size=q.shape[:3])
        rest = {name: x for name, x in options.items() if name != "bias"}
        (_, (out, lse)), gradients = run(q, k, v, options["bias"], w, u, rest)
        weights, dense_lse = dense_weights(q, k, **options)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
        np.testing.assert_allclose(lse, dense_lse, rtol=1e-12, atol=1e-12)
        expected = dense_gradients(q, k, v, w, u, **options)
        for ours, dense in zip(gradients, expected, strict=False):
            np.testing.assert_allclose(ours, dense, atol=1e-11 * max(1, np.abs(dense).max()))
        # With respect to the bias: the softmax's derivative, summed over rows and queries.
        wide_v = np.repeat(v, q.shape[2] // k.shape[2], axis=2)
        slope = np.einsum("blhd,bnhd->bhln", w, wide_v)
        mean = (slope * weights).sum(-1, keepdims=True)
        dense = weights * (slope - mean + u.transpose(0, 2, 1)[..., None])
        dense = dense.sum(axis=(0, 2), keepdims=True)
        np.testing.assert_allclose(gradients[3], dense, atol=1e-10)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("d", [16, 24, 32, 40, 48, 56, 64, 72, 96, 128, 256])
def test_one_query_of_every_width(d):  # the sum over d is written out in other ways for each
    (q, k, v), _, _ = draw(d, (1, 1, 2, 2, BLOCK // 2 + 3, d, 8), which=())
    out, lse = finalize(attend(q, k, v))
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-12)


@functools.cache
def jitted(_shape, _dtype):
    return jax.jit(attend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["one query, streams", "grouped, streams, rows", "many queries"])
def test_dtypes(name, dtype):
    shape, run = SHAPES[name], jitted(SHAPES[name], dtype)

    @settings(max_examples=10)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        arrays, options, _ = draw(seed, shape, dtype=dtype, which=("mask", "kv_lengths"))
        state = run(*map(jnp.asarray, arrays), **options)
        assert {x.dtype for x in state} == {jnp.dtype("float32")}
        out, lse = finalize(state)
        # Only the inputs are rounded to the dtype; all arithmetic is in float32.
        _, dense_lse = dense_weights(*arrays[:2], **options)
        np.testing.assert_allclose(out, dense_attention(*arrays, **options), atol=1e-5)
        np.testing.assert_allclose(lse, dense_lse, rtol=1e-5, atol=2e-5)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", RTOL)
def test_output_and_gradients_in_the_inputs_dtype(dtype):
    (q, k, v), options, rng = draw(3, SHAPES["one query, streams"], dtype=dtype, which=("mask",))
    w = rng.normal(size=(*q.shape[:3], v.shape[-1]))
    options["mask"][..., :5] = True
    arrays = tuple(map(jnp.asarray, (q, k, v)))
    assert attention(*arrays, **options).dtype == dtype
    loss = jax.jit(jax.grad(lambda *x: jnp.sum(w * attention(*x, **options)), (0, 1, 2)))
    gradients = loss(*arrays)
    for ours, dense in zip(gradients, dense_gradients(q, k, v, w, **options), strict=True):
        assert ours.dtype == dtype
        size = np.abs(dense).max()
        np.testing.assert_allclose(np.asarray(ours, np.float64), dense, atol=RTOL[dtype] * size)


@pytest.mark.slow
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), cut=st.sampled_from([0, 7, 600, 1299]))
def test_parts_merge_to_the_whole(seed, cut):
    arrays, options, _ = draw(seed, SHAPES["one query, streams"])
    q, k, v = arrays

    def part(keys):
        lengths = np.clip(options["kv_lengths"] - (keys.start or 0), 0, None)
        return jitted(cut, keys.start)(
            q,
            k[:, keys],
            v[:, keys],
            mask=options["mask"][..., keys],
            bias=options["bias"][..., keys],
            kv_lengths=lengths,
        )

    out, lse = finalize(merge(part(slice(cut, None)), part(slice(0, cut))))
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)


def everything(q, k, v, **options):
    """(out, lse) and the gradients of their sum with respect to q, k and v."""

    def total(*x):
        out, lse = finalize(attend(*x, **options))
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse)), (out, lse)

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 600])
@pytest.mark.parametrize(
    "hide",
    [
        {"mask": np.zeros((1, 1, 1, 1), bool)},
        {"bias": np.full((1, 1, 1, 1), -np.inf, np.float32)},
        {"kv_lengths": np.zeros(1, np.int32)},
    ],
    ids=lambda hide: next(iter(hide)),
)
def test_no_keys_no_nan(n, hide):
    (q, k, v), _, _ = draw(0, (1, 1, 2, 2, n, 16, 8), dtype=np.float32)
    state = attend(q, k, v, **hide)
    assert np.all(np.isneginf(state.max))
    assert not np.any(state.denominator) and not np.any(state.numerator)
    (_, (out, lse)), gradients = everything(q, k, v, **hide)
    assert not np.any(out) and np.all(np.isneginf(lse))
    assert not any(np.any(g) for g in gradients)


def test_no_keys_at_all():
    q, k = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 0, 2, 8))
    (_, (out, lse)), gradients = everything(q, k, k)
    assert out.shape == q.shape and not np.any(out) and np.all(np.isneginf(lse))
    assert not any(np.any(g) for g in gradients)


@pytest.mark.parametrize("n", [6, 600])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), qk=st.sampled_from([1, 100, 1e4, 1e19, 1e30, 3e38]))
def test_finite_inputs_make_no_nan(n, dtype, seed, qk):
    rng = np.random.default_rng(seed)
    top = float(jnp.finfo(dtype).max)
    q, k, v = (
        jnp.asarray(np.clip(size * rng.choice([-1, 0, 1e-3, 1], (1, x, 1, 16)), -top, top), dtype)
        for x, size in ((1, qk), (n, qk), (n, 3e38))
    )
    out, lse = finalize(jitted(n, dtype)(q, k, v))
    assert not np.any(np.isnan(out)) and np.all(np.isfinite(lse))


@pytest.mark.parametrize("n", [1, 5, 100, BLOCK + 3])
@pytest.mark.parametrize("l", [1, 40])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_a_nan_is_not_lost(which, l, n):
    arrays, _, _ = draw(0, (1, l, 2, 2, n, 64, 64), dtype=np.float32, which=())
    arrays[which][:, 0] = np.nan
    out, lse = finalize(attend(*arrays))
    assert np.all(np.isnan(out[:, 0]))
    assert np.all(np.isnan(lse[:, 0])) == (which < 2)


@pytest.mark.parametrize("l", [1, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_nan_in_a_bias_is_not_lost(sign, l):
    """Of either sign: 0 / 0 is a negative one on x86, and the lowest of all bit patterns."""
    (q, k, v), _, _ = draw(0, (1, l, 2, 2, 600, 16, 8), dtype=np.float32, which=())
    nan = np.copysign(np.float32(np.nan), sign)
    bias = np.zeros((1, 1, 1, 600), np.float32)
    bias[..., 3] = nan
    rest_hidden = np.where(np.isnan(bias), nan, -np.inf)
    for each in (bias, np.full_like(bias, nan), rest_hidden):
        for run in (attend, jax.jit(attend)):
            out, lse = finalize(run(q, k, v, bias=each))
            assert np.all(np.isnan(out)) and np.all(np.isnan(lse))


@pytest.mark.parametrize("n", [6, 600])
@pytest.mark.parametrize("l", [1, 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_sees_nothing_over_bad_values(bad, l, n):
    """Row 0 sees no key at all, row 1 all but those that hold what memory held."""
    (q, k, v), _, _ = draw(0, (2, l, 2, 2, n, 16, 8), dtype=np.float32, which=())
    mask = np.ones((2, 1, 1, n), bool)
    mask[0] = mask[1, ..., 4:] = False
    expected = dense_attention(q, k, v, mask=mask)
    for x in (k, v):
        x[~mask[:, 0, 0]] = bad
    state = attend(q, k, v, mask=mask)
    assert np.all(np.isneginf(state.max[0]))
    assert not np.any(state.denominator[0]) and not np.any(state.numerator[0])
    (_, (out, _)), gradients = everything(q, k, v, mask=mask)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert all(np.all(np.isfinite(g)) for g in gradients)


def test_a_query_that_sees_nothing_of_what_others_see():
    (q, k, v), _, _ = draw(0, (1, 2, 2, 2, 6, 16, 8), dtype=np.float32, which=())
    v[:] = np.nan
    state = attend(q, k, v, mask=np.array([False, True])[None, None, :, None])
    assert not np.any(state.numerator[:, 0]) and np.all(np.isnan(state.numerator[:, 1]))


def test_the_largest_exponential_is_one():
    """Relative to the maximum, and none is larger; 2025 appendix F speaks of its exponents."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 2, 8)) * 5 for n in (1, 9, 9))
    state = jax.jit(attend)(q, k, v)
    s = np.einsum("blhd,bnhd->blhn", q, k) / np.sqrt(8)
    np.testing.assert_allclose(state.max, s.max(axis=-1), rtol=1e-12)
    terms = np.exp(s - s.max(axis=-1, keepdims=True))
    assert terms.max() == 1
    np.testing.assert_allclose(state.denominator, terms.sum(axis=-1), rtol=1e-12)
    assert (state.denominator >= 1).all()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_scores_far_from_zero(scale):
    (q, k, v), _, _ = draw(1, SHAPES["one query, streams"], which=())
    bias = np.full((1, 1, 1, 1), scale)
    out, lse = finalize(attend(q, k, v, bias=bias))
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-10)
    np.testing.assert_allclose(lse, dense_weights(q, k)[1] + scale, rtol=1e-12)
    (_, (out, _)), gradients = everything(q * 1e4, k, v)  # one-hot weights
    np.testing.assert_allclose(out, dense_attention(q * 1e4, k, v), atol=1e-10)
    assert all(np.all(np.isfinite(g)) for g in gradients)


def test_scores_beyond_half_precision():
    q = jnp.full((1, 1, 1, 16), 300, jnp.float16)
    k = jnp.full((1, 3, 1, 16), 300, jnp.float16).at[0, 1].set(299)  # scores near 1.4 million
    v = jnp.arange(3, dtype=jnp.float16).reshape(1, 3, 1, 1)
    state = attend(q, k, v, scale=1.0)
    assert state.max[0, 0, 0] == 300 * 300 * 16
    np.testing.assert_array_equal(finalize(state)[0], [[[[1.0]]]])  # keys 0 and 2, equally


def test_an_infinite_score_counts_as_the_largest_finite_one():
    (q, k, v), _, _ = draw(2, (1, 1, 1, 1, 6, 4, 3), dtype=np.float32)
    bias = np.zeros((1, 1, 1, 6), np.float32)
    bias[..., 2] = np.inf
    (_, (out, lse)), gradients = everything(q, k, v, bias=bias)
    np.testing.assert_array_equal(out[0, 0, 0], v[0, 2, 0])
    assert lse[0, 0, 0] == np.finfo(np.float32).max
    assert all(np.all(np.isfinite(g)) for g in gradients)
    # Scores that overflow upwards share the weight; those that overflow downwards are keys too.
    big = np.float32([[[[3e38, 3e38]]]])
    keys = np.float32([3e38, -3e38, 3e38]).reshape(1, 3, 1, 1) * np.float32([1, 1])
    values = np.float32([1, 7, 2]).reshape(1, 3, 1, 1)
    np.testing.assert_array_equal(attention(big, keys, values), [[[[1.5]]]])
    np.testing.assert_array_equal(attention(big, keys[:, 1:2], values[:, 1:2]), [[[[7.0]]]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "batch", "queries"),
    [
        ("float32", 1, 1),
        ("bfloat16", 1, 1),
        ("float16", 1, 1),
        ("bfloat16", 3, 1),
        ("float32", 1, 32),
        ("bfloat16", 1, 32),
    ],
)
def test_memory_does_not_grow_with_the_keys(dtype, batch, queries, optimized):
    def temporary(n):
        q = jax.ShapeDtypeStruct((batch, queries, 4, 64), dtype)
        k = jax.ShapeDtypeStruct((batch, n, 4, 64), dtype)
        lengths = jax.ShapeDtypeStruct((batch,), "int32")
        run = jax.jit(lambda q, k, v, lengths: attention(q, k, v, kv_lengths=lengths))
        return memory(run.lower(q, k, k, lengths).compile()).temporary_bytes

    n = 2 * BLOCK
    assert temporary(16 * n) <= temporary(n) + 1024  # a few bytes for the loop's indices


@pytest.mark.slow
def test_memory_of_all_queries_is_linear_and_plainly_quadratic(optimized):
    """2024 §3, 2025 §2 and §3: with a query for every key the plain form holds all scores."""

    def plain(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("blhd,bnhd->bhln", q, k) / 8)
        return jnp.einsum("bhln,bnhd->blhd", weights, v)

    def temporary(f, n):
        x = jax.ShapeDtypeStruct((1, n, 4, 64), "float32")
        return memory(jax.jit(f).lower(x, x, x).compile()).temporary_bytes

    n = 4 * BLOCK
    for f, times in ((attention, 2), (plain, 4)):
        assert temporary(f, 2 * n) / temporary(f, n) == pytest.approx(times, rel=0.1)
    assert temporary(plain, n) >= 4 * 4 * n * n > 2 * temporary(attention, n)


@pytest.mark.slow
def test_memory_of_the_gradient(optimized):
    def temporary(n):
        q, k = (jax.ShapeDtypeStruct((1, m, 4, 64), "float32") for m in (1, n))
        loss = jax.jit(jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2)))
        return memory(loss.lower(q, k, k).compile()).temporary_bytes, 2 * n * 4 * 64 * 4

    small, _ = temporary(2 * BLOCK)
    large, gradients = temporary(32 * BLOCK)
    assert large <= small + 2 * gradients  # the blocks' gradients, before they are put together


@pytest.mark.parametrize("queries", [1, 8])
def test_blocks_past_the_lengths_are_not_read(queries):
    b, n = 3, 4 * BLOCK
    (q, k, v), _, _ = draw(5, (b, queries, 2, 2, n, 32, 8), which=(), dtype=np.float32)
    lengths = np.array([3, 0, 2 * BLOCK + 7], np.int32)
    expected = dense_attention(q, k, v, kv_lengths=lengths)
    for row, first in enumerate([BLOCK, 0, 3 * BLOCK]):  # poison the blocks past each row's end
        k[row, first:] = v[row, first:] = np.nan
    out = jax.jit(attention)(q, k, v, kv_lengths=lengths)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_every_order_and_mode_of_differentiation():
    (q, k, v), options, _ = draw(4, (1, 2, 2, 1, 20, 3, 2), which=("bias",))
    run = jax.jit(lambda *x: finalize(attend(*x, **options)))
    check_grads(run, (q, k, v), 1, modes=["fwd"])
    check_grads(run, (q, k, v), 2, modes=["rev"])


@pytest.mark.usefixtures("unchecked")
def test_lists_are_taken_for_arrays():
    (q, k, v), _, _ = draw(0, SHAPES["many queries"], which=())
    mask = np.arange(1100) % 3 > 0
    expected = dense_attention(q, k, v, mask=mask[None, None, None], kv_lengths=[900, 3])
    out = attention(q, k, v, mask=[[[mask.tolist()]]], kv_lengths=[900, 3])
    np.testing.assert_allclose(out, expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_narrow_lengths_are_widened(dtype):
    (q, k, v), _, _ = draw(0, SHAPES["many queries"], which=())
    lengths = np.array([127, 90], dtype)
    out = attention(q, k, v, kv_lengths=lengths)
    np.testing.assert_allclose(out, dense_attention(q, k, v, kv_lengths=lengths), atol=1e-12)


def test_lengths_out_of_range():
    """Named where they can be looked at, and clipped where they are traced."""
    (q, k, v), _, _ = draw(0, SHAPES["many queries"], which=())
    for wrong in ([-1, 3], [3, 1101], np.array([3, 2**33])):
        with pytest.raises(ValueError, match="kv_lengths: expected 0 to kv_len = 1100 keys, got"):
            attention(q, k, v, kv_lengths=np.asarray(wrong))
    for wrong in (np.array([-5, 2**33]), np.array([-128, 127], np.int8)):
        out = jax.jit(attention)(q, k, v, kv_lengths=wrong)
        lengths = np.clip(wrong.astype(np.int64), 0, 1100)
        np.testing.assert_allclose(out, dense_attention(q, k, v, kv_lengths=lengths), atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 4, 2, 40, 8, 6), (0, 1, 4, 2, 700, 64, 6)], ids=str)
def test_an_empty_batch(shape):
    (q, k, v), options, _ = draw(0, shape)
    for names in ((), ("kv_lengths",), tuple(options)):
        given = {name: options[name] for name in names}
        (_, (out, _)), gradients = everything(q, k, v, **given)
        assert out.shape == (*q.shape[:3], v.shape[-1])
        assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]


@pytest.mark.filterwarnings("error")
def test_numpys_float64_without_x64():
    (q, k, v), options, _ = draw(0, (1, 2, 2, 2, 40, 8, 6))
    options["kv_lengths"] = np.array([30])
    with jax.enable_x64(False):
        out = attention(q, k, v, **options)
        assert out.dtype == "float32"
        state = AttentionState(*(np.asarray(x, np.float64) for x in attend(q, k, v, **options)))
        again, lse = finalize(merge(state, AttentionState.identity((1, 2, 2), 6)))
        assert again.dtype == lse.dtype == "float32"
        finalize(state)
    expected = dense_attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(again, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 5])
def test_nothing_beyond_the_lengths_matters(queries):
    """Memory that was never written may hold NaN: neither the state nor a gradient sees it."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, queries, 2, 16))
    k, v = rng.normal(size=(2, 2, BLOCK + 9, 2, 16))
    lengths = np.array([BLOCK - 100, 0])
    for x in (k, v):
        x[np.arange(BLOCK + 9) >= lengths[:, None]] = np.nan

    def loss(q, k, v):
        out, lse = finalize(attend(q, k, v, kv_lengths=lengths))
        return jnp.sum(out) + jnp.sum(lse[0]), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    k, v = (np.nan_to_num(x) for x in (k, v))
    np.testing.assert_allclose(out, dense_attention(q, k, v, kv_lengths=lengths), atol=1e-12)
    u = np.array([1.0, 0.0])[:, None, None] * np.ones((2, queries, 2))
    expected = dense_gradients(q, k, v, np.ones(out.shape), u, kv_lengths=lengths)
    for got, dense in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, dense, atol=1e-11)


def test_causal_with_everything_else():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 40, 4, 8))
    options = {
        "mask": rng.random((2, 1, 40, 40)) < 0.5,
        "bias": rng.normal(size=(1, 4, 1, 40)),
        "kv_lengths": np.array([30, 0]),
    }
    out = attention(q, k, v, causal=True, **options)
    options["mask"] &= np.tri(40, dtype=bool)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)


def test_vmap():
    (q, k, v), options, _ = draw(6, SHAPES["grouped, streams, rows"], which=("kv_lengths",))
    one = lambda q, k, v, n: attention(q[None], k[None], v[None], kv_lengths=n[None])[0]  # noqa: E731
    out = jax.jit(jax.vmap(one))(q, k, v, options["kv_lengths"])
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)


def check_dense(result, q, k, v, w, u, **options):
    """((_, (out, lse)), gradients of Σ w·out + Σ u·lse) is what dense attention gives."""
    (_, (out, lse)), grads = result
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
    for got, expected in zip(grads, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-11)


# A whole text on one device: halved until its parts are short.


@functools.cache
def causal_value_and_gradients(_length):
    def loss(q, k, v, w, u):
        out, lse = finalize(attend(q, k, v, causal=True, scale=0.3))
        return jnp.sum(w * out) + jnp.sum(u * lse), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.slow
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
    blockwise = causal.attend_blockwise

    def counting(inputs):
        seen.append(inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[1])
        return blockwise(inputs)

    monkeypatch.setattr(causal, "attend_blockwise", counting)
    n, block = 1024, CAUSAL_BLOCK
    q = jnp.ones((1, n, 2, 8))
    jax.make_jaxpr(functools.partial(attend, causal=True))(q, q, q)
    assert sum(seen) == n * (n - block) // 2 + n * block  # half of n², and half of each diagonal


class _Tensor:
    """Another library's array, as far as it can be told."""

    dtype, shape, ndim = np.dtype("float32"), (2, 3, 4, 8), 4

    def __dlpack__(self):
        raise AssertionError("not to be read without being asked")


Q, K = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)
BAD_INPUTS = {
    "integers": ((Q.astype(int), K, K), {}, TypeError, "q: expected a floating-point"),
    "no array": (([1.0], K, K), {}, TypeError, "q: expected an array, got list"),
    "dtypes": ((Q, K.astype(np.float16), K), {}, TypeError, "expected one dtype.*k float16"),
    "rank": ((Q[0], K, K), {}, ValueError, r"q: expected 4 axes.*\(3, 4, 8\)"),
    "batch": ((Q, K[:1], K[:1]), {}, ValueError, r"k: expected.*batch 2.*\(1, 5, 2, 8\)"),
    "head_dim": ((Q, K[..., :7], K), {}, ValueError, r"k: expected.*head_dim 8"),
    "kv_len": ((Q, K, K[:, :4]), {}, ValueError, r"v: expected k's.*\(2, 4, 2, 8\)"),
    "heads": ((Q[:, :, :3], K, K), {}, ValueError, "q: expected.*2 heads divide, got 3"),
    "mask dtype": ((Q, K, K), {"mask": np.ones((2, 1, 3, 5))}, TypeError, "mask: expected bool"),
    "mask": ((Q, K, K), {"mask": np.ones((2, 3, 5), bool)}, ValueError, "mask: expected a shape"),
    "bias": ((Q, K, K), {"bias": np.ones((2, 4, 3, 4))}, ValueError, "bias: expected a shape"),
    "bias dtype": ((Q, K, K), {"bias": np.ones((1, 1, 1, 5), int)}, TypeError, "bias: expected"),
    "lengths": ((Q, K, K), {"kv_lengths": np.ones(3, int)}, ValueError, r"kv_lengths:.*\(2,\)"),
    "lengths dtype": ((Q, K, K), {"kv_lengths": np.ones(2)}, TypeError, "kv_lengths: .* integers"),
    "mask list": ((Q, K, K), {"mask": [True, False]}, ValueError, "mask: expected a shape"),
    "ragged mask": ((Q, K, K), {"mask": [[True], [True, True]]}, TypeError, "mask: .*got list"),
    "lengths list": ((Q, K, K), {"kv_lengths": [1.5, 2]}, TypeError, "kv_lengths: .*integers"),
    "no head_dim": ((Q[..., :0], K[..., :0], K), {}, ValueError, "q: expected a head_dim"),
    "NaN scale": ((Q, K, K), {"scale": float("nan")}, ValueError, "scale: .*finite.*nan"),
    "complex scale": ((Q, K, K), {"scale": 1j}, ValueError, "scale: expected a real number"),
    "large scale": ((Q, K, K), {"scale": 1e39}, ValueError, "scale: .*1e.39, which float32 does"),
    "scales": ((Q, K, K), {"scale": np.ones(2)}, ValueError, r"scale: .*\(2,\)"),
    "float8": (
        tuple(jnp.asarray(x, jnp.float8_e4m3fn) for x in (Q, K, K)),
        {},
        TypeError,
        "q: .*float8",
    ),
    "tensor": ((_Tensor(), K, K), {}, TypeError, "q: .*_Tensor: use jnp.from_dlpack"),
    "causal": ((Q, K, K), {"causal": True}, ValueError, "q: .*as many queries as keys, 5, got 3"),
    "implementation": ((Q, K, K), {"implementation": "fast"}, ValueError, "implementation:"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input(name):
    arrays, options, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message):
        attend(*arrays, **options)
