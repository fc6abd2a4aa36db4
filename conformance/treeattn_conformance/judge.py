"""One judge for all checks: ask, compare with the right answers, and look for the mistake.

A mistake is recognized by its answers. It is named if it gives every number of every answer, the
right numbers and the wrong ones. A few mistakes are named together if each number is given by at
least one of them. Otherwise no name is given, and the report says which numbers are off, where, and
by how much.
"""

import copy
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .report import Report, Result, expected, first_line

TOGETHER = "all options at once"  # a question about all options that the function has
ANSWERED: dict = {}  # this question, for each set of options


class Question(NamedTuple):
    """f(*arguments.values(), **options) should be `right`."""

    name: str
    arguments: dict  # by name, in the order of the call
    options: dict
    right: Any
    largest: float = 0.0  # the largest number that is subtracted from another, in float32
    names: bool = True  # False: the answer is judged, and not used to find a mistake's name


class Asked(NamedTuple):
    """A question, its answer, and a mask of the answer's right numbers."""

    question: Question
    answer: Any
    right: np.ndarray


class Mistake:
    """A known mistake, as a function that makes it."""

    def __init__(self, name: str, wrong: Callable):
        self.name = name
        self.wrong = wrong
        self._given: dict[str, Any] = {}

    def fit(self, asked: Sequence[Asked]) -> "list[Mistake]":
        """[self]. A family of mistakes returns those members that may have given these answers."""
        return [self]

    def explains(self, asked: Asked, same: Callable) -> np.ndarray:
        """A mask of the answer's numbers that this mistake gives, too."""
        return same(asked.question, asked.answer, self.given(asked.question))

    def given(self, question: Question) -> Any:
        if question.name not in self._given:
            arguments = question.arguments.values()
            self._given[question.name] = self.wrong(*arguments, **question.options)
        return self._given[question.name]


class Subject(NamedTuple):
    """The subject of a check: how answers are read and compared, and the known mistakes."""

    read: Callable[[Question, Any], Any]  # f's return value, as an answer; raises ValueError
    same: Callable[[Question, Any, Any], np.ndarray]  # where two answers are the same
    describe: Callable[[Question, Any, np.ndarray], str]  # the numbers where `right` is False
    mistakes: Sequence[Mistake]
    cures: Mapping[str, str]
    together: int = 1  # the largest number of mistakes that are named together


@np.errstate(all="ignore")
def judge(
    f: Callable,
    questions: Sequence[Question],
    subject: Subject,
    *,
    only: Iterable[str] | None = None,
    expect: Mapping[str, str] | Iterable[str] = (),
) -> Report:
    """Ask f all questions, or `only` some, and look for the mistakes that give all its answers."""
    if not callable(f):
        raise TypeError(f"expected a function, got {f!r:.40}")
    results: list[Result] = []
    answers: dict[int, Asked] = {}
    written: set[str] = set()
    asked = chosen(questions, only)
    for question in asked:
        result, answer = _ask(f, question, subject, written)
        if answer is not None:
            right = subject.same(question, answer, question.right)
            answers[len(results)] = Asked(question, answer, right)
            if not right.all():
                detail = subject.describe(question, answer, right)
                result = Result(question.name, "failed", (), detail)
        results.append(result)
    searched = {place: x for place, x in answers.items() if x.question.names}
    if any(x.names for x in questions if x not in asked):
        searched = {}
    # Two answers fit too many mistakes.
    if len(searched) > 2 and not all(x.right.all() for x in searched.values()):
        for place, names in zip(searched, named(list(searched.values()), subject), strict=True):
            results[place] = results[place]._replace(fingerprints=names)
    if written:
        detail = f"it writes into {', '.join(sorted(written))}"
        results.append(Result("arguments", "failed", (), detail))
    return Report(expected(results, expect, subject.cures), subject.cures)


@functools.cache
def prepared(questions: Callable, mistakes: Callable, dtype: str) -> tuple:
    """(the questions in this dtype, the known mistakes), made once."""
    return questions(dtype), tuple(mistakes())


def questions_of(
    small: dict, large: dict, right: Callable, largest: Mapping[str, float] = {}
) -> list[Question]:
    """Questions, from {name: (arguments, options)}. The small ones are used to find a name, too."""
    return [
        Question(
            name,
            arguments,
            options,
            right(*arguments.values(), **options),
            largest.get(name, 0.0),
            names=name in small,
        )
        for name, (arguments, options) in (small | large).items()
    ]


def together(f: Callable, questions: Sequence[Question], right: Callable) -> list[Question]:
    """The questions, of which the last, "all options at once", asks for the options of f."""
    *others, last = questions
    options = {name: x for name, x in last.options.items() if takes(f, name)}
    asked = id(last), *options
    if asked not in ANSWERED:
        answer = right(*last.arguments.values(), **options)
        ANSWERED[asked] = last._replace(options=options, right=answer)
    return [*others, ANSWERED[asked]]


