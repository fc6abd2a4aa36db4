"""A NaN is not lost on CUDA. The kernel is interpreted with CUDA's max and min, which drop NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters.mlir import _platform_specific_lowerings
from jax.interpreters import mlir
from oracles import dense_attention, dense_weights

from labs.kernels import split_k, tiles
from labs.kernels.cases import draw

ERROR = {"float32": 2e-6, "bfloat16": 3e-5}
B, L, H, H_KV, N, D, DV = SHAPE = 2, 3, 4, 2, 600, 32, 24


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    """Maxima and minima like max.f32 and min.f32, which return the number of a number and a NaN.

    Triton compiles `max`, `min` and `clamp` to these instructions. The interpreter uses XLA's,
    which propagate a NaN, so this fixture replaces their lowering rules.
    """

    def larger(x, y):
        return jnp.where((x > y) | jnp.isnan(y), x, y)

    def smaller(x, y):
        return jnp.where((x < y) | jnp.isnan(y), x, y)

    def largest(x, *, axes, **_):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        least = -np.inf if is_float else np.iinfo(x.dtype).min
        rule = larger if is_float else jnp.maximum
        return lax.reduce(x, np.asarray(least, x.dtype), rule, axes)

    rules = {
        lax.max_p: larger,
        lax.min_p: smaller,
        lax.clamp_p: lambda low, x, high: smaller(larger(x, low), high),
        lax.reduce_max_p: largest,
    }
    of_cpus = _platform_specific_lowerings["cpu"]
    for primitive, rule in rules.items():
        monkeypatch.setitem(of_cpus, primitive, None)  # monkeypatch removes it at the end
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


@jax.jit
def written(q, k, v, scale, options):
    """The state that the two kernels write for several splits."""
    assert tiles.tile_of(q, v).splits > 1
    options = {"mask": None, "bias": None, "kv_lengths": None} | options
    return split_k._call(q, k, v, jnp.float32(scale), options, interpret=True)


def finalized(m, d, n):
    """`finalize` in NumPy, because JAX's maximum is replaced here."""
    m, d, n = (np.asarray(x, np.float64) for x in (m, d, n))
    with np.errstate(divide="ignore"):
        return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("where", ["q", "k", "v", "all keys", "bias", "scale"])
def test_what_is_nan_is_what_dense_attention_has_as_nan(where, dtype):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, k, v = (np.array(x) for x in draw(SHAPE, dtype, seed))
        lengths = rng.integers(3, N + 1, B).astype(np.int32)
        bias = rng.normal(size=(1, H, 1, N)).astype(np.float32)
        bias[..., 1] = -np.inf
        scale = D**-0.5
        if where == "q":
            q[rng.integers(B), rng.integers(L), rng.integers(H), 3] = np.nan
        elif where in ("k", "v"):
            key = rng.choice([0, 2, lengths.min() - 1])
            {"k": k, "v": v}[where][rng.integers(B), key, rng.integers(H_KV), 3] = np.nan
        elif where == "all keys":
            k[:] = np.nan
        elif where == "bias":
            bias[0, rng.integers(H), 0, rng.choice([0, 2, lengths.max() - 1])] = np.nan
        else:
            scale = np.nan
        options = {"bias": bias, "kv_lengths": lengths}
        state = written(q, k, v, scale, options)
        np.testing.assert_array_equal(np.isnan(state[0]), np.isnan(state[1]))
        out, lse = finalized(*state)
        expected = dense_attention(q, k, v, **options, scale=scale)
        np.testing.assert_allclose(out, expected, atol=5 * ERROR[dtype])
        _, expected = dense_weights(q, k, **options, scale=scale)
        np.testing.assert_allclose(lse, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("hidden", ["mask", "bias"])
def test_a_query_without_keys_reads_no_nan(hidden):
    """Its state is (−∞, 0, 0) for any values. The other queries' states are NaN."""
    q, k, v = draw(SHAPE, "float32")
    v = jnp.full_like(v, np.nan)
    seen = np.ones((1, 1, L, N), bool)
    seen[:, :, 1] = False
    options = {"mask": seen} if hidden == "mask" else {"bias": np.where(seen, 0.0, -np.inf)}
    m, d, n = (np.moveaxis(x, 1, 0) for x in map(np.asarray, written(q, k, v, 1.0, options)))
    assert np.all(np.isneginf(m[1])) and not np.any(d[1]) and not np.any(n[1])
    assert np.all(np.isnan(n[::2])) and np.all(np.isfinite(m[::2]))
