"""attend against dense attention in float64: values, gradients, dtypes, extremes, memory.

One table of tests asks every implementation. One program for each shape and set of options is fed
many cases: masks, biases, lengths and stale memory are its arguments.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from oracles import dense_attention, dense_gradients, dense_weights

from treeattn import AttentionState, attend, attention, blocks, finalize, from_output, memory, merge
from treeattn.blocks import CAUSAL_BLOCK
from treeattn.products import BLOCK
from treeattn_conformance import check_attention

# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "streams": (3, 1, 4, 2, 640, 32, 16),  # few queries: sums, in blocks that rows may not need
    "products": (2, 5, 4, 2, 1100, 8, 6),  # many queries: matrix products, in two blocks
    "few keys": (3, 2, 2, 1, 3, 5, 7),
}


def dense_kernel(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False):
    """A user's kernel, as a first attempt would be: (out, lse) of all scores at once."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x.astype(dtype), group, axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bnhd->bhln", q.astype(dtype) * scale, k, precision="highest")
    visible = jnp.ones(s.shape, bool) if mask is None else jnp.broadcast_to(mask, s.shape)
    if bias is not None:
        s, visible = s + bias, visible & (bias != -jnp.inf)
    if kv_lengths is not None:
        visible &= jnp.arange(k.shape[1])[None, None, None] < kv_lengths[:, None, None, None]
    if causal:
        visible &= jnp.tri(*s.shape[2:], dtype=bool)[None, None]
    v = jnp.where(visible.any(axis=2).transpose(0, 2, 1)[..., None], v, 0)
    s = jnp.where(visible, s, -1e30)
    lse = jax.nn.logsumexp(s, axis=-1)
    out = jnp.einsum("bhln,bnhd->blhd", jnp.exp(s - lse[..., None]), v, precision="highest")
    lse = jnp.where(visible.any(axis=-1), lse, -jnp.inf).transpose(0, 2, 1)
    return jnp.where(lse[..., None] == -jnp.inf, 0, out), lse


# flash-attn-jax returns (out, lse) as a user's kernel does; tests/test_flash.py has the rest of it.
IMPLEMENTATIONS = {"plain": "plain", "blockwise": "blockwise", "a kernel": dense_kernel}


def arrays_of(shape, rng, dtype=np.float64):
    b, l, h, h_kv, n, d, dv = shape
    sizes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [rng.normal(size=size).astype(dtype) for size in sizes]


def all_seen(shape):
    """Options that hide nothing."""
    b, l, h, _, n, *_ = shape
    mask, bias = np.ones((b, 1, l, n), bool), np.zeros((1, h, 1, n))
    return {"mask": mask, "bias": bias, "kv_lengths": np.full(b, n, np.int32)}


def draw(seed, shape):
    """(q, k, v), options: everything but the shapes comes from the seed."""
    b, _, _, _, n, *_ = shape
    rng = np.random.default_rng(seed)
    q, k, v = arrays_of(shape, rng)
    options = all_seen(shape)
    for name, shares in (("mask", [0.0, 0.05, 0.5, 1.0]), ("bias", [0.5, 1.0])):
        x = options[name]
        seen = rng.random(x.shape) < rng.choice(shares)
        options[name] = (
            seen if name == "mask" else np.where(seen, rng.normal(size=x.shape), -np.inf)
        )
    # Below 0 counts as 0, and beyond the keys as all of them.
    options["kv_lengths"] = rng.integers(-2, n + 3, b).astype(np.int32)
    return [q * rng.choice([0.1, 1.0, 5.0]), k, v], options, rng


@functools.partial(jax.jit, static_argnames="implementation")
def everything(q, k, v, w, u, options, implementation):
    """The state, (out, lse), and the gradients of Σ w·out + Σ u·lse over the rows with keys."""

    def loss(q, k, v, bias):
        given = options | ({} if bias is None else {"bias": bias})
        state = attend(q, k, v, implementation=implementation, **given)
        out, lse = finalize(state)
        return jnp.sum(w * out) + jnp.sum(u * jnp.where(lse == -jnp.inf, 0, lse)), (state, out, lse)

    argnums = (0, 1, 2, 3) if "bias" in options else (0, 1, 2)
    gradients, found = jax.grad(loss, argnums, has_aux=True)(q, k, v, options.get("bias"))
    return *found, gradients


