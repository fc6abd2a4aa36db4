"""F, its gradient and its higher derivatives, against plain NumPy sums in float64."""

import functools

import attentions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import dense_weights

from treeattn import (
    attention_from_energy,
    causal_energy,
    cumulant,
    energy,
    log_likelihood,
)
from treeattn.gradient import log_sum_exp

SHAPES = [(0, 2, 3), (1, 1, 1), (7, 2, 6), (40, 8, 3)]  # (n, d, dv): no key, one; dv ≠ d both ways
MASKS = [0, 0.2, 0.5, 1]  # how many keys are visible, about
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
attention = jax.jit(attention_from_energy)


@jax.jit
def derivatives(zeta, q, k, v, mask, scale):
    """F(ζ), its gradients, and the cumulants of order 0 to 3: one program a shape."""
    options = {"mask": mask, "scale": scale}
    f, gradients = jax.value_and_grad(energy, (0, 1, 2, 3))(zeta, q, k, v, **options)
    return f, gradients, [cumulant(order, q, k, v, **options) for order in range(4)]


def draw(n, d, dv, visible=1.0, seed=0, dtype=np.float64):
    """(zeta, q, k, v), and a mask."""
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in ((dv,), (d,), (n, d), (n, dv))]
    return arrays, rng.random(n) < visible


def dense(zeta, q, k, v, mask=None, scale=None):
    """(F(ζ), the tilted weights (n,)): the source is a bias of the scores."""
    q, k, bias = q[None, None, None], k[None, :, None], (v @ zeta)[None, None, None]
    weights, lse = dense_weights(q, k, mask=mask, bias=bias, scale=scale)
    return lse.item(), weights[0, 0, 0]


@given(
    shape=st.sampled_from(SHAPES),
    mask=st.sampled_from(MASKS),
    scale=st.sampled_from([0.25, 1.0, 2.0]),
    far=st.sampled_from([0, 1e4, -1e4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_energy_and_its_gradient_at_any_source(shape, mask, scale, far, seed):
    """In all arguments; and at 0 the first cumulants, which are the values' mean and their second
    and third central moments. The scale multiplies the scores only, and exp of these may overflow.
    Masked keys may hold anything, and get no gradient. Nothing visible gives −∞, and zeros.

    Of the fourth cumulant, which is no moment, the notebook cumulants_and_physics has the values.
    """
    (zeta, q, k, v), mask = draw(*shape, mask, seed)
    k = k + far * q / (q @ q)
    near = functools.partial(close, rtol=1e-9, atol=1e-9) if far else close
    worst = [np.where(mask[:, None], x, bad) for x, bad in ((k, np.inf), (v, np.nan))]
    f, gradients, cumulants = derivatives(zeta, q, *worst, mask, scale)
    wanted, weights = dense(zeta, q, k, v, mask, scale)
    near(f, wanted)
    of_q, of_k, of_v = scale * weights @ k, scale * np.outer(weights, q), np.outer(weights, zeta)
    for found, wanted in zip(gradients, (weights @ v, of_q, of_k, of_v), strict=True):
        near(found, wanted)
    f_0, p = dense(0 * zeta, q, k, v, mask, scale)
    c = v - p @ v
    moments = f_0, p @ v, (p * c.T) @ c, np.einsum("a,aA,aB,aC->ABC", p, c, c, c)
    for found, wanted in zip(cumulants, moments, strict=True):
        near(found, wanted)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 4, 3)])
def test_causal_energy(shape):
    """And the Hessian: its blocks for two different queries are 0."""
    (_, _, k, v), _ = draw(*shape, seed=2)
    rng = np.random.default_rng(3)
    zeta, q = rng.normal(size=v.shape), rng.normal(size=k.shape)
    rows = zip(zeta, q, np.tri(len(q)), strict=True)  # a query sees the keys up to its own
    f, weights = zip(*(dense(*row, k, v, below, 2) for *row, below in rows), strict=True)

    @jax.jit
    def run(zeta):
        f = functools.partial(causal_energy, scale=2)
        hessian = jax.hessian(f)(zeta, q, k, v)  # (n, dv, n, dv)
        return *jax.value_and_grad(f)(zeta, q, k, v), hessian

    value, gradient, hessian = run(zeta)
    close(value, sum(f))
    close(gradient, np.stack(weights) @ v)
    for i, p in enumerate(weights):
        assert not np.any(np.delete(hessian[i], i, axis=1))
        close(hessian[i, :, i], np.cov(v.T, aweights=p, ddof=0))


