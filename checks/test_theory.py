"""What notebook 02 states and no cell proves, beside a broken variant; the papers' Theorem 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp
from calls import count_merges, scalar_states

from treeattn import energy, log_likelihood, reduce_chain, reduce_tree

t = sp.Symbol("t", real=True)


def test_gamma_is_unbounded_and_has_no_integral():
    """2024 eq. 26, 2025 eq. 34: z = tζ leads up and down without an end, for every source but 0."""
    squared, energy_there = sp.Symbol("squared", positive=True), sp.Symbol("F", real=True)
    gamma = t * squared - energy_there
    rng, zeta = np.random.default_rng(0), np.array([0.5, -1.0])
    sentence = rng.normal(size=4), rng.normal(size=(5, 4)), rng.normal(size=(5, 2))
    for far in (-1e6, 3.0, 1e6):
        found = log_likelihood(zeta, far * zeta, *sentence)
        np.testing.assert_allclose(found, far * 1.25 - energy(zeta, *sentence))
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
    assert sp.expand(sp.discriminant(polynomial, root) - (c - 2) * (c + 2)) == 0
    assert sorted(map(sp.re, sp.roots(polynomial.subs(c, 3), root)))[-1] < 0


def test_the_flow_comes_nearer_from_everywhere_and_long_steps_do_not_settle():
    """2024 §4.2, 2025 C.2, up in ζ and down in z; the slope of F is any increasing function."""
    zeta, z, slope, arrival = sp.symbols("zeta z slope arrival", real=True)
    moves = {zeta: z - slope, z: -zeta}
    squared = zeta**2 + (z - arrival) ** 2
    rate = sum(sp.diff(squared, x) * move for x, move in moves.items())
    assert sp.expand(rate + 2 * zeta * (slope - arrival)) == 0
    # Near the saddle a step of h is this matrix. Its determinant is the product of its eigenvalues,
    # so one of them is more than one in size if h is more than the variance c.
    c, h = sp.symbols("c h", positive=True)
    step = sp.eye(2) + h * sp.Matrix([[-c, 1], [-1, 0]])
    assert sp.expand(step.det() - (1 + h * (h - c))) == 0


def test_gibbs_inequality():
    """KL is Σ w (r − 1 − log r) with r = P/w: no term is negative, and all are 0 for w = P only."""
    ratio, w = sp.symbols("r w", positive=True)
    slack = ratio - 1 - sp.log(ratio)
    assert slack.subs(ratio, 1) == 0 and sp.solve(sp.diff(slack, ratio), ratio) == [1]
    assert sp.diff(slack, ratio, 2).is_positive
    p = ratio * w
    divergence = w * sp.log(w / p) + p - w  # P and w add up to one each
    assert sp.simplify(divergence - w * slack) == 0
    assert sp.simplify(divergence + w * slack) != 0


@pytest.mark.parametrize(
    ("n", "p", "steps"),
    [(16, 1, 15), (64, 64, 6), (120, 5, 26), (4, 3, 2), (10, 3, 5), (7, 4, 3), (12, 5, 4)],
)
def test_theorem_1(n, p, steps):
    """n keys on p processors: n/p − 1 merges in a chain, then ⌈log₂ p⌉ rounds of the tree.

    Where p does not divide n, ⌈n/p⌉ − 1 + ⌈log₂ p⌉, or fewer where chunks of ⌈n/p⌉ leave a
    processor idle, as those of 4 and of 12 keys do.
    """
    size = -(-n // p)

    def reduce(states):
        parts = [
            reduce_chain(jax.tree.map(lambda x, i=i: x[i : i + size], states))
            for i in range(0, n, size)
        ]
        return reduce_tree(jax.tree.map(lambda *x: jnp.stack(x), *parts))

    assert count_merges(reduce, scalar_states(n)) == (n - 1, steps)
