"""What notebooks 01 and 02 state, proved beside a variant that is broken and must fail.

For any number of keys, by sums over a symbolic range, and values of any size: along a line ζ = t·u
a value v_a is the number x_a = u·v_a. The notebooks prove more, and their outputs are compared.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp

from treeattn import energy, log_likelihood

n = sp.Symbol("n", integer=True, positive=True)
a = sp.Symbol("a", integer=True)
t = sp.Symbol("t", real=True)
s, x = (sp.IndexedBase(name, real=True) for name in ("s", "x"))
w, p = (sp.IndexedBase(name, positive=True) for name in ("w", "p"))


def over_keys(term):
    return sp.Sum(term, (a, 1, n))


Z = over_keys(sp.exp(s[a] + t * x[a]))
F = sp.log(Z)


def same(left, right) -> bool:
    return sp.expand(left - right) == 0


def vanishes(f) -> bool:
    """With the logarithms of products taken apart."""
    return sp.expand(sp.expand_log(sp.expand(f), force=True)) == 0


def tilted(f):
    """⟨f⟩ under weights proportional to exp(s_a + t x_a)."""
    return over_keys(sp.exp(s[a] + t * x[a]) * f) / Z


def mean(f):
    return tilted(f).subs(t, 0)


def test_attention_is_the_gradient_at_zero_and_biased_attention_everywhere():
    total = sp.Symbol("total")  # of the exponentials
    weights = over_keys(sp.exp(s[a]) / total).simplify()
    assert same(weights.subs(total, over_keys(sp.exp(s[a]))), 1)
    assert not same(weights.subs(total, over_keys(sp.exp(2 * s[a]))), 1)
    assert same(sp.diff(F, t).subs(t, 0), mean(x[a]))
    assert not same(sp.diff(Z, t).subs(t, 0), mean(x[a]))
    for other in (F + t**2, F + sp.cosh(t), t * mean(x[a])):  # 2024 §7, "a unique energy"
        assert same(sp.diff(other, t).subs(t, 0), mean(x[a]))
        assert not same(sp.diff(other, t), tilted(x[a]))
    assert same(sp.diff(F, t), tilted(x[a]))


def test_z_generates_moments_of_every_order():  # 2024 eq. 10–13, 2025 eq. 19–22
    m = sp.Symbol("m", integer=True, nonnegative=True)

    def raised(power):
        return over_keys(x[a] ** power * sp.exp(s[a] + t * x[a]))

    assert raised(0) == Z
    assert sp.simplify(sp.diff(raised(m), t) - raised(m + 1)) == 0
    assert sp.simplify(sp.diff(raised(m), t) - raised(m)) != 0
    for order in range(5):
        coefficient = (sp.diff(Z, t, order) / Z).subs(t, 0) / sp.factorial(order)
        assert same(coefficient, mean(x[a] ** order) / sp.factorial(order))
        assert same(coefficient, mean(x[a] ** order)) == (order < 2)  # no factorials: broken


def test_the_energy_is_minus_the_helmholtz_free_energy():
    """U − T S = −T log Z, term by term, the weights being exp(−E/T) / Z."""
    T, z, E = *sp.symbols("T Z", positive=True), sp.Symbol("E", real=True)
    weight = sp.exp(-E / T) / z
    term = weight * E + T * weight * sp.log(weight)
    assert vanishes(term + T * sp.log(z) * weight)
    assert not vanishes(term - T * sp.log(z) * weight)


def test_gamma_is_unbounded_and_has_no_integral(sentence):
    """2024 eq. 26, 2025 eq. 34: z = tζ leads up and down without an end, for every source but 0."""
    squared, energy_there = sp.Symbol("squared", positive=True), sp.Symbol("F", real=True)
    gamma = t * squared - energy_there
    zeta = np.array([0.5, -1.0])
    for far in (-1e6, 3.0, 1e6):
        found = log_likelihood(zeta, far * zeta, *sentence, scale=1.0)
        np.testing.assert_allclose(found, far * 1.25 - energy(zeta, *sentence, scale=1.0))
    assert sp.limit(gamma, t, sp.oo) == sp.oo and sp.limit(gamma, t, -sp.oo) == -sp.oo
    # Along that line nothing can be normalized; a weight of the keys, which is bounded, can.
    for sign in (1, -1):
        assert sp.integrate(sp.exp(sign * gamma), (t, -sp.oo, sp.oo)) == sp.oo
    assert sp.integrate(sp.exp(-(t**2) * squared), (t, -sp.oo, sp.oo)).is_finite


def test_one_flow_arrives_and_spirals_where_the_variance_is_below_two():
    """Near the saddle; the two others have a direction in and a direction out."""
    c, root = sp.Symbol("c", nonnegative=True), sp.Symbol("lambda")
    for matrix in (sp.Matrix([[c, -1], [-1, 0]]), sp.Matrix([[-c, 1], [1, 0]])):
        assert matrix.det() == -1  # one root above zero, one below
    polynomial = sp.Matrix([[-c, 1], [-1, 0]]).charpoly(root).as_expr()
    assert same(sp.discriminant(polynomial, root), (c - 2) * (c + 2))
    assert sorted(map(sp.re, sp.roots(polynomial.subs(c, 3), root)))[-1] < 0


def test_gibbs_inequality():
    """KL = Σ w (r − 1 − log r) + 1 − Σ P with r = P/w: none negative, all 0 for w = P only."""
    ratio = sp.Symbol("r", positive=True)
    slack = ratio - 1 - sp.log(ratio)
    assert slack.subs(ratio, 1) == 0 and sp.solve(sp.diff(slack, ratio), ratio) == [1]
    assert sp.diff(slack, ratio, 2).is_positive
    term = w[a] * slack.subs(ratio, p[a] / w[a])
    assert vanishes(term + w[a] - p[a] - w[a] * sp.log(w[a] / p[a]))
    assert not vanishes(term - w[a] * sp.log(w[a] / p[a]))


# The sentence of five words

WEIGHTS = np.array([1, 2, 4, 1, 8]) / 16
VALUES = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 4.0], [1.0, 3.0]])


@pytest.fixture(scope="module")
def sentence():
    return np.ones(1), np.log(16 * WEIGHTS)[:, None], VALUES


def test_the_dual_of_five_words(sentence):
    """At a corner a supremum that is not attained, −score; lowest at attention alone."""

    @jax.jit
    @jax.vmap
    def gamma(zeta, z):
        return log_likelihood(zeta, z, *sentence, scale=1.0)

    outwards = np.array([-1.0, 2.0])  # where the last word lies furthest
    along = gamma(np.array([1, 2, 4, 8])[:, None] * outwards, np.tile(VALUES[4], (4, 1)))
    assert np.all(np.diff(along) > 0) and np.all(along < -np.log(8))
    np.testing.assert_allclose(along[-1], -np.log(8), atol=1e-3)

    rng = np.random.default_rng(0)
    zeta = rng.normal(size=(100, 2))
    terms = 16 * WEIGHTS * np.exp(zeta @ VALUES.T)
    tilt = terms / terms.sum(axis=1, keepdims=True)
    dual = gamma(zeta, tilt @ VALUES)  # there the source is the best one
    divergence = np.sum(tilt * np.log(tilt / WEIGHTS), axis=1)
    np.testing.assert_allclose(dual, divergence - np.log(16), rtol=1e-12)
    assert np.all(dual > -np.log(16))
    lowest = gamma(jnp.zeros((1, 2)), (WEIGHTS @ VALUES)[None])[0]
    np.testing.assert_allclose(lowest, -np.log(16), rtol=1e-12)
