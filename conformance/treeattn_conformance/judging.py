"""Judging pairs (out, lse): which numbers are wrong, and which mistakes would give just these.

A mistake is a whole function that makes it. It is named if it gives every number of every answer,
the right ones and the wrong ones; or if a few mistakes do so together, each number by one of
them. Otherwise nothing is named, and the report says what is off, where, and by how much. Nor
is anything named where most cases raised errors: what is left says too little.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .calling import as_array, on_copies, takes
from .report import Report, Result, asked, unwritten
from .rounding import TOLERANCES

SPECIAL = {"out in 16 bits": "sums in 16 bits"}  # where both explain, the first one is named
FEWEST = 3  # answers that can have a name
Pair = tuple[np.ndarray, np.ndarray]  # out (b, l, h, d) and lse (b, l, h)


class Case(NamedTuple):
    """One question: f(*arguments.values(), **options) should be (out, lse), here in float64."""

    name: str
    arguments: dict  # by name, in the order of the call
    options: dict
    out: np.ndarray
    lse: np.ndarray
    largest: float = 0.0  # of the numbers that are subtracted from each other, in float32

    def tolerances(self, dtype: str, tolerance: float | None) -> tuple[float, float]:
        """Of out and of lse, which is a float32 number whatever the dtype of out."""
        rounding = self.largest * np.finfo("float64" if dtype == "float64" else "float32").eps
        of_lse = 1e-10 if dtype == "float64" else 2e-5
        return (tolerance or TOLERANCES[dtype]) + 2 * rounding, of_lse


class Mistake(NamedTuple):
    """A known mistake, as a function that makes it; or as a sign that is seen in an answer.

    wrong: (*arguments, **options) -> (out, lse), as a function with this mistake returns them
    sign:  (case, answer) -> two arrays of bool (b, l, h): may it have given this out, this lse?
    """

    name: str
    wrong: Callable | None = None
    sign: Callable | None = None


class Questions:
    """Cases, and the mistakes that they tell apart; what each mistake gives is calculated once."""

    def __init__(self, cases: Sequence[Case], mistakes: Iterable[Mistake], cures: dict[str, str]):
        self.cases = tuple(cases)
        self.mistakes = tuple(mistakes)
        self.cures = cures
        self._given: dict[tuple[int, int], Pair] = {}

    def given(self, mistake: int, case: int) -> Pair:
        """The (out, lse) of this mistake's function, by numbers."""
        if (mistake, case) not in self._given:
            asked = self.cases[case]
            wrong = self.mistakes[mistake].wrong
            self._given[mistake, case] = wrong(*asked.arguments.values(), **asked.options)
        return self._given[mistake, case]


class _Answer(NamedTuple):
    place: int  # of its case, and of its result
    case: Case
    answer: Pair
    tolerances: tuple[float, float]
    right: np.ndarray  # (2, b, l, h): of out and of lse


@np.errstate(all="ignore")
def check(f: Callable, questions: Questions, dtype: str, tolerance: float | None) -> Report:
    """Ask f all cases, and look for the mistakes that would give all of its answers."""
    if not callable(f):
        raise TypeError(f"expected a function, got {f!r:.40}")
    results = []
    answers = []
    written: set[str] = set()
    for place, case in enumerate(questions.cases):
        result, answer = _ask(f, case, written)
        if answer is not None:
            tolerances = case.tolerances(dtype, tolerance)
            right = _agreement(case, answer, (case.out, case.lse), tolerances)
            answers.append(_Answer(place, case, answer, tolerances, right))
            if not right.all():
                detail = describe(case, answer, right)
                result = Result(case.name, "failed", (), detail)
        results.append(result)
    if len(answers) >= FEWEST and any(not x.right.all() for x in answers):
        for place, names in _named(answers, questions).items():
            results[place] = results[place]._replace(fingerprints=names)
    if written:
        results.append(unwritten(written))
    return Report(tuple(results), questions.cures)


def _ask(f: Callable, case: Case, written: set[str]) -> tuple[Result, Pair | None]:
    missing = [name for name in case.options if not takes(f, name)]
    if missing:
        return Result(case.name, "skipped", (), f"it has no option {missing[0]}"), None

    def ask() -> Pair:
        out, lse = on_copies(f, case.arguments, case.options, written)
        return as_array(out).astype(np.float64), as_array(lse).astype(np.float64)

    return asked(case.name, ask)


def _agreement(case: Case, answer: Pair, other: Pair, tolerances) -> np.ndarray:
    """(2, b, l, h): where out and lse of two pairs are the same number; all False where shapes
    differ. Rows that are no numbers in both are the same, however each says so."""
    same = np.zeros((2, *case.lse.shape), bool)
    shapes = [[x.shape for x in pair] for pair in (answer, other)]
    if shapes[0] != shapes[1]:
        return same
    close = [
        _close(x, y, tolerance) for x, y, tolerance in zip(answer, other, tolerances, strict=True)
    ]
    if answer[0].shape != case.out.shape or answer[1].shape != case.lse.shape:
        return same | all(x.all() for x in close)
    rows = np.stack([close[0].all(axis=-1), close[1]])
    return rows if rows.all() else rows | (_broken(case, answer) & _broken(case, other))


