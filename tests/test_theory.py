"""The proofs of notebooks 01 and 02, each beside a variant that is broken and must fail.

For any number of keys and heads (sums over a symbolic range) and values of any size: along a line
ζ = t·u a value v_a is the number x_a = u·v_a, and matrices have symbolic sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp

from treeattn import cumulant, energy, log_likelihood

n, N, H = sp.symbols("n N H", integer=True, positive=True)
a, b, h, i, j = sp.symbols("a b h i j", integer=True)
s, x, y, tau = (sp.IndexedBase(name, real=True) for name in ("s", "x", "y", "tau"))
w, p = (sp.IndexedBase(name, positive=True) for name in ("w", "p"))
t, r = sp.symbols("t r", real=True)


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


def central(order):
    powers = [mean(x[a] ** i) * (-mean(x[a])) ** (order - i) for i in range(order + 1)]
    return sum(sp.binomial(order, i) * power for i, power in enumerate(powers))


def test_softmax_is_the_gradient_of_log_sum_exp():  # 2024 eq. 1, 2025 eq. 4
    slope = sp.diff(sp.log(over_keys(sp.exp(s[a]))), s[j]).doit()
    for key, inside in ((2, True), (5, False)):
        wanted = sp.exp(s[key]) / sum(sp.exp(s[i]) for i in range(1, 4)) if inside else 0
        assert sp.simplify(slope.subs({n: 3, j: key}).doit() - wanted) == 0


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


def test_its_logarithm_generates_cumulants():  # 2024 eq. 14–15, 2025 eq. 23–24
    # By definition cumulants of every order are the derivatives at 0 of log ⟨exp(t x)⟩.
    generating = sp.log(mean(sp.exp(r * x[a])).subs(r, t))
    assert same(sp.exp(F - F.subs(t, 0)), sp.exp(generating))
    assert not same(sp.exp(F), sp.exp(generating))  # the constant, lse, is no cumulant's
    kappa = {order: sp.diff(F, t, order).subs(t, 0) for order in (2, 3, 4)}
    for order in (2, 3):
        assert same(kappa[order], central(order))
        assert not same(kappa[order], mean(x[a] ** order))
    assert same(kappa[4], central(4) - 3 * central(2) ** 2) and not same(kappa[4], central(4))
    mixed = sp.diff(sp.log(over_keys(sp.exp(s[a] + t * x[a] + r * y[a]))), t, r)
    mixed = mixed.subs({t: 0, r: 0})
    assert same(mixed, mean(x[a] * y[a]) - mean(x[a]) * mean(y[a]))
    assert not same(mixed, mean(x[a] * y[a]))
    variance = tilted(x[a] ** 2) - tilted(x[a]) ** 2
    assert same(sp.diff(F, t, 2), variance) and not same(sp.diff(F, t, 2), variance.subs(t, 0))


def test_the_energy_is_minus_the_helmholtz_free_energy():
    """U − T S = −T log Z, term by term, the weights being exp(−E/T) / Z."""
    T, E, z = (
        sp.Symbol("T", positive=True),
        sp.Symbol("E", real=True),
        sp.Symbol("Z", positive=True),
    )
    weight = sp.exp(-E / T) / z
    term = weight * E + T * weight * sp.log(weight)
    assert vanishes(term + T * sp.log(z) * weight)
    assert not vanishes(term - T * sp.log(z) * weight)


def causal(source):
    return sp.Sum(sp.log(sp.Sum(sp.exp(s[i, a] + source * x[a]), (a, 1, i))), (i, 1, N))


def test_causal_attention_is_the_gradient_of_f_tot():  # 2024 eq. 16–17, 2025 eq. 25–26
    row = sp.diff(causal(tau[i]), tau[j]).doit().args[0][0]  # 1 ≤ j ≤ N
    terms = sp.exp(s[j, a])
    assert same(row.subs(tau[j], 0), sp.Sum(terms * x[a], (a, 1, j)) / sp.Sum(terms, (a, 1, j)))
    assert sp.diff(row, tau[h]).subs(sp.KroneckerDelta(h, j), 0).doit() == 0

    def second_of_three(f):
        f = sp.diff(f.subs(N, 3).doit(), tau[2]).subs({tau[k]: 0 for k in (1, 2, 3)})
        f = f.subs({s[k, m]: 0 for k in (1, 2, 3) for m in (1, 2, 3)})
        return f.subs({x[k]: k for k in (1, 2, 3)})

    assert second_of_three(causal(tau[i])) == sp.Rational(3, 2)
    assert second_of_three(causal(tau[a])) == sp.Rational(5, 3)  # 2024 eq. 36: its own misprint


def test_heads_add_up_for_a_shared_source_only():  # 2024 eq. 18–20, 2025 eq. 27–29
    def block(source):
        return sp.Sum(sp.log(over_keys(sp.exp(s[h, a] + source * x[h, a]))), (h, 1, H))

    head = over_keys(sp.exp(s[h, a]) * x[h, a]) / over_keys(sp.exp(s[h, a]))
    shared = sp.diff(block(t), t).subs(t, 0)
    own = sp.diff(block(tau[h]), tau[j]).doit().args[0][0].subs(tau[j], 0)
    assert same(shared, sp.Sum(head, (h, 1, H))) and same(own, head.subs(h, j))
    two = {H: 2, n: 1, j: 1}
    assert not same(own.subs(two).doit(), shared.subs(two).doit())


# Γ


def test_gamma_has_one_stationary_point_for_any_differentiable_f():  # 2024 eq. 22–24, 2025 31–32
    """Slopes of Γ along any η: η·ζ in z, and in ζ η·z less the slope of F, which may be any."""
    size = sp.Symbol("D", integer=True, positive=True)
    z, zeta, eta = (sp.IndexedBase(name, real=True) for name in ("z", "zeta", "eta"))
    f = sp.Function("F")(t)  # F(ζ + tη)

    def dot(left, right):
        return sp.Sum(left * right, (a, 1, size))

    in_z = sp.diff(dot(z[a] + t * eta[a], zeta[a]) - sp.Symbol("F"), t)
    assert same(in_z, dot(eta[a], zeta[a]))
    in_zeta = sp.diff(dot(z[a], zeta[a] + t * eta[a]) - f, t)
    assert same(in_zeta, dot(eta[a], z[a]) - sp.diff(f, t))
    assert not same(in_zeta, dot(eta[a], z[a]) + sp.diff(f, t))  # that is Γ with + F


def test_every_hessian_of_gamma_is_indefinite():  # 2024 eq. 26, 2025 eq. 34
    """wᵀ ∇²Γ w = ±2|u|² along w = (u, (C/2 ± I) u): d directions up, d down, for any covariance."""
    d = sp.Symbol("d", integer=True, positive=True)
    M, I, O = sp.MatrixSymbol("M", d, n), sp.Identity(d), sp.ZeroMatrix(d, d)
    C = M * M.T
    hessian = sp.BlockMatrix([[-C, I], [I, O]])

    def along(corner):  # of all u at once
        w = sp.BlockMatrix([[I], [corner]])
        return sp.block_collapse(w.T * hessian * w)

    assert along(C / 2 + I) == 2 * I and along(C / 2 - I) == -2 * I
    assert along(C + I) != 2 * I  # without the half
    inverse = sp.BlockMatrix([[O, I], [I, C]])
    product = sp.block_collapse(hessian * inverse)
    assert product == sp.block_collapse(sp.BlockMatrix([[I, O], [O, I]]))


def test_gamma_is_unbounded_and_has_no_integral(sentence):
    """2024 eq. 26, 2025 eq. 34: z = tζ leads up and down without an end, for every source but 0."""
    squared, energy_there = sp.Symbol("squared", positive=True), sp.Symbol("F", real=True)
    gamma = t * squared - energy_there
    zeta = np.array([0.5, -1.0])
    for far in (-1e6, 3.0, 1e6):
        here = gamma.subs({squared: 1.25, energy_there: energy(zeta, *sentence, scale=1.0), t: far})
        found = log_likelihood(zeta, far * zeta, *sentence, scale=1.0)
        np.testing.assert_allclose(float(found), float(here))
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


def test_the_energy_is_a_variational_free_energy():  # 2024 §7
    """Σ w (s + t x) − Σ w log w = F(t) − KL(w‖P_t), for F = log Z and for no other number."""
    assert sp.exp(F) == Z
    kl = w[a] * (sp.log(w[a]) - (s[a] + t * x[a] - F))
    score_and_entropy = w[a] * (s[a] + t * x[a] - sp.log(w[a]))
    assert vanishes(score_and_entropy - (w[a] * F - kl))
    assert not vanishes(score_and_entropy - (w[a] * 7 - kl))
    at_zero = kl.subs(t, 0) - w[a] * F.subs(t, 0)
    assert vanishes(at_zero - (w[a] * t * x[a] - w[a] * F + kl))


def test_the_energy_is_what_joins_keys_by_logaddexp():
    """A function of sets of keys, s_a + ζ·v_a of one key and logaddexp of two sets, is F."""
    size = sp.Symbol("size", integer=True, positive=True)
    of_all_but_one = sp.log(sp.Sum(sp.exp(s[a] + t * x[a]), (a, 1, size - 1)))
    of_one = s[size] + t * x[size]
    joined = sp.log(sp.exp(of_all_but_one) + sp.exp(of_one))
    one = {size: 1}  # the beginning, and the step from size − 1 keys to size
    assert same(F.subs(n, 1).doit(), sp.log(sp.exp(of_one)).subs(one))
    for keys in (2, 5):
        assert same(sp.exp(F.subs(n, keys).doit()), sp.exp(joined.subs(size, keys).doit()))
        mean_of_both = (of_all_but_one + of_one).subs(size, keys).doit() / 2
        assert not same(sp.exp(F.subs(n, keys).doit()), sp.exp(mean_of_both))


# The sentence of five words

WEIGHTS = np.array([1, 2, 4, 1, 8]) / 16
VALUES = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 4.0], [1.0, 3.0]])


@pytest.fixture(scope="module")
def sentence():
    return np.ones(1), np.log(16 * WEIGHTS)[:, None], VALUES


def test_five_words_by_hand(sentence):
    step = np.log(2) / 2 * np.array([1.0, -1.0])  # terms 1, 8, 2, 1, 4
    run = jax.jit(jax.value_and_grad(lambda zeta: energy(zeta, *sentence, scale=1.0)))
    for zeta, total, attention in ((0 * step, 16, [1.25, 2.25]), (step, 16, [2.5, 1.25])):
        value, gradient = run(zeta)
        np.testing.assert_allclose(value, np.log(total), rtol=1e-12)
        np.testing.assert_allclose(gradient, attention, rtol=1e-12)
    np.testing.assert_allclose(run(2 * step)[1], [134 / 37, 12 / 37], rtol=1e-12)
    covariance = [[1.9375, -0.3125], [-0.3125, 1.4375]]
    np.testing.assert_allclose(cumulant(2, *sentence, scale=1.0), covariance, rtol=1e-12)


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
