"""02's task: line 22 of the MAP derivation, the slope of Γ in ζ, for one query."""

from functools import partial

import numpy as np

from course.plane import PLACES, SCORES, plane
from course.verdict import Mistake, call, verdict

GIVEN = "zeta and z (D,), scores (keys,), values (keys, D)"
SOURCE = np.log(2) / 2 * np.array([1.0, -1.0])  # makes the words' masses 1, 8, 2, 1, 4


def softmax(x) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def known(zeta, z, s, v) -> dict:
    """The mistake -> what a line that makes it returns."""
    tilted = s + v @ zeta
    mean, log_sum = softmax(tilted) @ v, np.log(np.exp(tilted).sum())
    sum_over_words = v.T * softmax(tilted)  # not yet summed
    return {
        "∂F/∂ζ is missing: Γ is z·ζ − F(ζ), and both parts have a slope": z,
        "z is missing: the slope of z·ζ in ζ is z": -mean,
        "this is ∂F/∂ζ alone: Γ is z·ζ − F(ζ)": mean,
        "F was added: Γ takes F away": z + mean,
        "all signs are turned: Γ is z·ζ − F(ζ), and this is the slope of −Γ": mean - z,
        "ζ was set to 0 too early: in this line the weights hold ζ·v": z - softmax(s) @ v,
        "this is attention, line 25: line 22 holds for every ζ and z": softmax(s) @ v,
        "this is line 23, the slope in z": zeta,
        "the weights do not add up to one: divide by their sum": z - np.exp(tilted) @ v,
        "F itself was taken away, not its slope": z - log_sum,
        "the slope of z·ζ in ζ is z, without ζ": z * zeta - mean,
        "ζ stands where z should: the slope of z·ζ in ζ is z": zeta - mean,
        "the coordinates were added up: the slope has a number for each": (z - mean).sum(),
        "this is Γ, not its slope": z @ zeta - log_sum,
        "the slope of F is there once for each coordinate, as the bracket of 2024 eq. 21 has it": z
        - len(z) * mean,
        "the scores are missing from the weights": z - softmax(v @ zeta) @ v,
        "the source is counted twice": z - softmax(s + 2 * v @ zeta) @ v,
        "the source has the wrong sign: the exponent is s + ζ·v": z - softmax(s - v @ zeta) @ v,
        "all values weigh the same: weigh them by exp(s + ζ·v)": z - v.mean(0),
        "the values were added without weights": z - v.sum(0),
        "this takes the value of the largest score, not the mean": z - v[tilted.argmax()],
        "the sum over the keys is missing": z - sum_over_words.T,
        "the mean of the keys' terms was taken, not their sum": z - mean / len(s),
    }


def asked(mine, *arguments) -> np.ndarray:
    made = call(mine, *arguments, given=GIVEN)
    try:
        return np.asarray(made, np.float64)
    except (TypeError, ValueError):
        raise Mistake(f"it returned {type(made).__name__}, expected an array (D,)") from None


def picture(mine):
    """What draws the z for which the line vanishes; None if it is no point of the plane."""
    z = np.zeros(2)
    try:
        place = z - asked(mine, SOURCE, z, SCORES.astype(float), PLACES.astype(float))
    except Mistake:
        return None
    if place.shape != (2,):
        return None
    masses = np.exp(SCORES + PLACES @ SOURCE).round(6)
    right = masses @ PLACES / masses.sum()
    return partial(plane, masses=masses, right=(16, right), yours=(16, place))


@verdict
def check_derivation(mine):
    """The mistake that explains what a reader's line 22 gives for random keys."""
    rng = np.random.default_rng(0)
    for keys, size in ((6, 3), (4, 5)):
        zeta, z, s = rng.normal(size=size), rng.normal(size=size), rng.normal(size=keys)
        v = rng.normal(size=(keys, size))
        right = z - softmax(s + v @ zeta) @ v
        made = asked(mine, zeta, z, s, v)
        if made.shape == right.shape and np.allclose(made, right, rtol=1e-4, atol=1e-5):
            continue
        drawn = picture(mine)
        for name, wrong in known(zeta, z, s, v).items():
            if made.shape == np.shape(wrong) and np.allclose(made, wrong, rtol=1e-4, atol=1e-5):
                raise Mistake(name, drawn)
        if not np.isfinite(made).all():
            raise Mistake("it gives NaN or ∞: a logarithm of a negative number, or 0 / 0?", drawn)
        if made.shape != right.shape:
            raise Mistake(f"the shape is {made.shape}, expected {right.shape}", drawn)
        raise Mistake(f"wrong by up to {abs(made - right).max():.2g}", drawn)
    return picture(mine)
