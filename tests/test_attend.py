"""attend against dense attention in float64: values, gradients, dtypes, extremes, memory.

One program for each shape and set of options is fed many cases: masks, biases, lengths and stale
memory are its arguments.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    DECODERS,
    FOR_PROMPTS,
    IMPLEMENTATIONS,
    OPTIONS,
    PREFILLS,
    STATIC,
    check,
    check_gradients,
    draw,
    over,
    results,
)
from calls import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from oracles import dense_attention, dense_gradients, dense_weights

from treeattn import (
    AttentionState,
    attend,
    attention,
    blocks,
    finalize,
    memory,
    merge,
    ring_decode,
    tree_decode,
)
from treeattn.blocks import CAUSAL_BLOCK
from treeattn.products import BLOCK

SHAPES = {
    # few queries: sums, in blocks that rows may not need
    "lanes": {"b": 3, "l": 1, "n": 640, "h": 4, "h_kv": 2, "d": 32, "dv": 16},
    # many queries: matrix products, in two blocks
    "products": {"b": 2, "l": 5, "n": 1100, "h": 4, "h_kv": 2, "d": 8, "dv": 6},
    "few keys": {"b": 3, "l": 2, "n": 3, "h": 2, "h_kv": 1, "d": 5, "dv": 7},
}
OURS = ["plain", "blockwise"]


def function(implementation, **options):
    """(q, k, v, **options) -> (out, lse)."""

    def f(q, k, v, **more):
        return finalize(attend(q, k, v, implementation=implementation, **options, **more))

    return f


FUNCTIONS = {name: function(how) for name, how in IMPLEMENTATIONS.items()}
BLOCKWISE = jax.jit(FUNCTIONS["blockwise"])


def all_seen(shape):
    """Options that hide nothing."""
    b, l, n, h = (shape[name] for name in ("b", "l", "n", "h"))
    mask, bias = np.ones((b, 1, l, n), bool), np.zeros((1, h, 1, n))
    return {"mask": mask, "bias": bias, "kv_lengths": np.full(b, n, np.int32)}


def ones(q, v):
    """Weights of the output and of lse."""
    return np.ones((*q.shape[:3], v.shape[-1])), np.ones(q.shape[:3])


def draw_options(rng, shape):
    sizes = {name: shape[name] for name in ("b", "l", "n", "h")}
    return {name: draw_one(rng, **sizes) for name, draw_one in OPTIONS.items()}


def test_every_option_is_drawn():
    parameters = set(inspect.signature(attend).parameters) - {"q", "k", "v"}
    missing = parameters ^ {*OPTIONS, *STATIC, "implementation"}
    assert not missing, f"tests/attentions.py: a row of OPTIONS, or of STATIC, for {missing}"
    for f in (attention, tree_decode, ring_decode):
        missing = parameters - FOR_PROMPTS - set(inspect.signature(f).parameters)
        assert not missing, f"{f.__name__} has no {missing}, which attend has"
    for name, f in PREFILLS.items():
        missing = parameters - {"mask", "bias", "kv_lengths"} - set(inspect.signature(f).parameters)
        assert not missing, f"{name} has no {missing}, which attend has"


@pytest.mark.parametrize("option", STATIC)
def test_a_static_option_is_obeyed_everywhere(option):
    """Beside a bias, over two axes, and in the gradients."""
    rng, arrays = np.random.default_rng(0), draw(b=1, l=4, n=4, h=4, h_kv=4, d=4)
    weights, bias = rng.normal(size=arrays[0].shape), {"bias": rng.normal(size=(1, 4, 4, 4))}
    ways = {
        x: (functools.partial(attention, implementation=y), bias)
        for x, y in IMPLEMENTATIONS.items()
    }
    sharded, others = (PREFILLS, {}) if option in FOR_PROMPTS else (DECODERS, bias)
    sharding = over(keys_a=2, keys_b=2)
    ways |= {x: (functools.partial(f, sharding=sharding), others) for x, f in sharded.items()}
    for name, (f, others) in ways.items():
        outs = []
        for value in STATIC[option]:
            options = others | {option: value}
            with_it = functools.partial(f, **{option: value})
            out, gradients = results(with_it, *arrays, weights, 0.0, others)
            check(out, *arrays, **options)
            check_gradients(gradients, *arrays, weights, np.zeros(out.shape[:3]), **options)
            outs.append(out)
        assert np.abs(outs[0] - outs[1]).max() > 1e-3, name


def unseen(shape, options):
    """(b, n, h_kv, 1): the keys that no query of their row and head sees."""
    b, l, n, h, h_kv = (shape[name] for name in ("b", "l", "n", "h", "h_kv"))
    seen = options["mask"] & (options["bias"] != -np.inf)
    seen = seen & (np.arange(n) < options["kv_lengths"][:, None, None, None])
    seen = np.broadcast_to(seen, (b, h, l, n)).reshape(b, h_kv, -1, n)
    return ~seen.any(axis=2).transpose(0, 2, 1)[..., None]


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(list(SHAPES)),
    stale=st.sampled_from([0.0, np.nan, np.inf]),
    how=st.sampled_from(list(FUNCTIONS)),
)
def test_values_and_gradients(seed, name, stale, how):
    """With memory that was never written, which may hold anything, wherever nobody looks."""
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    q, k, v = draw(seed, **shape)
    q, options = q * rng.choice([0.1, 1.0, 5.0]), draw_options(rng, shape)
    if how == "a kernel":
        stale = 0.0  # keeping NaN out is the kernel's own business
    hidden = unseen(shape, options)
    k, v = np.where(hidden, 0, k), np.where(hidden, 0, v)
    w, u = rng.normal(size=(*q.shape[:3], shape["dv"])), rng.normal(size=q.shape[:3])
    cache = np.where(hidden, stale, k), np.where(hidden, stale, v)
    found, gradients = results(FUNCTIONS[how], q, *cache, w, u, options)
    check(found, q, k, v, **options)
    check_gradients(gradients, q, k, v, w, u, **options)


EMPTY = {"no rows": SHAPES["lanes"] | {"b": 0}, "no keys": SHAPES["few keys"] | {"n": 0}}


@pytest.mark.parametrize("how", FUNCTIONS)
@pytest.mark.parametrize("shape", (SHAPES | EMPTY).values(), ids=SHAPES | EMPTY)
def test_no_keys_no_nan(shape, how):
    q, k, v = draw(**shape)
    w, u = ones(q, v)
    for hiding, value in ("mask", False), ("bias", -np.inf), ("kv_lengths", 0):
        options = all_seen(shape)
        options[hiding][:] = value
        (out, lse), gradients = results(FUNCTIONS[how], q, k, v, w, u, options)
        assert out.shape == w.shape and np.all(lse == -np.inf)
        assert not any(np.any(x) for x in (out, *gradients))


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize("name", ["lanes", "products"])
def test_extreme_biases_and_scores(name, how):
    options = all_seen(SHAPES[name])
    q, k, v = draw(1, **SHAPES[name])
    group = q.shape[2] // k.shape[2]

    def run(q, bias):
        given = options | {"bias": np.zeros_like(options["bias"]) + bias}
        found, gradients = results(FUNCTIONS[how], q, k, v, *ones(q, v), given)
        return *found, all(np.isfinite(x).all() for x in gradients)

    for far in (1e4, -1e4):
        out, lse, _ = run(q, far)
        np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-10)
        np.testing.assert_allclose(lse, dense_weights(q, k)[1] + far, rtol=1e-12)
    out, _, finite = run(q * 1e4, 0)  # one-hot weights
    np.testing.assert_allclose(out, dense_attention(q * 1e4, k, v), atol=1e-10)
    assert finite
    # An infinite bias counts as the largest number, and takes all the weight.
    out, lse, finite = run(q, np.where(np.arange(k.shape[1]) == 2, np.inf, 0))
    wanted = np.repeat(v[:, 2:3], group, axis=2)
    np.testing.assert_array_equal(out, np.broadcast_to(wanted, out.shape))
    assert np.all(lse == np.finfo(np.float64).max) and finite
    # A NaN is not lost: 0 / 0 is a negative one on x86, and the lowest of all bit patterns.
    for nan in (np.nan, np.copysign(np.nan, -1)):
        one = np.where(np.arange(k.shape[1]) == 3, nan, 0.0)
        for bias in (one, one + nan, np.where(np.isnan(one), nan, -np.inf)):
            out, lse, _ = run(q, bias)
            assert np.isnan(out).all() and np.isnan(lse).all()


RTOL = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize(("name", "dtype"), list(zip(SHAPES, RTOL, strict=True)))
def test_dtypes(name, dtype, how):
    """Only the inputs are rounded to the dtype: all arithmetic is in float32, and a state is."""
    shape = SHAPES[name]

    @jax.jit
    def both(q, k, v, w, options):
        options = options | {"implementation": how}
        gradients = jax.grad(lambda *x: jnp.sum(w * attention(*x, **options)), (0, 1, 2))(q, k, v)
        return attend(q, k, v, **options), attention(q, k, v, **options), gradients

    for seed in range(4):
        rng = np.random.default_rng(seed)
        arrays = [jnp.asarray(x, dtype) for x in draw(seed, **shape)]
        options = {"mask": rng.random((shape["b"], 1, shape["l"], shape["n"])) < 0.5}
        options["kv_lengths"] = rng.integers(1, shape["n"], shape["b"]).astype(np.int32)
        w = rng.normal(size=(*arrays[0].shape[:3], shape["dv"]))
        state, rounded, gradients = both(*arrays, w, options)
        assert {x.dtype for x in state} == {jnp.dtype("float32")}
        found = finalize(state)
        check(found, *arrays, atol=1e-5, **options)
        # Fused into one program, "plain" may round its sums otherwise.
        wide = (np.float64(x) for x in (rounded, found[0]))
        np.testing.assert_allclose(*wide, rtol=RTOL[dtype])
        if how == "blockwise":
            np.testing.assert_array_equal(rounded, found[0].astype(dtype))
        assert {x.dtype for x in (rounded, *gradients)} == {jnp.dtype(dtype)}
        gradients = [np.asarray(x, np.float64) for x in gradients]
        check_gradients(gradients, *arrays, w, atol=RTOL[dtype], **options)


OTHER_KEYS = [
    ("lanes", "float32", "float8_e4m3fn"),
    ("lanes", "bfloat16", "float32"),
    ("products", "float32", "bfloat16"),
    ("few keys", "float16", "float8_e5m2"),
]


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize(("name", "dtype", "of_keys"), OTHER_KEYS)
def test_keys_of_another_dtype(name, dtype, of_keys, how):
    """A narrower cache counts as the numbers that it holds; what is returned has q's dtype."""
    q, *cache = draw(3, **SHAPES[name])
    q, cache = jnp.asarray(q, dtype), [jnp.asarray(x, of_keys) for x in cache]

    @jax.jit
    def both(q, k, v):
        out = attention(q, k, v, implementation=how)
        state = attend(q, k, v, implementation=how)
        return jnp.sum(out.astype(jnp.float32)), (out, finalize(state))

    run = jax.value_and_grad(both, (0, 1, 2), has_aux=True)
    (_, (out, found)), gradients = run(q, *cache)
    wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, *cache)]
    assert out.dtype == dtype and found[1].dtype == jnp.float32
    check(found, *wide, atol=1e-5)
    assert [x.dtype for x in gradients] == [x.dtype for x in (q, *cache)]
    slope, *_ = dense_gradients(*wide, np.ones(out.shape))
    np.testing.assert_allclose(gradients[0].astype(jnp.float32), slope, atol=RTOL[dtype])