def run(q, k, v, options=None, w=None, u=None, *, implementation="blockwise"):
    w = np.ones((*q.shape[:3], v.shape[-1])) if w is None else w
    u = np.ones(q.shape[:3]) if u is None else u
    return everything(q, k, v, w, u, options or {}, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("implementation", "causal"))
def forward(q, k, v, implementation="blockwise", causal=False, **options):
    return finalize(attend(q, k, v, implementation=implementation, causal=causal, **options))


def unseen(shape, options):
    """(b, n, h_kv): the keys that no query of their row and head sees."""
    b, l, h, h_kv, n, *_ = shape
    seen = options["mask"] & (options["bias"] != -np.inf)
    seen = seen & (np.arange(n) < options["kv_lengths"][:, None, None, None])
    seen = np.broadcast_to(seen, (b, h, l, n)).reshape(b, h_kv, -1, n)
    return ~seen.any(axis=2).transpose(0, 2, 1)


@settings(max_examples=70)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(list(SHAPES)),
    stale=st.sampled_from([0.0, np.nan, np.inf]),
    how=st.sampled_from(list(IMPLEMENTATIONS)),
)
def test_values_and_gradients(seed, name, stale, how):
    """With memory that was never written, which may hold anything, wherever nobody looks."""
    shape = SHAPES[name]
    (q, k, v), options, rng = draw(seed, shape)
    if how == "a kernel":
        stale = 0.0  # keeping NaN out is the kernel's own business
    hidden = unseen(shape, options)[..., None]
    k, v = np.where(hidden, 0, k), np.where(hidden, 0, v)
    w, u = rng.normal(size=(*q.shape[:3], shape[-1])), rng.normal(size=q.shape[:3])
    cache = np.where(hidden, stale, k), np.where(hidden, stale, v)
    _, out, lse, (*of_qkv, of_bias) = run(
        q, *cache, options, w, u, implementation=IMPLEMENTATIONS[how]
    )
    weights, dense_lse = dense_weights(q, k, **options)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_lse, rtol=1e-12, atol=1e-12)
    for ours, dense in zip(of_qkv, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(ours, dense, atol=1e-11 * max(1, np.abs(dense).max()))
    # With respect to the bias: the softmax's derivative, summed over rows and queries.
    slope = np.einsum("blhd,bnhd->bhln", w, np.repeat(v, q.shape[2] // k.shape[2], axis=2))
    mean = (slope * weights).sum(-1, keepdims=True)
    dense = weights * (slope - mean + u.transpose(0, 2, 1)[..., None])
    np.testing.assert_allclose(of_bias, dense.sum(axis=(0, 2), keepdims=True), atol=1e-10)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(list(SHAPES)))
def test_parts_merge_to_the_whole(seed, name):
    """Any part of the keys, and the others."""
    arrays, options, rng = draw(seed, SHAPES[name])
    part = rng.random(options["mask"].shape[-1]) < rng.choice([0.0, 0.1, 0.5])
    states = [
        run(*arrays, options | {"mask": options["mask"] & which})[0] for which in (part, ~part)
    ]
    out, lse = finalize(merge(*states))
    np.testing.assert_allclose(out, dense_attention(*arrays, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(*arrays[:2], **options)[1], atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_no_keys_no_nan(name, implementation):
    shape = SHAPES[name]
    arrays = arrays_of(shape, np.random.default_rng(0))
    for hiding, value in ("mask", False), ("bias", -np.inf), ("kv_lengths", 0):
        options = all_seen(shape)
        options[hiding][:] = value
        state, out, lse, gradients = run(
            *arrays, options, implementation=IMPLEMENTATIONS[implementation]
        )
        assert np.all(state.max == -np.inf) and np.all(lse == -np.inf)
        for x in (state.denominator, state.numerator, out, *gradients):
            assert not np.any(x)


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
@pytest.mark.parametrize("name", ["streams", "products"])
def test_extreme_biases_and_scores(name, implementation):
    run = functools.partial(globals()["run"], implementation=implementation)
    shape = SHAPES[name]
    q, k, v = arrays_of(shape, np.random.default_rng(1))
    expected, lse = dense_attention(q, k, v), dense_weights(q, k)[1]
    options = all_seen(shape)
    for far in (1e4, -1e4):
        _, out, found, _ = run(q, k, v, options | {"bias": options["bias"] + far})
        np.testing.assert_allclose(out, expected, atol=1e-10)
        np.testing.assert_allclose(found, lse + far, rtol=1e-12)
    _, out, _, gradients = run(q * 1e4, k, v, options)  # one-hot weights
    np.testing.assert_allclose(out, dense_attention(q * 1e4, k, v), atol=1e-10)
    assert all(np.isfinite(x).all() for x in gradients)
    # An infinite bias counts as the largest number, and takes all the weight.
    options["bias"][..., 2] = np.inf
    _, out, found, gradients = run(q, k, v, options)
    wanted = np.repeat(v[:, 2:3], shape[2] // shape[3], axis=2)
    np.testing.assert_array_equal(out, np.broadcast_to(wanted, out.shape))
    assert np.all(found == np.finfo(np.float64).max)
    assert all(np.isfinite(x).all() for x in gradients)
    # A NaN is not lost: 0 / 0 is a negative one on x86, and the lowest of all bit patterns.
    for sign in (1, -1):
        nan = np.copysign(np.nan, sign)
        one = np.where(np.arange(shape[4]) == 3, nan, 0.0)
        for bias in (one, one + nan, np.where(np.isnan(one), nan, -np.inf)):
            _, out, found, _ = run(
                q, k, v, options | {"bias": np.zeros_like(options["bias"]) + bias}
            )
            assert np.isnan(out).all() and np.isnan(found).all()


RTOL = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
@pytest.mark.parametrize(("name", "dtype"), list(zip(SHAPES, RTOL, strict=True)))
def test_dtypes(name, dtype, implementation):
    """Only the inputs are rounded to the dtype: all arithmetic is in float32, and a state is."""
    shape = SHAPES[name]

    @jax.jit
    def both(q, k, v, w, options):
        options = options | {"implementation": implementation}
        gradients = jax.grad(lambda *x: jnp.sum(w * attention(*x, **options)), (0, 1, 2))(q, k, v)
        return attend(q, k, v, **options), attention(q, k, v, **options), gradients

    for seed in range(4):
        rng = np.random.default_rng(seed)
        arrays = [jnp.asarray(x, dtype) for x in arrays_of(shape, rng)]
        options = {"mask": rng.random((shape[0], 1, shape[1], shape[4])) < 0.5}
        options["kv_lengths"] = rng.integers(1, shape[4], shape[0]).astype(np.int32)
        w = rng.normal(size=(*arrays[0].shape[:3], shape[-1]))
        state, rounded, gradients = both(*arrays, w, options)
        assert {x.dtype for x in state} == {jnp.dtype("float32")}
        out, lse = finalize(state)
        np.testing.assert_allclose(out, dense_attention(*arrays, **options), atol=1e-5)
        wanted = dense_weights(*arrays[:2], **options)[1]
        np.testing.assert_allclose(lse, wanted, rtol=1e-5, atol=2e-5)
        assert rounded.dtype == dtype
        # Fused into one program, "plain" may round its sums otherwise.
        np.testing.assert_allclose(*(np.float64(x) for x in (rounded, out)), rtol=RTOL[dtype])
        if implementation == "blockwise":
            np.testing.assert_array_equal(rounded, out.astype(dtype))
        for ours, dense in zip(gradients, dense_gradients(*arrays, w, **options), strict=True):
            assert ours.dtype == dtype
            atol = RTOL[dtype] * max(1, np.abs(dense).max())
            np.testing.assert_allclose(np.asarray(ours, np.float64), dense, atol=atol)


@pytest.mark.parametrize("d", [32, 56, 72, 128])
def test_one_query_of_every_width(d):  # the sum over d is written out in other ways for each
    q, k, v = arrays_of((1, 1, 1, 1, BLOCK // 2 + 3, d, 8), np.random.default_rng(d))
    out, lse = forward(q, k, v)
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-12)


@pytest.mark.parametrize(("n", "dtype"), [(600, "float32"), (600, "bfloat16"), (6, "float16")])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), qk=st.sampled_from([1, 100, 1e4, 1e19, 1e30, 3e38]))
def test_finite_inputs_make_no_nan(n, dtype, seed, qk):
    rng = np.random.default_rng(seed)
    top = float(jnp.finfo(dtype).max)
    q, k, v = (
        jnp.asarray(np.clip(size * rng.choice([-1, 0, 1e-3, 1], (1, x, 1, 16)), -top, top), dtype)
        for x, size in ((1, qk), (n, qk), (n, 3e38))
    )
    out, lse = forward(q, k, v)
    assert not np.any(np.isnan(out)) and np.all(np.isfinite(lse))


@pytest.mark.parametrize(("l", "n"), [(1, 5), (1, BLOCK + 3), (40, 100)])
def test_a_nan_is_not_lost(l, n):
    for which in range(3):
        arrays = arrays_of((1, l, 2, 2, n, 64, 64), np.random.default_rng(0), np.float32)
        arrays[which][:, 0] = np.nan
        out, lse = forward(*arrays)
        assert np.all(np.isnan(out[:, 0]))
        assert np.all(np.isnan(lse[:, 0])) == (which < 2)


def test_a_query_that_sees_nothing_of_what_others_see():
    q, k, v = arrays_of((1, 2, 2, 2, 6, 16, 8), np.random.default_rng(0), np.float32)
    v[:] = np.nan
    state = attend(q, k, v, mask=np.array([False, True])[None, None, :, None])
    assert not np.any(state.numerator[:, 0]) and np.all(np.isnan(state.numerator[:, 1]))


def test_the_largest_exponential_is_one():
    """Relative to the maximum, and none is larger; 2025 appendix F speaks of its exponents."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 2, 8)) * 5 for n in (1, 9, 9))
    state = attend(q, k, v)
    s = np.einsum("blhd,bnhd->blhn", q, k) / np.sqrt(8)
    np.testing.assert_allclose(state.max, s.max(axis=-1), rtol=1e-12)
    terms = np.exp(s - s.max(axis=-1, keepdims=True))
    assert terms.max() == 1
    np.testing.assert_allclose(state.denominator, terms.sum(axis=-1), rtol=1e-12)
    assert (state.denominator >= 1).all()


def test_scores_out_of_range():
    q = jnp.full((1, 1, 1, 16), 300, jnp.float16)
    k = jnp.full((1, 3, 1, 16), 300, jnp.float16).at[0, 1].set(299)  # scores near 1.4 million
    v = jnp.arange(3, dtype=jnp.float16).reshape(1, 3, 1, 1)
    state = attend(q, k, v, scale=1.0)
    assert state.max[0, 0, 0] == 300 * 300 * 16
    np.testing.assert_array_equal(finalize(state)[0], [[[[1.0]]]])  # keys 0 and 2, equally
    # Scores that overflow upwards share the weight; those that overflow downwards are keys too.
    big = np.float32([[[[3e38, 3e38]]]])
    keys = np.float32([3e38, -3e38, 3e38]).reshape(1, 3, 1, 1) * np.float32([1, 1])
    values = np.float32([1, 7, 2]).reshape(1, 3, 1, 1)
    np.testing.assert_array_equal(attention(big, keys, values), [[[[1.5]]]])
    np.testing.assert_array_equal(attention(big, keys[:, 1:2], values[:, 1:2]), [[[[7.0]]]])


def test_a_scale_beyond_the_range():
    """Of a query times the scale: as large as can be, not NaN."""
    q, k, v = (np.full((1, n, 1, 8), x, np.float32) for n, x in ((1, 1e20), (3, 1), (3, 2)))
    np.testing.assert_array_equal(attention(q, k, v, scale=1e20), np.full((1, 1, 1, 8), 2))


blockwise = functools.partial(attention, implementation="blockwise")


def temporary(f, queries, n, *, dtype="float32", batch=1, lengths=False):
    """Temporary bytes of f(q, k, v), or with lengths, which are the last of its arguments."""
    q = jax.ShapeDtypeStruct((batch, queries, 4, 64), dtype)
    k = jax.ShapeDtypeStruct((batch, n, 4, 64), dtype)
    more = [jax.ShapeDtypeStruct((batch,), "int32")] * lengths
    return memory(jax.jit(f).lower(q, k, k, *more).compile()).temporary_bytes


@pytest.mark.parametrize(("dtype", "batch", "queries"), [("bfloat16", 3, 1), ("float32", 1, 32)])
def test_memory_does_not_grow_with_the_keys(dtype, batch, queries, optimized):
    def f(q, k, v, lengths):
        return attention(q, k, v, kv_lengths=lengths, implementation="blockwise")

    options = {"dtype": dtype, "batch": batch, "lengths": True}
    few, many = (temporary(f, queries, n, **options) for n in (2 * BLOCK, 32 * BLOCK))
    assert many <= few + 1024  # a few bytes for the loop's indices


def test_of_a_cache_that_is_half_full_half_is_read(optimized):
    """In blocks of half of it: one block would hold twice as many scores, and be read whole."""

    def f(q, k, v, lengths):
        return attention(q, k, v, kv_lengths=lengths, implementation="blockwise")

    half, whole = (temporary(f, 16, n, lengths=True) for n in (BLOCK // 2, BLOCK))
    assert whole <= half + 1024


@pytest.mark.slow
def test_memory_of_all_queries_is_linear_and_plainly_quadratic(optimized):
    """2024 §3, 2025 §2 and §3: with a query for every key the plain form holds all scores."""

    def plain(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("blhd,bnhd->bhln", q, k) / 8)
        return jnp.einsum("bhln,bnhd->blhd", weights, v)

    n = 4 * BLOCK
    held = {f: [temporary(f, m, m) for m in (n, 2 * n)] for f in (blockwise, plain)}
    for f, times in ((blockwise, 2), (plain, 4)):
        assert held[f][1] / held[f][0] == pytest.approx(times, rel=0.1)
    assert held[plain][0] >= 4 * 4 * n * n > 2 * held[blockwise][0]


@pytest.mark.slow
def test_memory_of_the_gradient(optimized):
    f = jax.grad(lambda *x: blockwise(*x).sum(), (0, 1, 2))
    small, large = (temporary(f, 1, n) for n in (2 * BLOCK, 8 * BLOCK))
    gradients = 2 * 8 * BLOCK * 4 * 64 * 4
    assert large <= small + 2 * gradients  # the blocks' gradients, before they are put together


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_order_and_mode_of_differentiation(implementation):
    q, k, v = arrays_of((1, 2, 2, 1, 20, 3, 2), np.random.default_rng(4))
    bias = np.random.default_rng(5).normal(size=(1, 2, 1, 20))
    options = {"bias": bias, "implementation": IMPLEMENTATIONS[implementation]}
    f = jax.jit(lambda *x: finalize(attend(*x, **options)))
    check_grads(f, (q, k, v), 1, modes=["fwd"])
    check_grads(f, (q, k, v), 2, modes=["rev"])


@pytest.mark.usefixtures("unchecked")
def test_lists_and_lengths_of_any_integers():
    """Out of range they are named where they can be looked at, and clipped where they are not."""
    n = 200
    q, k, v = arrays_of((2, 2, 2, 1, n, 8, 6), np.random.default_rng(0))
    mask = np.arange(n) % 3 > 0
    expected = dense_attention(q, k, v, mask=mask[None, None, None], kv_lengths=[127, 3])
    for lengths in ([127, 3], np.int8([127, 3]), np.uint64([127, 3]), jnp.array([127, 3])):
        out = attention(q, k, v, mask=[[[mask.tolist()]]], kv_lengths=lengths)
        np.testing.assert_allclose(out, expected, atol=1e-12)
    for wrong in ([-1, 3], [3, n + 1], np.array([3, 2**33])):
        with pytest.raises(ValueError, match="kv_lengths: expected 0 to kv_len = 200 keys, got"):
            attention(q, k, v, kv_lengths=np.asarray(wrong))
    for wrong in (np.array([-5, 2**33]), np.array([-128, 127], np.int8)):
        out, _ = forward(q, k, v, kv_lengths=wrong)
        lengths = np.clip(wrong.astype(np.int64), 0, n)
        np.testing.assert_allclose(out, dense_attention(q, k, v, kv_lengths=lengths), atol=1e-12)


@pytest.mark.parametrize(
    "shape", [(0, 3, 4, 2, 40, 8, 6), (0, 1, 4, 2, 700, 64, 6), (2, 3, 4, 2, 0, 8, 6)], ids=str
)
def test_no_rows_and_no_keys(shape):
    arrays = arrays_of(shape, np.random.default_rng(0))
    for options in ({}, all_seen(shape)):
        _, out, lse, gradients = run(*arrays, options)
        assert out.shape == (*shape[:3], shape[-1]) and not np.any(out)
        assert np.all(lse == -np.inf) and not any(np.any(x) for x in gradients)
        assert [x.shape for x in gradients[:3]] == [x.shape for x in arrays]


@pytest.mark.filterwarnings("error")
def test_numpys_float64_without_x64():
    shape = (1, 2, 2, 2, 40, 8, 6)
    arrays, options = arrays_of(shape, np.random.default_rng(0)), all_seen(shape)
    options["kv_lengths"] = np.array([30])
    with jax.enable_x64(False):
        out = attention(*arrays, **options)
        assert out.dtype == "float32"
        state = AttentionState(*(np.asarray(x, np.float64) for x in attend(*arrays, **options)))
        again, lse = finalize(merge(state, AttentionState.identity((1, 2, 2), 6)))
        assert again.dtype == lse.dtype == "float32"
    expected = dense_attention(*arrays, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(again, expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_vmap(implementation):
    shape = SHAPES["streams"]
    arrays, lengths = arrays_of(shape, np.random.default_rng(6)), np.array([3, 640, 0])

    def one(q, k, v, n):
        options = {"kv_lengths": n[None], "implementation": implementation}
        return attention(q[None], k[None], v[None], **options)[0]

    out = jax.jit(jax.vmap(one))(*arrays, lengths)
    np.testing.assert_allclose(out, dense_attention(*arrays, kv_lengths=lengths), atol=1e-12)


# A whole text on one device: halved until its parts are short.


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_causal_values_and_gradients(implementation):
    length = 3 * CAUSAL_BLOCK + 5

    @jax.jit
    def causal(q, k, v, w, u):
        def loss(q, k, v):
            state = attend(q, k, v, causal=True, scale=0.3, implementation=implementation)
            out, lse = finalize(state)
            return jnp.sum(w * out) + jnp.sum(u * lse), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    options = {"mask": np.tri(length, dtype=bool)[None, None], "scale": 0.3}
    for seed in range(2):
        rng = np.random.default_rng(seed)
        q, k, v = arrays_of((2, length, 4, 2, length, 8, 5), rng)
        w, u = rng.normal(size=(2, length, 4, 5)), rng.normal(size=(2, length, 4))
        gradients, (out, lse) = causal(q, k, v, w, u)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
        np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
        wanted = dense_gradients(q, k, v, w, u, **options)
        for ours, dense in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(ours, dense, atol=1e-11)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causal_with_everything_else(implementation):
    shape = (2, 40, 4, 4, 40, 8, 8)
    arrays, options, _ = draw(3, shape)
    how = IMPLEMENTATIONS[implementation]
    out, _ = forward(*arrays, implementation=how, causal=True, **options)
    options["mask"] = options["mask"] & np.tri(40, dtype=bool)
    np.testing.assert_allclose(out, dense_attention(*arrays, **options), atol=1e-12)


def test_causal_halves_compute_few_hidden_scores(monkeypatch):
    seen = []
    attend_blockwise = blocks.attend_blockwise

    def counting(inputs):
        seen.append(inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[1])
        return attend_blockwise(inputs)

    monkeypatch.setattr(blocks, "attend_blockwise", counting)
    n = 8 * CAUSAL_BLOCK
    q = jnp.ones((1, n, 2, 8))
    jax.make_jaxpr(functools.partial(blockwise, causal=True))(q, q, q)
    # Half of n², and half of each diagonal.
    assert sum(seen) == n * (n - CAUSAL_BLOCK) // 2 + n * CAUSAL_BLOCK


# What others ask, what it costs to ask, and what is refused.


def asked(q, k, v, *, mask=None, sinks=None, query_positions=None, key_positions=None, **options):
    """`attend` by the names that the suite has for its questions."""
    if query_positions is not None:
        causal = np.asarray(key_positions) <= np.asarray(query_positions)[:, None]
        mask = causal if mask is None else mask & causal
    state = attend(q, k, v, mask=mask, **options)
    if sinks is not None:
        lse = jnp.broadcast_to(jnp.asarray(sinks, state.max.dtype), state.max.shape)
        state = merge(state, from_output(jnp.zeros_like(state.numerator), lse))
    return finalize(state)


@pytest.mark.parametrize(
    "implementation", [pytest.param("plain", marks=pytest.mark.slow), "blockwise"]
)
def test_the_suite_finds_nothing_wrong(implementation):
    report = check_attention(functools.partial(asked, implementation=implementation))
    assert len(report.names("passed")) == len(report.results) >= 11, str(report)


def test_a_warm_call_takes_few_steps_in_python(unchecked):
    """Shapes and dtypes are checked while tracing, once a shape: only values are looked at."""
    arrays = [jnp.asarray(x) for x in arrays_of((1, 2, 2, 1, 5, 4, 4), np.random.default_rng(0))]
    lengths = jnp.array([3])
    cases = (10, {}), (14, {"kv_lengths": lengths}), (19, {"scale": 0.5})
    for function in attend, attention:
        came = [python_calls(function, *arrays, **options) for _, options in cases]
        # At most: a newer JAX makes an array of a number without coming back to us.
        assert all(n <= most for n, (most, _) in zip(came, cases, strict=True)), came


class _Tensor:
    """Another library's array, as far as it can be told."""

    dtype, shape, ndim = np.dtype("float32"), (2, 3, 4, 8), 4

    def __dlpack__(self):
        raise AssertionError("not to be read without being asked")


Q, K = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)
SMALL = tuple(jnp.asarray(x, jnp.float8_e4m3fn) for x in (Q, K, K))
BAD_ARRAYS = {
    "integers": ((Q.astype(int), K, K), TypeError, "q: expected a floating-point"),
    "a ragged list": (([[1.0], []], K, K), TypeError, "q: expected an array, got a ragged list"),
    "dtypes": ((Q, K.astype(np.float16), K), TypeError, "expected one dtype.*k float16"),
    "rank": ((Q[0], K, K), ValueError, r"q: expected 4 axes.*\(3, 4, 8\)"),
    "batch": ((Q, K[:1], K[:1]), ValueError, r"k: expected.*batch 2.*\(1, 5, 2, 8\)"),
    "head_dim": ((Q, K[..., :7], K), ValueError, r"k: expected.*head_dim 8"),
    "kv_len": ((Q, K, K[:, :4]), ValueError, r"v: expected k's.*\(2, 4, 2, 8\)"),
    "heads": ((Q[:, :, :3], K, K), ValueError, r"q: expected.* multiple of k's 2, got \(.*, 3, "),
    "no head_dim": ((Q[..., :0], K[..., :0], K), ValueError, "q: expected a head_dim"),
    "float8": (SMALL, TypeError, "q: .*float8"),
    "tensor": ((_Tensor(), K, K), TypeError, "q: .*_Tensor: use jnp.from_dlpack"),
}
BAD_OPTIONS = [
    ("mask", np.ones((2, 1, 3, 5)), TypeError, "mask: expected bool"),
    ("mask", np.ones((2, 3, 5), bool), ValueError, "mask: expected a shape"),
    ("mask", [True, False], ValueError, "mask: expected a shape"),
    ("mask", [[True], [True, True]], TypeError, "mask: .*got a ragged list"),
    ("bias", np.ones((2, 4, 3, 4)), ValueError, "bias: expected a shape"),
    ("bias", np.ones((1, 1, 1, 5), int), TypeError, "bias: expected"),
    ("kv_lengths", np.ones(3, int), ValueError, r"kv_lengths:.*\(2,\)"),
    ("kv_lengths", np.ones(2), TypeError, "kv_lengths: .* integers"),
    ("kv_lengths", [1.5, 2], TypeError, "kv_lengths: .*integers"),
    ("scale", float("nan"), ValueError, "scale: .*finite.*nan"),
    ("scale", 1j, ValueError, "scale: expected a real number"),
    ("scale", 1e39, ValueError, "scale: .*1e.39, which float32 does"),
    ("scale", np.ones(2), ValueError, r"scale: .*\(2,\)"),
    ("causal", True, ValueError, "q: .*as many queries as keys, 5, got 3"),
    ("implementation", "fast", ValueError, "implementation: .*got 'fast'"),
    ("implementation", "pallas", ValueError, "implementation: .*got 'pallas'"),
]
BAD = [(arrays, {}, *rest) for arrays, *rest in BAD_ARRAYS.values()]
BAD += [((Q, K, K), {name: value}, *rest) for name, value, *rest in BAD_OPTIONS]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("function", [attend, attention])
def test_bad_input(function):
    for arrays, options, error, message in BAD:
        with pytest.raises(error, match="^" + message):
            function(*arrays, **options)
