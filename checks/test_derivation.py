"""02's task: the check names the mistakes in a reader's line 22, and draws them."""

import numpy as np
import pytest

from course import derivation, solutions
from treeattn import log_likelihood

RNG = np.random.default_rng(3)
ZETA, Z, SCORES, VALUES = (RNG.normal(size=size) for size in (2, 2, 7, (7, 2)))


def weights(scores):
    return np.exp(scores) / np.exp(scores).sum()


def too_early(zeta, z, scores, values):
    return z - weights(scores) @ values


def added(zeta, z, scores, values):
    return z + weights(scores + values @ zeta) @ values


def unnormalized(zeta, z, scores, values):
    return z - np.exp(scores + values @ zeta) @ values


def a_number(zeta, z, scores, values):
    return z @ zeta - np.log(np.exp(scores + values @ zeta).sum())


def not_summed(zeta, z, scores, values):
    return z - weights(scores + values @ zeta)[:, None] * values


def transposed(zeta, z, scores, values):
    return z - weights(scores + values.T @ zeta) @ values


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        (lambda zeta, z, scores, values: z, "∂F/∂ζ is missing"),
        (added, "F was added"),
        (too_early, "ζ was set to 0 too early"),
        (unnormalized, "do not add up to one"),
        (a_number, "this is Γ, not its slope"),
        (not_summed, "the sum over the keys is missing"),
        (transposed, "ValueError"),
        (lambda zeta, z, scores, values: None, "None"),
        (lambda zeta, z, scores, values: z * np.nan, "NaN"),
        (lambda zeta, z, scores, values: z - 1, "wrong by up to"),
    ],
)
def test_a_mistake_is_named(mine, says):
    found = derivation.check_derivation(mine)
    assert not found.right and says in str(found)


def test_every_name_is_of_its_own_result():
    made = list(derivation.known(ZETA, Z, SCORES, VALUES).values())
    for i, one in enumerate(made):
        for other in made[:i]:
            assert np.shape(one) != np.shape(other) or not np.allclose(one, other, atol=1e-3)


def test_the_solution_is_the_slope_of_the_packages_log_likelihood():
    assert derivation.check_derivation(solutions.line_22).right
    q, k = np.ones(1), SCORES[:, None]
    step = 1e-4 * np.eye(2)
    up, down = (
        [log_likelihood(ZETA + sign * h, Z, q, k, VALUES, scale=1.0) for h in step]
        for sign in (1, -1)
    )
    slope = (np.array(up) - np.array(down)) / 2e-4
    np.testing.assert_allclose(solutions.line_22(ZETA, Z, SCORES, VALUES), slope, atol=1e-6)


@pytest.mark.parametrize("mine", [too_early, solutions.line_22])
def test_the_picture_shows_both_crosses(mine):
    found = derivation.check_derivation(mine)
    figure = found.draw(found.sentence)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert "right: mass 16, at (2.5, 1.25)" in labels
    place = "(1.25, 2.25)" if mine is too_early else "(2.5, 1.25)"
    assert f"yours: mass 16, at {place}" in labels and len(figure.alt) > 40
