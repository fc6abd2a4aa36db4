"""Made-up models of three tokens, and the drafted shapes, for experiments with the rules."""

from fractions import Fraction

import numpy as np

from labs.acceptance.rules import ACCEPTANCE_RULES

# Two models of three tokens that do not depend on the path.
TARGET = np.array([Fraction(n, 10) for n in (5, 3, 2)])
DRAFT = np.array([Fraction(n, 10) for n in (6, 3, 1)])

SHAPES = (
    ("one token", (1,), False),
    ("a chain of three", (1, 1, 1), False),
    ("two siblings", (2,), False),
    ("two, with replacement", (2,), True),
    ("two, then one each", (2, 1), False),
)


class TextModel:
    """A made-up model of three tokens, whose probabilities after any path are small Fractions.

    With `least` of 0, some tokens may have probability 0.
    """

    def __init__(self, seed: int, least: int = 1):
        self.seed, self.least = seed, least
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, path: tuple[int, ...]) -> np.ndarray:
        """(3,) Fractions, the same ones at every call."""
        if path not in self._known:
            random = np.random.default_rng([self.seed, *(x + 1 for x in path)])
            counts = random.integers(self.least, 10, 3).tolist()
            self._known[path] = np.array([Fraction(n, sum(counts)) for n in counts])
        return self._known[path]


def in_floats(model):
    """The same model with float64 probabilities."""
    return lambda path: model(path).astype(float)


def rules_for(widths: tuple[int, ...], replacement: bool) -> dict:
    """{name: rule} of the rules that work for such a tree."""
    rules = dict(ACCEPTANCE_RULES)
    if max(widths) > 1:
        del rules["block"]
    if not replacement:
        del rules["k-sequential"]
    return rules
