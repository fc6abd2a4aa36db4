"""On which axes do a function's bits depend, but should not? Each axis is tested by itself.

A query's attention to its keys should depend neither on the other queries of a call nor on the
portions in which keys come. But sums of floating-point numbers depend on their order, and the
shapes of a call often choose the order.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from labs.exact.axes import AXES, Call, Question, Settings, questions


class Result(NamedTuple):
    axis: str
    status: str  # "passed", "failed" or "skipped"
    detail: str


class Report(NamedTuple):
    """A line for each axis. True if an axis passed and none failed."""

    results: tuple[Result, ...]

    def __bool__(self) -> bool:
        return bool(self.names("passed")) and not self.names("failed")

    def names(self, status: str) -> list[str]:
        """The axes that "passed", "failed" or were "skipped"."""
        return [result.axis for result in self.results if result.status == status]

    def __str__(self) -> str:
        lines = [f"{x.axis:11} {x.status:8} {x.detail}" for x in self.results]
        return "\n".join([*lines, *(f"{x}: {AXES[x]}" for x in self.names("failed"))])


def check_invariance(
    f: Callable | Mapping[str, Callable],
    *,
    axes: Sequence[str] | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    keys: Sequence[int] = (257, 1031, 4099),
    batches: Sequence[int] = (2, 3, 8, 64),
    queries: Sequence[int] = (2, 8, 9, 32, 33),
) -> Report:
    """The axes on which the bits of f depend have "failed". `AXES` says what each means.

    f:     f(q, k, v) -> out, or (out, lse), or any arrays whose first axes are rows and queries.
           q (b, l, h, d), k and v (b, n, h_kv, d), float32, without a mask: every query sees all
           keys. If f has an option kv_lengths (b,), the numbers of keys that count, it is tested
           for "padding" and for "neighbours" of other lengths.
           Or a mapping {name: f} of functions that should have the same bits, such as one for each
           number of devices. "ways" compares all of them, the other axes test the first.
    axes:  only these of `AXES`, and "repeats"; None for all.
    heads: (h, h_kv). head_dim: d. keys: every n. batches: every b. queries: every l.

    Answers are compared bit by bit: +0 and −0 differ, all NaNs are the same. Calls that raise
    NotImplementedError are left out. No call has more than 70,000 keys in all its rows (36 MB each
    for k and v of this size). Raises ValueError for an unknown axis.
    """
    ways = f if isinstance(f, Mapping) else {"f": f}
    functions = [*ways.values()]
    unknown = set(axes or ()) - set(AXES)
    if unknown:
        raise ValueError(f"axes: expected some of {list(AXES)}, got {sorted(unknown)}")
    takes_lengths = "kv_lengths" in inspect.signature(functions[0]).parameters
    asked = Settings(heads, head_dim, keys, batches, queries, [*ways], takes_lengths)
    results: list[Result] = []
    for axis in AXES:
        if axes is not None and axis not in ("repeats", *axes):
            continue
        if results and results[0].status == "failed":
            results.append(Result(axis, "skipped", "nothing can be said of it"))
        else:
            results.append(_ask(functions, axis, questions(axis, asked)))
    return Report(tuple(results))


def _ask(functions: list[Callable], axis: str, questions: Iterator[Question]) -> Result:
    """The result of one axis."""
    apart = []  # (share of the elements that differ, largest difference, pair)
    compared = 0
    why_not = "there is nothing to ask"
    call = None
    for question in questions:
        try:
            if question.expected is not call:
                answer = _answer(functions, question.expected)
                call = question.expected
            other = answer if question.call is call else _answer(functions, question.call)
        except NotImplementedError as error:
            why_not = str(error) or "not implemented"
            continue
        except Exception as error:
            return Result(axis, "failed", f"{question.pair}: {type(error).__name__}: {error}")
        if axis == "repeats" and not any(_says_something(x) for x in answer):
            return Result(axis, "failed", "its answer has no two different numbers")
        compared += 1
        share, largest = difference(
            [x[question.part] for x in other], [x[question.expected_part] for x in answer]
        )
        if share:
            apart.append((share, largest, question.pair))
    if not compared:
        return Result(axis, "skipped", why_not)
    if not apart:
        return Result(axis, "passed", f"{compared} pairs of answers")
    shares, differences, pairs = zip(*apart, strict=True)
    detail = (
        f"{len(apart)} of {compared} pairs, up to {100 * max(shares):.2g} % of the elements, by up"
        f" to {np.max(differences):.1e}; {pairs[0]}"
    )
    return Result(axis, "failed", detail)


def _answer(functions: list[Callable], call: Call) -> list[np.ndarray]:
    """Copies of a function's answer to copies of these arguments."""
    arguments = [aligned(x, call.offset) for x in (call.q, call.k, call.v)]
    options = {} if call.lengths is None else {"kv_lengths": call.lengths.copy()}
    answer = functions[call.way](*arguments, **options)
    return [np.array(x) for x in (answer if isinstance(answer, tuple | list) else (answer,))]


def _says_something(x: np.ndarray) -> bool:
    numbers = x[np.isfinite(x.astype(np.float64))]
    return numbers.size > 1 and bool((numbers != numbers.flat[0]).any())


def aligned(x: np.ndarray, offset: int) -> np.ndarray:
    """A copy of `x` that starts `offset` bytes past a multiple of 64."""
    memory = np.empty(x.nbytes + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of `x` as unsigned integers of its shape. All NaNs have the same.

    No standard fixes the sign and payload of an operation's NaN, so no program should depend on
    them. +0 and −0 have different bits, because 1/x tells them apart.
    """
    whole = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)
    return np.where(x != x, np.iinfo(whole.dtype).max, whole)


def difference(answer: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> tuple[float, float]:
    """(share of the elements whose bits differ, the largest difference) of two answers.

    expected may have one row, or query, for all of the answer's. Answers of other shapes or dtypes
    differ in all elements, by NaN. So do a NaN and a number, in their element.
    """
    if [x.dtype for x in answer] != [x.dtype for x in expected]:
        return 1.0, np.nan
    try:
        expected = [np.broadcast_to(y, x.shape) for x, y in zip(answer, expected, strict=True)]
    except ValueError:
        return 1.0, np.nan
    differs = [bits(x) != bits(y) for x, y in zip(answer, expected, strict=True)]
    with np.errstate(invalid="ignore"):  # of ∞ − ∞
        off = [
            abs(x[where].astype(np.float64) - y[where].astype(np.float64))
            for where, x, y in zip(differs, answer, expected, strict=True)
        ]
    share = np.concatenate([x.ravel() for x in differs]).mean()
    return float(share), float(np.max(np.concatenate(off), initial=0))
