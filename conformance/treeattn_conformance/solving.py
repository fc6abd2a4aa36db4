"""Mistakes with a number in them, an epsilon or a cap: the answers themselves say which number."""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from .judge import Asked, Mistake

STEPS = 50  # halvings of an interval


class Family(Mistake):
    """wrong(*arguments, number=x, **options), for any x between `low` and `high`, both positive."""

    def __init__(self, name: str, wrong: Callable, low: float, high: float, whole: bool = False):
        super().__init__(name, wrong)
        self.low, self.high, self.whole = low, high, whole

    def fit(self, asked: Sequence[Asked]) -> Mistake | None:
        """The member that gives the number which is furthest off: it grows, or falls, with x."""
        furthest = [(*place, x.question) for x in asked if (place := _furthest(x))]
        if not furthest:
            return None
        _, which, place, target, question = max(furthest, key=lambda x: x[0])

        def off(x: float) -> float:
            given = self.wrong(*question.arguments.values(), number=x, **question.options)
            return given[which][place] - target

        low, high = self.low, self.high
        rises = off(low) < 0
        if (off(high) < 0) == rises:
            return None
        for _ in range(STEPS):
            middle = np.sqrt(low * high)
            low, high = (middle, high) if (off(middle) < 0) == rises else (low, middle)
        found = float(np.round(high) if self.whole else high)
        return Mistake(self.name, functools.partial(self.wrong, number=found))


def _furthest(x: Asked) -> tuple | None:
    """(how far off, 0 of out or 1 of lse, its place, what it is): lse, where that is wrong."""
    if x.right.all() or (x.answer[1] is None and x.right[0].all()):
        return None
    which = 0 if x.right[1].all() else 1
    answer, right = x.answer[which], x.question.right[which]
    if answer.shape != right.shape:
        return None
    off = np.where(np.isfinite(answer), np.abs(answer - right), -1)
    place = np.unravel_index(np.nanargmax(off), off.shape)
    return float(off[place]), which, place, float(answer[place])
