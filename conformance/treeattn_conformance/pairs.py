"""Pairs (out, lse): reading them, comparing two of them, and describing the differences.

out is (b, l, h, d), and lse (b, l, h) is a natural logarithm. If a function returns only out, lse
is None, and only out is judged.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .judge import Asked, Mistake, Question, Subject
from .reference import TOLERANCES

STEPS = 50  # halvings of an interval
Pair = tuple[np.ndarray, np.ndarray | None]


class PairMistake(Mistake):
    """A wrong merge or kernel: both its arrays, or one of them beside the right other array."""

    def fit(self, asked: Sequence[Asked]) -> list[Mistake]:
        return [Part(self, which) for which in ((0, 1), (0,), (1,))]


class Part(Mistake):
    def __init__(self, whole: Mistake, which: tuple[int, ...]):
        super().__init__(whole.name, whole.wrong)
        self.whole = whole
        self.which = which

    def given(self, question: Question) -> Pair:
        pairs = question.right, self.whole.given(question)
        return pairs[0 in self.which][0], pairs[1 in self.which][1]


class Family(PairMistake):
    """A mistake with a number in it, such as an epsilon or a cap, which is fitted to the answers.

    wrong(x) makes it, for any x between `low` and `high`, both positive.
    """

    def __init__(self, name: str, wrong: Callable, low: float, high: float):
        super().__init__(name, wrong)
        self.low, self.high = low, high

    def fit(self, asked: Sequence[Asked]) -> list[Mistake]:
        """The member that gives the answers' furthest-off number, by bisection: it is monotonic."""
        furthest = [(*place, x.question) for x in asked if (place := _furthest(x))]
        if not furthest:
            return []
        _, which, place, target, question = max(furthest, key=lambda x: x[0])

        def off(x: float) -> float:
            given = self.wrong(x)(*question.arguments.values(), **question.options)
            return given[which][place] - target

        low, high = self.low, self.high
        rises = off(low) < 0
        if (off(high) < 0) == rises:
            return []
        for _ in range(STEPS):
            middle = np.sqrt(low * high)
            low, high = (middle, high) if (off(middle) < 0) == rises else (low, middle)
        return PairMistake(self.name, self.wrong(high)).fit(asked)


def _furthest(x: Asked) -> tuple | None:
    """(how far off, 0 for out or 1 for lse, place, value) of the furthest number.

    The number is one of lse if lse is wrong, else one of out.
    """
    which = 0 if x.answer[1] is None or x.right[1].all() else 1
    if x.right[which].all():
        return None
    answer, right = x.answer[which], x.question.right[which]
    if answer.shape != right.shape:
        return None
    off = np.where(np.isfinite(answer), np.abs(answer - right), -1)
    place = np.unravel_index(np.nanargmax(off), off.shape)
    return float(off[place]), which, place, float(answer[place])


def pairs(
    mistakes: Sequence[Mistake], cures: Mapping[str, str], dtype: str, tolerance: float | None
) -> Subject:
    """The subject of a check whose answers are pairs (out, lse).

    out is right within the rounding of `dtype`, or within `tolerance`. lse is judged as float32, or
    as float64 if `dtype` is float64, or within `tolerance` if that is more.
    """
    eps = np.finfo("float64" if dtype == "float64" else "float32").eps
    of_lse = 1e-10 if dtype == "float64" else 2e-5
    allowed = (tolerance or TOLERANCES[dtype], max(tolerance or 0, of_lse))

    def same(question: Question, answer: Pair, other: Pair) -> np.ndarray:
        """(2, b, l, h): the rows where out, and where lse, are the same; all False if shapes
        differ. A row that is broken in both answers, by NaN or by ∞, is the same."""
        rows = np.zeros((2, *question.right[1].shape), bool)
        if answer[1] is None:
            other = other[0], question.right[1]
            answer = answer[0], question.right[1]
        if [x.shape for x in answer] != [x.shape for x in other]:
            return rows
        rounding = 2 * question.largest * eps
        close = [_close(x, y, t, rounding) for x, y, t in zip(answer, other, allowed, strict=True)]
        if [x.shape for x in answer] != [x.shape for x in question.right]:
            return rows | all(x.all() for x in close)
        rows = np.stack([close[0].all(axis=-1), close[1]])
        broken = _broken(question, answer) & _broken(question, other)
        return rows | broken if answer[1] is not question.right[1] else rows | [broken, rows[1]]

    return Subject(
        read_pair,
        same,
        describe,
        mistakes,
        cures,
        together=4,
    )