@pytest.mark.parametrize("d", [32, 56, 72, 128])
def test_one_query_of_every_width(d):  # the sum over d is written out in other ways for each
    arrays = draw(d, b=1, l=1, n=BLOCK // 2 + 3, h=1, h_kv=1, d=d, dv=8)
    check(BLOCKWISE(*arrays), *arrays)


RANGES = [(600, "float32"), (600, "bfloat16"), (6, "float32"), (6, "float16")]


@pytest.mark.parametrize(("n", "dtype"), RANGES)  # sums, and products of matrices
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), qk=st.sampled_from([1, 100, 1e4, 4e18]))
def test_finite_inputs_make_no_nan(n, dtype, seed, qk):
    rng = np.random.default_rng(seed)
    top = float(jnp.finfo(dtype).max)
    q, k, v = (
        jnp.asarray(np.clip(size * rng.choice([-1, 0, 1e-3, 1], (1, x, 1, 16)), -top, top), dtype)
        for x, size in ((1, qk), (n, qk), (n, 3e38))
    )
    out, lse = BLOCKWISE(q, k, v)
    assert not np.any(np.isnan(out)) and np.all(np.isfinite(lse))


@pytest.mark.parametrize(("l", "n"), [(1, 5), (1, BLOCK + 3), (40, 100)])
def test_a_nan_is_not_lost(l, n):
    for which in range(3):
        arrays = draw(b=1, l=l, n=n, h=2, d=64, dtype=np.float32)
        arrays[which][:, 0] = np.nan
        out, lse = BLOCKWISE(*arrays)
        assert np.all(np.isnan(out[:, 0]))
        assert np.all(np.isnan(lse[:, 0])) == (which < 2)