def chosen(questions: Sequence[Question], only: Iterable[str] | None) -> Sequence[Question]:
    if only is None:
        return questions
    only = {only} if isinstance(only, str) else set(only)
    names = [question.name for question in questions]
    if unknown := only - set(names):
        raise ValueError(f"only has {sorted(unknown)}, expected some of {names}")
    return [question for question in questions if question.name in only]


def _ask(f, question: Question, subject: Subject, written: set[str]) -> tuple[Result, Any]:
    """(the result so far, the answer to be judged, or None)."""
    name = question.name
    missing = [option for option in question.options if not takes(f, option)]
    if missing:
        return Result(name, "skipped", (), f"it has no option {missing[0]}"), None
    try:
        came = on_copies(f, question.arguments, question.options, written)
        return Result(name, "passed"), subject.read(question, came)
    except NotImplementedError as error:
        return Result(name, "skipped", (), first_line(error)), None
    except Exception as error:
        detail = f"{type(error).__name__}: {first_line(error)}"
        return Result(name, "failed", getattr(error, "mistakes", ()), detail), None


# Which mistakes explain everything?


def named(answers: Sequence[Asked], subject: Subject) -> list[tuple[str, ...]]:
    """The mistakes that each answer shows; () for all unless every wrong number is explained."""
    wrong = as_bits(~x.right for x in answers)
    names: dict[int, set[str]] = {}  # of mistakes, by the wrong numbers that they explain
    explained: dict[int, dict] = {}
    for name, masks in _possible(answers, subject):
        bits = wrong & as_bits(masks[place] for place in range(len(answers)))
        names.setdefault(bits, set()).add(name)
        explained[bits] = masks
    chosen = set().union(*smallest_sets(names, wrong, subject.together))
    shown = []
    for place, x in enumerate(answers):
        found = (names[bits] for bits in chosen if (explained[bits][place] & ~x.right).any())
        shown.append(tuple(sorted(set().union(*found))))
    return shown


def as_bits(masks: Iterable[np.ndarray]) -> int:
    """The masks as one number, because Python unites numbers fast."""
    return int.from_bytes(np.packbits(np.concatenate([x.ravel() for x in masks])).tobytes(), "big")


def smallest_sets(explained: Iterable[int], wrong: int, most: int) -> list[tuple]:
    """The smallest sets of masks, of at most `most`, that together are `wrong`."""
    for size in range(1, most + 1):
        sets = itertools.combinations(explained, size)
        if found := [x for x in sets if functools.reduce(operator.or_, x) == wrong]:
            return found
    return []


def _possible(answers: Sequence[Asked], subject: Subject) -> list[tuple[str, dict]]:
    """[(name, {place: mask of the answer's numbers that the mistake gives})], for the mistakes that
    give all right numbers and some wrong ones. [] if a wrong number is given by none of them."""
    fitted = itertools.chain(*(mistake.fit(answers) for mistake in subject.mistakes))
    left: list[tuple[Mistake, dict]] = [(mistake, {}) for mistake in fitted]
    wrong = [place for place, x in enumerate(answers) if not x.right.all()]
    right = [place for place, x in enumerate(answers) if x.right.all()]
    alone = subject.together == 1  # one mistake has to give all numbers
    for place in range(len(answers)) if alone else wrong + right:
        x = answers[place]
        if place in right and not alone:
            left = [
                (m, masks)
                for m, masks in left
                if any(masks[i][~answers[i].right].any() for i in wrong)
            ]
        for mistake, masks in left:
            masks[place] = mistake.explains(x, subject.same)
        needed = np.ones_like(x.right) if alone else x.right
        left = [(m, masks) for m, masks in left if masks[place][needed].all()]
        if not left or not np.any([masks[place] for _, masks in left], axis=0).all():
            return []
    return [(mistake.name, masks) for mistake, masks in left]


# Calling the function under test


def parameters(f: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python
        return {}


def takes(f: Callable, option: str) -> bool:
    """Whether f has an argument of this name, or takes any keyword."""
    found = parameters(f)
    return option in found or any(x.kind is x.VAR_KEYWORD for x in found.values())


def on_copies(f: Callable, arguments: dict, options: dict, written: set[str]):
    """f's answer on copies; adds to `written` the names of the arguments that f changed."""
    given = copy.deepcopy(arguments), copy.deepcopy(options)
    answer = f(*given[0].values(), **given[1])
    for before, after in zip((arguments, options), given, strict=True):
        written |= {name for name in before if not same_bits(before[name], after[name])}
    return answer


def same_bits(x, y) -> bool:
    """Whether two arrays, or two lists of arrays, hold the same numbers."""
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same_bits, x, y))
    x, y = np.asarray(x), np.asarray(y)
    return np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
