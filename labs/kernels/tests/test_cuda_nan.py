"""A NaN is not lost on CUDA, whose max and min drop it: the kernel interpreted with those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax._src.interpreters.mlir import _platform_specific_lowerings
from jax.interpreters import mlir
from oracles import dense_attention, dense_weights
from test_pallas import ERROR, draw

from treeattn.kernel import pallas
from treeattn.kernel.inputs import check_inputs


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    """Maxima and minima as max.f32 and min.f32 compute them: of a number and a NaN, the number.

    Triton makes such instructions of `max`, `min` and `clamp` in a kernel. The interpreter leaves
    them to XLA, which hands a NaN on; here it is given other rules for them.
    """

    def larger(x, y):
        return jnp.where((x > y) | (y != y), x, y)

    def smaller(x, y):
        return jnp.where((x < y) | (y != y), x, y)

    def largest(x, *, axes, **_):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        least = -np.inf if is_float else np.iinfo(x.dtype).min
        return lax.reduce(x, np.asarray(least, x.dtype), larger, axes)

    rules = {
        lax.max_p: larger,
        lax.min_p: smaller,
        lax.clamp_p: lambda low, x, high: smaller(larger(x, low), high),
        lax.reduce_max_p: largest,
    }
    of_cpus = _platform_specific_lowerings["cpu"]
    for primitive, rule in rules.items():
        monkeypatch.setitem(of_cpus, primitive, None)  # in the end it is gone again
        mlir.register_lowering(primitive, mlir.lower_fun(rule, False), platform="cpu")


def test_the_rules_drop_a_nan():
    x, nan = jnp.array([1.0, jnp.nan, -3.0]), jnp.full(3, jnp.nan)

    def f(x, nan):
        return jnp.maximum(x, nan), jnp.minimum(nan, x), jnp.clip(nan, -1, 1), jnp.max(x)

    larger, smaller, within, largest = jax.jit(f)(x, nan)
    np.testing.assert_array_equal(larger, x)
    np.testing.assert_array_equal(smaller, x)
    np.testing.assert_array_equal(within, [-1, -1, -1])
    assert largest == 1


def written(*arrays, scale, factor=None, **options):
    """The state that the two kernels write, of several splits."""
    inputs = check_inputs(*arrays, **options).replace(factor=factor)
    assert pallas.tile_of(inputs.q, inputs.v).splits > 1
    return pallas._call(*inputs.arrays, scale=scale, causal=inputs.causal, interpret=True)


def finalized(m, d, n):
    """(out, lse) of a state, in float64."""
    m, d, n = (np.asarray(x, np.float64) for x in (m, d, n))
    with np.errstate(divide="ignore"):
        return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)


B, L, H, H_KV, N, D, DV = SHAPE = (2, 3, 4, 2, 600, 32, 24)


def spoiled(seed: int, dtype: str, where: str):
    """(arrays, options) with a NaN or two in what `where` names; key 1 is hidden by its bias."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, N + 1, B)
    bias = rng.normal(size=(1, H, 1, N)).astype(np.float32)
    bias[..., 1] = -np.inf
    factor = np.float32(1)
    arrays = dict(zip("qkv", map(np.array, draw(seed, SHAPE, (), dtype)[0]), strict=True))
    if where in arrays:
        x, keys = arrays[where], [0, 2, lengths.min() - 1]
        for _ in range(2):
            row, key, head, column = (rng.integers(size) for size in x.shape)
            key = key if where == "q" else rng.choice(keys)
            x[row, key, head, column] = np.nan
    elif where == "all keys":
        arrays["k"][:] = np.nan
    elif where == "bias":
        bias[0, rng.integers(H), 0, rng.choice([0, 2, lengths.max() - 1])] = np.nan
    else:
        factor = np.float32(np.nan)
    return tuple(arrays.values()), {"bias": bias, "kv_lengths": lengths, "factor": factor}


@pytest.mark.parametrize("dtype", ERROR)
def test_what_is_nan_is_what_dense_attention_has_as_nan(dtype):
    f = jax.jit(functools.partial(written, scale=D**-0.5))

    @settings(max_examples=24)
    @given(
        seed=st.integers(0, 2**32),
        where=st.sampled_from(["q", "k", "v", "all keys", "bias", "factor"]),
    )
    def test(seed, where):
        arrays, options = spoiled(seed, dtype, where)
        out, lse = finalized(*f(*arrays, **options))
        scale = D**-0.5 * float(options.pop("factor"))
        expected = dense_attention(*arrays, **options, scale=scale)
        np.testing.assert_allclose(out, expected, atol=5 * ERROR[dtype])
        _, expected = dense_weights(*arrays[:2], **options, scale=scale)
        np.testing.assert_allclose(lse, expected, rtol=1e-6, atol=2e-6)

    test()


@pytest.mark.parametrize("hidden", ["mask", "bias"])
def test_a_query_without_keys_reads_no_nan(hidden):
    """Its state is (−∞, 0, 0) whatever the values are; that of the others is NaN."""
    q, k, v = draw(0, SHAPE, (), "float32")[0]
    v = jnp.full_like(v, jnp.nan)
    seen = np.ones((1, 1, L, N), bool)
    seen[:, :, 1] = False
    options = {"mask": seen} if hidden == "mask" else {"bias": np.where(seen, 0.0, -np.inf)}
    state = jax.jit(functools.partial(written, scale=1.0))(q, k, v, **options)
    m, d, n = (np.moveaxis(x, 1, 0) for x in map(np.asarray, state))
    assert np.all(np.isneginf(m[1])) and not np.any(d[1]) and not np.any(n[1])
    assert np.all(np.isnan(n[::2])) and np.all(np.isfinite(m[::2]))