@pytest.mark.parametrize("how", OURS)
def test_a_bias_below_the_range_of_the_scores_hides(how):
    q, k, v = draw(b=1, n=6, h=2, d=16, dtype=np.float32)
    out, lse = FUNCTIONS[how](q, k, v, bias=np.full((1, 1, 1, 6), -1e300))
    assert not np.any(out) and np.all(lse == -np.inf)


def test_a_query_that_sees_nothing_of_what_others_see():
    q, k, v = draw(b=1, n=6, h=2, d=16, dtype=np.float32)
    v[:] = np.nan
    m, d, n = attend(q, k, v, mask=np.array([False, True])[None, None, :, None])
    assert np.all(m[:, 0] == -np.inf) and not np.any(d[:, 0]) and not np.any(n[:, 0])
    assert np.all(np.isnan(n[:, 1]))


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
    # A query times the scale is as large as can be, not NaN.
    q, k, v = (np.full((1, n, 1, 8), x, np.float32) for n, x in ((1, 1e20), (3, 1), (3, 2)))
    np.testing.assert_array_equal(attention(q, k, v, scale=1e20), np.full((1, 1, 1, 8), 2))


blockwise = functools.partial(attention, implementation="blockwise")


def up_to(q, k, v, lengths):
    return blockwise(q, k, v, kv_lengths=lengths)


