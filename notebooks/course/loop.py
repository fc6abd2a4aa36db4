"""03's task: attention by one loop over the keys, which carries (m, d, n)."""

from functools import partial

import numpy as np

from course.plane import PLACES, SCORES, located, plane
from course.verdict import Mistake, call, verdict

GIVEN = "q (dim,), k (keys, dim), v (keys, 2)"


def asked(mine, q, k, v) -> np.ndarray:
    found = call(mine, q, k, v, given=GIVEN)
    if isinstance(found, (tuple, list)) or np.shape(found) != (2,):
        raise Mistake("return n / d alone, of shape (2,)")
    return np.asarray(found, np.float64)


def loop(s, v, *, keep_d=False, keep_n=False, old=lambda m, larger: np.exp(m - larger),
         new=lambda s, m, larger: np.exp(s - larger), finish=lambda n, d: n / d):  # fmt: skip
    """The loop with one of its steps replaced."""
    m, d, n = -np.inf, 0.0, np.zeros(2)
    for score, value in zip(s, v, strict=True):
        larger = max(m, score)
        scale, weight = (0.0 if m == -np.inf else old(m, larger)), new(score, m, larger)
        d = d * (1 if keep_d else scale) + weight
        n = n * (1 if keep_n else scale) + weight * value
        m = larger
    return finish(n, d)


def known(s, v) -> dict:
    """The mistake -> what a loop that makes it returns."""
    kept = {"keep_d": True, "keep_n": True}
    weights = np.exp(s - s.max())
    return {
        "n was not divided by d": loop(s, v, finish=lambda n, d: n),
        "n was not rescaled": loop(s, v, keep_n=True),
        "d was not rescaled": loop(s, v, keep_d=True),
        "neither d nor n was rescaled": loop(s, v, **kept),
        "the old sums were rescaled upside down: by exp(larger − m)": loop(
            s, v, old=lambda m, larger: np.exp(larger - m)
        ),
        "the new key has weight 1: its weight is exp(score − larger m)": loop(
            s, v, new=lambda *_: 1.0
        ),
        "the new key's weight is upside down": loop(
            s, v, new=lambda s, m, larger: np.exp(larger - s)
        ),
        "the first key is left out": loop(s[1:], v[1:]),
        "the last key is left out": loop(s[:-1], v[:-1]),
        "all keys weigh the same": v.mean(0),
        "the weights are the scores themselves, not their exponentials": s @ v / s.sum(),
        "the weights are powers of 2": loop(s * np.log(2), v),
        "it was divided by the number of keys, not by d": loop(
            s, v, finish=lambda n, d: n / len(s)
        ),
        "d was divided by n": loop(s, v, finish=lambda n, d: d / n),
        "the values were added without weights": v.sum(0) / weights.sum(),
        "this is the value of the largest score": v[s.argmax()],
        "scores were divided by the root of the size: here the scale is 1": loop(s / 2, v),
    }


@verdict
def check_loop(mine):
    """The mistake of a loop over keys that explains what it returns."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=4), rng.normal(size=(10, 4)), rng.normal(size=(10, 2))
    order = np.argsort(k @ q)[[4, 2, 7, 0, 5, 1, 8, 6, 3, 9]]  # the largest score comes last
    k, v = k[order], v[order]
    s = k @ q
    found, right = asked(mine, q, k, v), loop(s, v)
    words = asked(mine, np.ones(1), SCORES[:, None].astype(float), PLACES.astype(float))
    mass = np.exp(SCORES).sum()
    drawn = partial(
        plane, right=located(mass, mass * np.array([1.25, 2.25])), yours=located(mass, mass * words)
    )
    if not np.allclose(found, right):
        names = (name for name, value in known(s, v).items() if np.allclose(found, value))
        raise Mistake(
            next(names, "another mistake: neither a sum nor a rescaling forgotten"), drawn
        )
    if not np.allclose(words, [1.25, 2.25]):
        raise Mistake("right for one order of the keys, wrong for another", drawn)
    for scale in (1000, -1000):
        huge = asked(mine, scale * q, k, v)
        if not np.isfinite(huge).all():
            raise Mistake(
                "large scores overflow: subtract the largest score so far before exp", drawn
            )
    below = asked(mine, np.array([*q, 1.0]), np.c_[k, np.full(10, -1000.0)], v)
    if not np.allclose(below, right):
        raise Mistake("scores far below 0 underflow: m starts at −∞, not at 0", drawn)
    return drawn
