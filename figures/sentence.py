"""The sentence of five words that notebooks 01 to 05 share, for figures to draw."""

import numpy as np

WORDS = ("the", "cat", "drank", "warm", "milk")
WEIGHTS = (1, 2, 4, 1, 8)  # the exponentials of the scores: sixteenths, as attention weights
VALUES = ((0, 0), (4, 0), (0, 2), (4, 4), (1, 3))


def running_example() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q (1,), k (5, 1), v (5, 2)) in float32; the scale is 1, so that a key is its score."""
    scores = np.log(np.array(WEIGHTS, "float32"))
    return np.ones(1, "float32"), scores[:, None], np.array(VALUES, "float32")


def convex_hull(points: np.ndarray) -> np.ndarray:
    """The corners of the points' convex hull, in turn: gift wrapping."""
    hull = []
    here = min(range(len(points)), key=lambda a: tuple(points[a]))
    while here not in hull:
        hull.append(here)
        ahead = (here + 1) % len(points)
        for other in range(len(points)):
            x = points[ahead] - points[here]
            y = points[other] - points[here]
            if x[0] * y[1] - x[1] * y[0] < 0:
                ahead = other
        here = ahead
    return points[hull]