def temporary(f, queries, n, *, dtype="float32", of_keys=None, batch=1):
    """Temporary bytes of f(q, k, v), or of `up_to`, which takes lengths, too."""
    q = jax.ShapeDtypeStruct((batch, queries, 4, 64), dtype)
    k = jax.ShapeDtypeStruct((batch, n, 4, 64), of_keys or dtype)
    more = [jax.ShapeDtypeStruct((batch,), "int32")] if f is up_to else []
    return memory(jax.jit(f).lower(q, k, k, *more).compile()).temporary_bytes


CACHES = [("bfloat16", 3, 1), ("float32", 1, 32), ("float8_e4m3fn", 1, 1), ("bfloat16", 1, 32)]


@pytest.mark.parametrize(("of_keys", "batch", "queries"), CACHES)
def test_memory_does_not_grow_with_the_keys(of_keys, batch, queries, optimized):
    """Keys that are narrower than the queries are widened a block at a time."""
    few, many = (
        temporary(up_to, queries, n, of_keys=of_keys, batch=batch) for n in (2 * BLOCK, 32 * BLOCK)
    )
    assert many <= few + 1024  # a few bytes for the loop's indices


def test_of_a_cache_that_is_half_full_half_is_read(optimized):
    """In blocks of half of it: one block would hold twice as many scores, and be read whole."""
    half, whole = (temporary(up_to, 16, n) for n in (BLOCK // 2, BLOCK))
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


@pytest.mark.parametrize("how", OURS)
def test_every_order_and_mode_of_differentiation(how):
    arrays = draw(4, b=1, n=20, h=2, h_kv=1, d=3)
    bias = np.random.default_rng(5).normal(size=(1, 2, 1, 20))
    f = jax.jit(functools.partial(FUNCTIONS[how], bias=bias))
    check_grads(f, arrays, 1, modes=["fwd"])
    check_grads(f, arrays, 2, modes=["rev"])


@pytest.mark.usefixtures("unchecked")
def test_lists_and_lengths_of_any_integers():
    """Clipped where nobody can look at them; elsewhere, tests/test_arguments.py."""
    n = 200
    arrays = draw(n=n, h=2, h_kv=1, d=8)
    mask = np.arange(n) % 3 > 0
    for lengths in ([127, 3], np.int8([127, 3]), np.uint64([127, 3]), jnp.array([127, 3])):
        out = attention(*arrays, mask=[[[mask.tolist()]]], kv_lengths=lengths)
        check(out, *arrays, mask=mask[None, None, None], kv_lengths=[127, 3])
    for wrong in (np.array([-5, 2**33]), np.array([-128, 127], np.int8)):
        found = BLOCKWISE(*arrays, kv_lengths=wrong)
        check(found, *arrays, kv_lengths=np.clip(wrong.astype(np.int64), 0, n))


@pytest.mark.filterwarnings("error")
def test_numpys_float64_without_x64():
    shape = {"b": 1, "l": 2, "n": 40, "h": 2, "h_kv": 2, "d": 8, "dv": 6}
    arrays, options = draw(**shape), all_seen(shape) | {"kv_lengths": np.array([30])}
    with jax.enable_x64(False):
        out = attention(*arrays, **options)
        assert out.dtype == "float32"
        state = AttentionState(*(np.asarray(x, np.float64) for x in attend(*arrays, **options)))
        again, lse = finalize(merge(state, AttentionState.identity((1, 2, 2), 6)))
        assert again.dtype == lse.dtype == "float32"
    for found in out, again:
        check(found, *arrays, atol=1e-5, **options)


@pytest.mark.parametrize("how", OURS)
def test_vmap(how):
    arrays, lengths = draw(6, **SHAPES["lanes"]), np.array([3, 640, 0])

    def one(q, k, v, n):
        options = {"kv_lengths": n[None], "implementation": how}
        return attention(q[None], k[None], v[None], **options)[0]

    check(jax.jit(jax.vmap(one))(*arrays, lengths), *arrays, kv_lengths=lengths)


# A whole text on one device: halved until its parts are short.


@pytest.mark.parametrize("how", OURS)
def test_causal_values_and_gradients(how):
    length = 3 * CAUSAL_BLOCK + 5
    f = function(how, causal=True, scale=0.3)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        q, k, v = draw(seed, l=length, n=length, d=8, dv=5)
        w, u = rng.normal(size=(2, length, 4, 5)), rng.normal(size=(2, length, 4))
        found, gradients = results(f, q, k, v, w, u, {})
        check(found, q, k, v, causal=True, scale=0.3)
        check_gradients(gradients, q, k, v, w, u, causal=True, scale=0.3)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_causal_with_everything_else(how):
    shape = {"b": 2, "l": 40, "n": 40, "h": 4, "h_kv": 4, "d": 8}
    arrays, options = draw(3, **shape), draw_options(np.random.default_rng(3), shape)
    out, _ = jax.jit(function(IMPLEMENTATIONS[how], causal=True))(*arrays, **options)
    check(out, *arrays, causal=True, **options)


def test_causal_halves_compute_few_hidden_scores(monkeypatch):
    seen = []
    attend_parts = blocks._attend

    def counting(inputs):  # queries (b, h_kv, group, l, d)
        seen.append(inputs.q.shape[0] * inputs.q.shape[3] * inputs.k.shape[1])
        return attend_parts(inputs)

    monkeypatch.setattr(blocks, "_attend", counting)
    n = 8 * CAUSAL_BLOCK
    q = jnp.ones((1, n, 2, 8))
    jax.make_jaxpr(functools.partial(blockwise, causal=True))(q, q, q)
    # Half of n², and half of each diagonal.
    assert sum(seen) == n * (n - CAUSAL_BLOCK) // 2 + n * CAUSAL_BLOCK


def test_a_warm_call_takes_few_steps_in_python(unchecked):
    """Shapes and dtypes are checked while tracing, once a shape: only values are looked at."""
    arrays = [jnp.asarray(x) for x in draw(b=1, h=2, h_kv=1)]
    cases = (10, {}), (14, {"kv_lengths": jnp.array([3])}), (19, {"scale": 0.5})
    for function in attend, attention:
        came = [python_calls(function, *arrays, **options) for _, options in cases]
        # At most: a newer JAX makes an array of a number without coming back to us.
        assert all(n <= most for n, (most, _) in zip(came, cases, strict=True)), came


def test_a_program_of_symbolic_sizes_is_exported():
    b, n = jax.export.symbolic_shape("b, n")
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, 1, 4, 8), (b, n, 2, 8)))
    exported = jax.export.export(jax.jit(attention))(q, k, k)
    arrays = draw(b=3, l=1, n=7, d=8, dtype=np.float32)
    np.testing.assert_allclose(exported.call(*arrays), dense_attention(*arrays), atol=1e-6)
    lengths = jax.ShapeDtypeStruct((b,), jnp.int32)
    with_lengths = jax.jit(lambda *x: attention(*x[:3], kv_lengths=x[3]))
    exported = jax.export.export(with_lengths)(q, k, k, lengths)
    used = np.array([7, 3, 0], np.int32)
    expected = dense_attention(*arrays, kv_lengths=used)
    np.testing.assert_allclose(exported.call(*arrays, used), expected, atol=1e-6)