def read_pair(question: Question, came) -> Pair:
    if came is None:
        raise ValueError("the function returned None, expected (out, lse), or out alone")
    if not isinstance(came, tuple | list):
        return np.asarray(came).astype(np.float64), None
    if len(came) != 2:
        raise ValueError(f"{len(came)} arrays came, expected (out, lse), or out alone")
    out, lse = (np.asarray(x).astype(np.float64) for x in came)
    return out, lse


def _close(x: np.ndarray, y: np.ndarray, tolerance: float, rounding: float) -> np.ndarray:
    """Where x and y differ by no more than the tolerance, or are both NaN."""
    near = np.abs(x - y) <= rounding + tolerance * (1 + np.abs(y))
    return (near & np.isfinite(y)) | (x == y) | (np.isnan(x) & np.isnan(y))


def _broken(question: Question, pair: Pair) -> np.ndarray:
    """(b, l, h): rows that are NaN, or that are infinite although they have keys."""
    out, lse = pair
    keys = np.isfinite(question.right[1])
    infinite = keys & (np.isinf(out).any(axis=-1) | np.isposinf(lse))
    return np.isnan(out).any(axis=-1) | np.isnan(lse) | infinite


# Describing which numbers are off, where, and by how much


def describe(question: Question, answer: Pair, right: np.ndarray) -> str:
    """In words: whether out or lse is off, in which rows, how far, and in which way."""
    judged = [x for x in answer if x is not None]
    shapes = [x.shape for x in judged]
    expected = [x.shape for x in question.right[: len(judged)]]
    if shapes != expected:
        return f"shapes {shapes}, expected {expected}"
    said = []
    for name, x, y, wrong in zip(("out", "lse"), judged, question.right, ~right, strict=False):
        if wrong.any():
            columns = _columns(x, y) if name == "out" else ""
            said.append(f"{name} {size_of(x[wrong], y[wrong])}{columns}{_place(wrong, question)}")
    return "; ".join(said)


def size_of(x: np.ndarray, expected: np.ndarray) -> str:
    if np.isnan(expected).any():
        return f"is {x[np.isnan(expected)].flat[0]:.4g} for NaN"
    if np.isnan(x).any():
        return "is NaN"
    if (np.isinf(x) & (x != expected)).any():
        return f"is {'−' if (x == -np.inf).any() else '+'}∞"
    if not np.isfinite(expected).all():
        return f"is {x[~np.isfinite(expected)].flat[0]:.4g} for −∞"
    off = x - expected
    size = np.abs(off).max()
    if np.ptp(off) < 1e-3 * size:
        return f"is {off.flat[0]:+.4g} off, everywhere the same"
    ratio = (x * expected).sum() / max((expected**2).sum(), 1e-300)
    if np.abs(x - ratio * expected).max() < 1e-3 * size:
        return f"is {ratio:.4g} times what it should be"
    return f"is off by up to {size:.1e}"


def _columns(out: np.ndarray, expected: np.ndarray) -> str:
    """The wrong columns of the last axis, if the others' error is below a thousandth of theirs."""
    off = np.abs(out - expected)
    if not np.isfinite(off).all():
        return ""
    wrong = off.max(axis=(0, 1, 2)) > 1e-3 * off.max()
    return "" if wrong.all() else f", in {numbers('column', np.flatnonzero(wrong), len(wrong))}"


def _place(wrong: np.ndarray, question: Question) -> str:
    """The batch rows, queries or heads that are wrong, or the rows without keys; "" for all."""
    if wrong.all():
        return ""
    if np.array_equal(wrong, np.isneginf(question.right[1])):
        return ", just where there are no keys"
    first = np.argwhere(wrong)[0].tolist()
    somewhere = f", in {wrong.sum()} of {wrong.size} rows, first at {first}"
    return along(wrong, ("row", "query", "head")) or somewhere


def along(wrong: np.ndarray, names: tuple[str, ...]) -> str:
    """The wrong places along the first axis that also has places where nothing is wrong."""
    for axis, name in enumerate(names):
        others = tuple(i for i in range(len(names)) if i != axis)
        places = np.flatnonzero(wrong.any(axis=others))
        if len(places) < wrong.shape[axis]:
            return f", in {numbers(name, places, wrong.shape[axis])}"
    return ""


def numbers(name: str, places: np.ndarray, of: int) -> str:
    """ "queries 1, 4–7 of 9"; only the first few ranges where there are many."""
    ranges = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    said = [f"{x[0]}" if len(x) == 1 else f"{x[0]}-{x[-1]}" for x in ranges]
    said = said if len(said) < 6 else [*said[:4], "…"]
    plural = {"query": "queries"}.get(name, f"{name}s") if len(places) > 1 else name
    return f"{plural} {', '.join(said)} of {of}"
