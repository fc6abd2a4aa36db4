"""Exact answers: each question has one, and a mistake is named that would have given what came."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from .report import Report, Result

Arrays = tuple[np.ndarray, ...]


class Question(NamedTuple):
    """f(*arguments) should be `expected`, element by element."""

    name: str
    arguments: tuple
    expected: Arrays


def ask(
    f: Callable,
    questions: list[Question],
    mistakes: Callable[..., Iterator[tuple[str, Arrays]]],
    cures: Mapping[str, str],
) -> Report:
    """A line for each question. mistakes(*arguments): (fingerprint, what it would have given) each.

    A mistake is named where it explains every answer, right ones and wrong ones; if none does,
    those that explain a wrong one are named there.
    """
    results = []
    likely = []  # of each answer that could be compared, the mistakes that explain it
    for question in questions:
        try:
            answer = _as_arrays(f(*question.arguments), len(question.expected))
        except NotImplementedError as error:
            results.append(Result(question.name, "skipped", (), str(error)))
            continue
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            results.append(Result(question.name, "failed", (), detail))
            continue
        fault = _fault(answer, question.expected)
        would_be = list(mistakes(*question.arguments))
        found = {name for name, wrong in would_be if not _fault(answer, wrong)}
        likely.append(found)
        status = "failed" if fault else "passed"
        results.append(Result(question.name, status, tuple(sorted(found)), fault))
    everywhere = set.intersection(*likely) if likely else set()
    return Report(tuple(_named(x, everywhere) for x in results), cures)


def _as_arrays(answer, many: int) -> Arrays:
    if many == 1:
        answer = (answer,)
    arrays = tuple(np.asarray(x) for x in answer)
    if len(arrays) != many:
        raise ValueError(f"{len(arrays)} arrays, expected {many}")
    return arrays


def _fault(answer: Arrays, expected: Arrays) -> str:
    """The first element that differs, or ""."""
    for number, (x, y) in enumerate(zip(answer, expected, strict=True)):
        which = f"array {number}" if len(expected) > 1 else "the array"
        if x.shape != y.shape:
            return f"{which} of shape {x.shape}, expected {y.shape}"
        wrong = np.argwhere(x != y)
        if len(wrong):
            place = tuple(wrong[0].tolist())
            return f"{which} has {x[place]} at {list(place)}, expected {y[place]}"
    return ""


def _named(result: Result, everywhere: set[str]) -> Result:
    if result.status != "failed":
        return result._replace(fingerprints=())
    if everywhere:
        return result._replace(fingerprints=tuple(sorted(everywhere)))
    return result