def _close(x: np.ndarray, y: np.ndarray, tolerance: float) -> np.ndarray:
    """Where numbers differ by no more than the tolerance, absolute and relative; NaN is NaN."""
    near = np.abs(x - y) <= tolerance + tolerance * np.abs(y)
    return (near & np.isfinite(y)) | (x == y) | (np.isnan(x) & np.isnan(y))


def _broken(case: Case, pair: Pair) -> np.ndarray:
    """(b, l, h): rows that are NaN, or that are infinite although they have keys."""
    out, lse = pair
    infinite = np.isfinite(case.lse) & (np.isinf(out).any(axis=-1) | np.isposinf(lse))
    return np.isnan(out).any(axis=-1) | np.isnan(lse) | infinite


# Which mistakes explain everything?


def _named(answers: list[_Answer], questions: Questions) -> dict[int, tuple[str, ...]]:
    """Of each wrong answer, by its place: the mistakes that it shows, if all are explained."""
    wrong = np.concatenate([~x.right.ravel() for x in answers])
    named: dict[bytes, set[str]] = {}  # by what they explain of what is wrong
    for number, mistake in enumerate(questions.mistakes):
        explained = _explained(number, answers, questions)
        if explained is not None and (explained & wrong).any():
            named.setdefault((explained & wrong).tobytes(), set()).add(mistake.name)
    for names in named.values():
        names -= {SPECIAL[name] for name in names if name in SPECIAL}
    sets = _smallest_sets([np.frombuffer(x, bool) for x in named], wrong)
    found: dict[int, tuple[str, ...]] = {}
    start = 0
    for x in answers:
        part = slice(start, start + x.right.size)
        start += x.right.size
        if wrong[part].any():
            shown = [explained for one in sets for explained in one if explained[part].any()]
            found[x.place] = tuple(sorted(set().union(*(named[x.tobytes()] for x in shown))))
    return found


def _explained(number: int, answers: list[_Answer], questions: Questions) -> np.ndarray | None:
    """Which numbers of all answers the mistake gives; None if it would have got wrong what is
    right, or gives nothing of what is wrong."""
    mistake = questions.mistakes[number]
    same = {}
    explains = False
    for x in sorted(answers, key=lambda x: x.right.all()):  # wrong answers first
        if x.right.all() and not explains:
            return None
        if mistake.sign is not None:
            same[x.place] = _signed(mistake, x) | x.right
        else:
            given = questions.given(number, x.place)
            same[x.place] = _agreement(x.case, x.answer, given, x.tolerances)
        if (x.right & ~same[x.place]).any():
            return None
        explains = explains or bool((same[x.place] & ~x.right).any())
    return np.concatenate([same[x.place].ravel() for x in answers])


def _signed(mistake: Mistake, x: _Answer) -> np.ndarray:
    if [y.shape for y in x.answer] != [x.case.out.shape, x.case.lse.shape]:
        return np.zeros(x.right.shape, bool)
    return np.stack(mistake.sign(x.case, x.answer))


def _smallest_sets(explained: list[np.ndarray], wrong: np.ndarray) -> list[tuple]:
    """Up to four of them, as few as possible, that together are all that is wrong."""
    if not explained:
        return []
    how_many = np.sum(explained, axis=0)

    def sets(chosen: tuple, left: np.ndarray, size: int):
        if not left.any():
            yield chosen
        elif size:
            hardest = np.where(left, how_many, len(explained) + 1).argmin()
            for x in explained:
                if x[hardest]:
                    yield from sets((*chosen, x), left & ~x, size - 1)

    found = (list(sets((), wrong, size)) for size in range(1, 5))
    return next((x for x in found if x), [])


# What is off, where, and by how much


def describe(case: Case, answer: Pair, right: np.ndarray) -> str:
    """In words: which of out and lse, in which rows, how far off, and in which way."""
    shapes = [x.shape for x in answer]
    expected = [case.out.shape, case.lse.shape]
    if shapes != expected:
        return f"shapes {shapes}, expected {expected}"
    said = []
    for name, x, y, wrong in zip(("out", "lse"), answer, case[3:5], ~right, strict=True):
        if wrong.any():
            said.append(f"{name} {_size(x[wrong], y[wrong])}{_place(wrong, case)}")
    return "; ".join(said)


def _size(x: np.ndarray, expected: np.ndarray) -> str:
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


def _place(wrong: np.ndarray, case: Case) -> str:
    """In which rows of the batch, queries or heads, where not in all; with or without keys."""
    if wrong.all():
        return ""
    if np.array_equal(wrong, np.isneginf(case.lse)):
        return ", just where there are no keys"
    for axis, name in enumerate(("row", "query", "head")):
        others = tuple(i for i in range(3) if i != axis)
        places = np.flatnonzero(wrong.any(axis=others))
        if len(places) < wrong.shape[axis]:
            s = "s" if len(places) > 1 else ""
            return f", in {name}{s} {', '.join(map(str, places))} of {wrong.shape[axis]}"
    first = tuple(np.argwhere(wrong)[0].tolist())
    return f", in {wrong.sum()} of {wrong.size} rows, first at {list(first)}"