def test_attention_from_energy_has_attentions_gradients():
    """For each query of a sentence, by vmap: the first sees no key, and none sees the last three,
    which may hold anything."""
    arrays = q, k, v = attentions.draw(11, b=1, l=5, n=7, h=1, h_kv=1, dv=3)
    w = np.random.default_rng(11).normal(size=(1, 5, 1, 3))
    seen = np.tri(5, 7, -1, dtype=bool)

    def rows(q, k, v):
        q, k, v = (x[0, :, 0] for x in (q, k, v))
        one = jax.vmap(lambda q, mask: attention_from_energy(q, k, v, mask=mask))
        return one(q, seen)[None, :, None]

    worst = [np.where(seen.any(axis=0)[:, None, None], x, np.nan) for x in (k, v)]
    out, gradients = attentions.results(rows, q, *worst, w, 0.0, {})
    attentions.check(out, *arrays, mask=seen[None, None])
    attentions.check_gradients(gradients, *arrays, w, mask=seen[None, None])


def test_no_queries_and_no_keys():
    k = v = np.zeros((0, 3))
    assert causal_energy(v, k, k, v) == 0


@pytest.mark.parametrize("s", [[-np.inf] * 3, [0.5, -np.inf, 1.5]], ids=["no keys", "two keys"])
def test_hidden_scores_have_no_derivative(s):
    """Of log-sum-exp itself: with a mask in front of it, the mask would hide a NaN."""
    p = np.exp(s) / max(sum(np.exp(s)), 1e-300)
    close(jax.jit(jax.grad(log_sum_exp))(np.array(s)), p)
    close(jax.jit(jax.hessian(log_sum_exp))(np.array(s)), np.diag(p) - np.outer(p, p))


def test_a_score_out_of_range_takes_all_the_weight():
    q, k, v = np.full(2, 1e30), np.full((3, 2), 1e30), np.array([[1, 2], [3, 4], [5, 6]])
    k[1:] *= -1
    close(attention(*(x.astype("float32") for x in (q, k, v))), [1, 2])


@pytest.mark.parametrize("dtype, sums", [("bfloat16", "float32"), ("float64", "float64")])
def test_sums_are_in_float32_or_wider(dtype, sums):
    (zeta, *arrays), _ = draw(40, 8, 4, seed=6, dtype=jnp.dtype(dtype))
    for f in (energy(zeta, *arrays), cumulant(0, *arrays)):
        assert f.dtype == sums
    out = attention(*arrays)
    assert out.dtype == dtype
    wide = [x.astype("float64") for x in (0 * zeta, *arrays)]
    miss = np.abs(out.astype("float64") - dense(*wide)[1] @ wide[-1]).max()
    assert miss < 3 * jnp.finfo(dtype).eps


def test_gamma_has_a_saddle_at_attention(unchecked):
    """Its Hessian is [[−C, I], [I, 0]], C the covariance: as many directions down as up."""
    (_, q, k, v), mask = draw(12, 4, 3, 0.5, 12)

    def gamma(x):
        return log_likelihood(x[:3], x[3:], q, k, v, mask=mask.tolist())

    @jax.jit
    def run(x):
        return gamma(x), jax.grad(gamma)(x), jax.hessian(gamma)(x)

    zeta, z, zero = np.arange(3.0), np.array([1.0, -2.0, 0.5]), np.zeros(3)
    close(run(np.append(zeta, z))[0], z @ zeta - dense(zeta, q, k, v, mask)[0])
    f, p = dense(zero, q, k, v, mask)
    value, gradient, hessian = run(np.append(zero, p @ v))
    eye = np.eye(3)
    close(value, -f)
    close(gradient, np.zeros(6))
    close(hessian, np.block([[-np.cov(v.T, aweights=p, ddof=0), eye], [eye, 0 * eye]]))
