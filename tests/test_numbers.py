"""attend with any dtype and with numbers at the ends of its range, infinities and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import check, draw, results
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_gradients
from test_attend import BLOCKWISE, FUNCTIONS, OURS, SHAPES, all_seen, ones

from treeattn import AttentionState, attend, attention, finalize, merge
from treeattn.products import BLOCK


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize("name", ["lanes", "products"])
def test_extreme_biases_and_scores(name, how):
    options = all_seen(SHAPES[name])
    q, k, v = draw(1, **SHAPES[name])
    key = np.arange(k.shape[1])

    def run(q, bias):
        given = options | {"bias": np.broadcast_to(bias, options["bias"].shape)}
        return results(FUNCTIONS[how], q, k, v, *ones(q, v), given)

    for far, bias in (1, 1e4), (1, -1e4), (1e4, 0.0):  # the last has one-hot weights
        found, gradients = run(q * far, bias)
        check(found, q * far, k, v, bias=bias, atol=1e-10)
        assert all(np.isfinite(x).all() for x in gradients)
    # An infinite bias counts as the largest number, and takes all the weight.
    (out, lse), gradients = run(q, np.where(key == 2, np.inf, 0))
    check(out, q, k, v, bias=np.where(key == 2, 1e4, 0))
    assert np.all(lse == np.finfo(np.float64).max)
    assert all(np.isfinite(x).all() for x in gradients)
    # A NaN is not lost: 0 / 0 is a negative one on x86, and the lowest of all bit patterns.
    for nan in (np.nan, np.copysign(np.nan, -1)):
        one = np.where(key == 3, nan, 0.0)
        for bias in (one, one + nan, np.where(key == 3, nan, -np.inf)):
            (out, lse), _ = run(q, bias)
            assert np.isnan(out).all() and np.isnan(lse).all()


RTOL = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}
RTOL |= {"float8_e4m3fn": 0.08, "float8_e5m2": 0.15}
DTYPES = [
    *zip(SHAPES, RTOL, RTOL, strict=False),
    ("lanes", "float32", "float8_e4m3fn"),
    ("lanes", "bfloat16", "float32"),
    ("products", "float32", "bfloat16"),
    ("few keys", "float16", "float8_e5m2"),
]


@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize(("name", "dtype", "of_keys"), DTYPES)
def test_dtypes(name, dtype, of_keys, how):
    """Only the inputs are rounded to a dtype: all arithmetic is in float32, and a state is. What is
    returned has q's dtype, each gradient that of its array."""
    shape = SHAPES[name]

    @jax.jit
    def both(q, k, v, w, options):
        options = options | {"implementation": how}
        gradients = jax.grad(lambda *x: jnp.sum(w * attention(*x, **options)), (0, 1, 2))(q, k, v)
        return attend(q, k, v, **options), attention(q, k, v, **options), gradients

    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, *cache = draw(seed, **shape)
        arrays = [jnp.asarray(q, dtype), *(jnp.asarray(x, of_keys) for x in cache)]
        options = {"mask": rng.random((shape["b"], 1, shape["l"], shape["n"])) < 0.5}
        options["kv_lengths"] = rng.integers(1, shape["n"], shape["b"]).astype(np.int32)
        w = rng.normal(size=(*q.shape[:3], shape["dv"]))
        state, rounded, gradients = both(*arrays, w, options)
        assert {x.dtype for x in state} == {jnp.dtype("float32")} and rounded.dtype == dtype
        found = finalize(state)
        check(found, *arrays, atol=1e-5, **options)
        # Fused into one program, "plain" may round its sums otherwise.
        wide = (np.float64(x) for x in (rounded, found[0]))
        np.testing.assert_allclose(*wide, rtol=RTOL[dtype])
        if how == "blockwise":
            np.testing.assert_array_equal(rounded, found[0].astype(dtype))
        expected = dense_gradients(*arrays, w, **options)
        for got, dense, x in zip(gradients, expected, arrays, strict=True):
            assert got.dtype == x.dtype
            near = max(RTOL[dtype], RTOL[x.dtype.name])  # the output was rounded, too
            np.testing.assert_allclose(np.float64(got), dense, atol=near, rtol=near)


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


def test_a_query_that_sees_nothing_of_what_others_see():
    q, k, v = draw(b=1, n=6, h=2, d=16, dtype=np.float32)
    v[:] = np.nan
    m, d, n = attend(q, k, v, mask=np.array([False, True])[None, None, :, None])
    assert np.all(m[:, 0] == -np.inf) and not np.any(d[:, 0]) and not np.any(n[:, 0])
    assert np.all(np.isnan(n[:, 1]))


TOP = float(np.finfo(np.float32).max)
OUT_OF_RANGE = [  # entries of the query, of each key and each value; the scale; output and pivot
    ("float16", 300, [300, 299, 300], [0, 1, 2], 1.0, 1, 16 * 300 * 300),
    # Scores that overflow upwards share the weight; those that overflow downwards are keys, too.
    ("float32", 3e38, [3e38, -3e38, 3e38], [1, 7, 2], None, 1.5, TOP),
    ("float32", 3e38, [-3e38], [7], None, 7, -TOP),
    # A query times the scale is as large as can be, not NaN.
    ("float32", 1e20, [1, 1, 1], [2, 2, 2], 1e20, 2, TOP),
]


@pytest.mark.parametrize(("dtype", "q", "k", "v", "scale", "out", "pivot"), OUT_OF_RANGE)
def test_scores_out_of_range(dtype, q, k, v, scale, out, pivot):
    q = np.full((1, 1, 1, 16), q, dtype)
    k, v = (np.array(x, dtype).reshape(1, -1, 1, 1) for x in (k, v))
    state = attend(q, np.repeat(k, 16, axis=3), v, scale=scale)
    np.testing.assert_array_equal(finalize(state)[0], [[[[out]]]])
    np.testing.assert_array_equal(state.max, [[[pivot]]])


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
