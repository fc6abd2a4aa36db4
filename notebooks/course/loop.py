"""03's task: attention by one loop over the keys, which carries (m, d, n)."""

from functools import partial

import numpy as np

from course.plane import PLACES, SCORES, plane
from course.verdict import FEW_DIGITS, Mistake, call, verdict


def asked(mine, q, k, v) -> np.ndarray:
    found = call(mine, q, k, v, given=f"q {q.shape}, k {k.shape}, v {v.shape}")
    try:
        found = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        found = None
    if np.shape(found) != (2,):
        raise Mistake("return n / d alone, of shape (2,)")
    return found


def known(s, v) -> dict:
    """The mistake -> what a loop that makes it returns, if the largest score comes last."""
    top = np.maximum.accumulate(s)  # m after each key
    before, end, first = np.r_[top[0], top[:-1]], top[-1], np.arange(len(s)) == 0
    new, right = np.exp(s - top), np.exp(s - end)  # a key's weight in its step, and in the end
    d, n = np.exp(end - top) * right.cumsum(), right @ v
    weights = {
        "right": right,
        "neither d nor n was rescaled": new,
        "the old sums were rescaled upside down: by exp(larger − m)": new * np.exp(end - top),
        "the new key has weight 1: its weight is exp(score − larger m)": np.exp(top - end),
        "the new key's weight is upside down": np.exp(2 * top - s - end),
        "the new key's weight is exp(score − old m): take the larger": right * np.exp(top - before),
        "the new key was rescaled, too": right * np.exp(before - top),
        "the first key is left out": right * ~first,
        "the last key is left out": right * ~first[::-1],
        "the first key counts twice": right * (1 + first),
        "all keys weigh the same": np.ones(len(s)),
        "the weights are the scores themselves, not their exponentials": s,
        "the weights are powers of 2": 2**s,
        "only one key counts: the last, which has the largest score here": s == end,
        "scores were divided by the root of the size: here the scale is 1": np.exp(s / 2),
    }
    quotients = {
        "n was not divided by d": (n, 1),
        "n was not rescaled": (new @ v, d[-1]),
        "d was not rescaled": (n, new.sum()),
        "n was divided by d in every step: divide once, after the loop": (
            right / d[::-1].cumprod()[::-1] @ v,
            1,
        ),
        "d starts at 1: it starts at 0, with no key": (n, d[-1] + np.exp(-end)),
        "it was divided by the number of keys, not by d": (n, len(s)),
        "d was divided by n": (d[-1], n),
        "the values were added without weights": (v.sum(0), d[-1]),
        "this is the five words' answer, whatever the keys": (np.array([1.25, 2.25]), 1),
    }
    return {x: y @ v / y.sum() for x, y in weights.items()} | {
        x: y / z for x, (y, z) in quotients.items()
    }


@verdict
def check_loop(mine):
    """The mistake of a loop over keys that explains what it returns."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=4), rng.normal(size=(10, 4)), rng.normal(size=(10, 2))
    order = np.argsort(k @ q)[[4, 2, 7, 0, 5, 1, 8, 6, 3, 9]]  # the largest score comes last
    k, v = k[order], v[order]
    found, answers = asked(mine, q, k, v), known(k @ q, v)
    right = answers.pop("right")
    words = asked(mine, np.ones(1), SCORES[:, None].astype(float), PLACES.astype(float))
    drawn = partial(plane, right=(None, np.array([1.25, 2.25])), yours=(None, words))
    shown = None if np.allclose(words, [1.25, 2.25]) else drawn  # two equal crosses say nothing
    if np.isnan(found).all():
        raise Mistake(
            "NaN: m begins at −∞, so that exp(m − larger) is 0, but exp(larger − m) and "
            "exp(score − m) are ∞"
        )
    if not np.allclose(found, right):
        names = (name for name, value in answers.items() if np.allclose(found, value))
        few = np.allclose(found, right, rtol=0.02, atol=0.01)
        other = FEW_DIGITS if few else "another mistake: neither a sum nor a rescaling forgotten"
        raise Mistake(next(names, other), shown)
    if not np.allclose(words, [1.25, 2.25]):
        raise Mistake("right for one order of the keys, wrong for another", drawn)
    for scale in (1000, -1000):
        huge = asked(mine, scale * q, k, v)
        if not np.isfinite(huge).all():
            raise Mistake("large scores overflow: subtract the largest score so far before exp")
    below = asked(mine, np.array([*q, 1.0]), np.c_[k, np.full(10, -1000.0)], v)
    if not np.allclose(below, right, rtol=1e-3):
        raise Mistake("scores far below 0 underflow: m starts at −∞, not at 0")
    return drawn
