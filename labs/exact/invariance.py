"""On what do a function's bits depend, on which they should not? Each axis is asked by itself.

A query's attention to its keys is a number, whoever else is asked at the same time, and in whatever
portions the keys come. Sums of floating-point numbers depend on their order, and the order is often
chosen by the shapes of a call.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .axes import AXES, DTYPES, OPTIONS, QUESTIONS, Call, Question, Settings
from .bits import Difference, aligned, compare, summary


class Result(NamedTuple):
    axis: str
    status: str  # "passed", "failed" or "skipped"
    detail: str = ""
    difference: Difference | None = None


class Report(NamedTuple):
    """A line for each axis. True if something passed and nothing failed."""

    results: tuple[Result, ...]

    def __bool__(self) -> bool:
        return bool(self.names("passed")) and not self.names("failed")

    def names(self, status: str) -> list[str]:
        """The axes that "passed", "failed" or were "skipped"."""
        return [result.axis for result in self.results if result.status == status]

    def __str__(self) -> str:
        lines = [f"{x.axis:24} {x.status:8} {x.detail}".rstrip() for x in self.results]
        return "\n".join([*lines, *(f"{x}: {AXES[x]}" for x in self.names("failed"))])


def takes(f: Callable, option: str) -> bool:
    """Whether f has an argument of this name, or takes any."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python
        return False
    kinds = {parameter.kind for parameter in parameters.values()}
    return option in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def check_invariance(
    f: Callable | Mapping[int, Callable],
    *,
    axes: Sequence[str] | None = None,
    dtype: str = "float32",
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    keys: Sequence[int] = (257, 1031, 4099),
    batches: Sequence[int] = (1, 2, 3, 8, 64),
    queries: Sequence[int] = (1, 2, 8, 9, 32, 33),
    devices: Sequence[int] = (1, 2, 4, 8),
) -> Report:
    """On which axes the bits of f depend: those that "failed". `AXES` says what each means.

    f:       f(q, k, v, **options) -> out, or (out, lse), or any arrays whose first axes are rows
             and queries. q (b, l, h, d), k and v (b, n, h_kv, d), without a mask: every query sees
             all keys. A mapping {number of devices: such a function} is asked for "devices"; the
             other axes are asked of its first.
    axes:    only these of `AXES`, and "repeats"; None for all.
    dtype:   of the arguments, one of `DTYPES`; bfloat16 comes as float32 arrays.
    heads:   (h, h_kv). head_dim: d. keys: every n. batches: every b. queries: every l.
    devices: numbers of them, for a function with that option.

    Options are asked of a function that has them: kv_lengths (b,) of ints, so many keys count
    ("padding", and "neighbours" of other lengths); block, an int ("blocks"); splits, a tuple of
    ints, so many keys each part has ("splits"); devices, an int; in_flight, an int, so many of the
    last keys come with this call instead of from a cache ("in flight"). They change how a result
    is computed, kv_lengths apart, and not which. What raises NotImplementedError is not asked.

    Answers are compared bit by bit: +0 and −0 differ, NaNs are all the same. It makes at most 210
    calls, none with more than 70,000 keys in all its rows (36 MB each for k and v of this size in
    float32), and takes seconds where the function does. Raises ValueError for an unknown axis or
    dtype, for no keys or fewer than 34, and for a mapping without functions.
    """
    _check_arguments(f, axes, dtype, keys)
    if isinstance(f, Mapping):
        devices = tuple(f)
    first = next(iter(f.values())) if isinstance(f, Mapping) else f
    settings = Settings(
        dtype, heads, head_dim, keys, batches, queries, devices, takes(first, "kv_lengths")
    )
    results: list[Result] = []
    for axis, questions in QUESTIONS.items():
        option = OPTIONS.get(axis)
        by_mapping = axis == "devices" and isinstance(f, Mapping)
        if axes is not None and axis not in ("repeats", *axes):
            continue
        if results and results[0].status == "failed":
            results.append(Result(axis, "skipped", "nothing can be said of it"))
        elif option and not by_mapping and not takes(first, option):
            results.append(Result(axis, "skipped", f"it has no option {option}"))
        else:
            results.append(_ask(f, axis, questions(settings)))
    return Report(tuple(results))


def _check_arguments(f, axes, dtype: str, keys: Sequence[int]) -> None:
    unknown = set(axes or ()) - set(AXES)
    if unknown:
        raise ValueError(f"axes has {sorted(unknown)}, expected some of {list(AXES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {list(DTYPES)}")
    if not keys or min(keys) < 34:  # 33 of them may be in flight
        raise ValueError(f"keys is {keys}, expected numbers of at least 34")
    if isinstance(f, Mapping) and not f:
        raise ValueError("f is an empty mapping, expected a function for each number of devices")


def _ask(f, axis: str, questions: Iterator[Question]) -> Result:
    """The result of one axis. Questions that share what is expected come one after another."""
    comparisons = []
    not_asked: list[str] = []
    call = None
    for question in questions:
        try:
            if question.expected is not call:
                answer = _answer(f, question.expected)
                call = question.expected
            same_call = question.call is call
            other = answer if same_call else _answer(f, question.call)
        except NotImplementedError as error:
            not_asked.append(str(error) or "not implemented")
            continue
        except Exception as error:
            detail = f"{question.pair}: {type(error).__name__}: {error}"
            return Result(axis, "failed", detail)
        if axis == "repeats" and not any(_says_something(x) for x in answer):
            return Result(axis, "failed", "its answer has no two different numbers")
        got = [x[question.part] for x in other]
        expected = [x[question.expected_part] for x in answer]
        expected = [_spread(x, y) for x, y in zip(expected, got, strict=False)]
        start = [slices.start or 0 for slices in question.part]
        comparisons.append(compare(question.pair, got, expected, start))
    return _judged(axis, comparisons, not_asked)


def _judged(axis: str, comparisons, not_asked: list[str]) -> Result:
    if not comparisons:
        return Result(axis, "skipped", next(iter(not_asked), "there is nothing to ask"))
    found = summary(comparisons)
    if found is None:
        return Result(axis, "passed", f"{len(comparisons)} pairs of answers")
    detail = (
        f"{found.differing} of {found.compared} pairs, up to {100 * found.share:.2g} % of the"
        f" elements, by up to {found.largest:.1e}; {found.first}"
    )
    return Result(axis, "failed", detail, found)


def _answer(f, call: Call) -> list[np.ndarray]:
    """Copies of what f returns for copies of these arguments."""
    arguments = [aligned(x, call.offset) for x in (call.q, call.k, call.v)]
    options = dict(call.options)
    if isinstance(f, Mapping):
        p = options.pop("devices", next(iter(f)))
        f = f[p]
    answer = f(*arguments, **options)
    return [np.array(x) for x in (answer if isinstance(answer, tuple | list) else (answer,))]


def _says_something(x: np.ndarray) -> bool:
    numbers = x[np.isfinite(x.astype(np.float64))]
    return numbers.size > 1 and bool((numbers != numbers.flat[0]).any())


def _spread(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """One row or query for each of `like`, if it is one; else as it is."""
    try:
        return np.broadcast_to(x, like.shape)
    except ValueError:
        return x
