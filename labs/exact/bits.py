"""Are these the same bits? How many are not, by how much, and where the first is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Difference(NamedTuple):
    """How the bits of a function's answers differ from one another, along one axis."""

    compared: int  # pairs of answers that should have the same bits
    differing: int  # pairs that have not
    share: float  # of the elements that differ, in the pair with the most
    largest: float  # absolute difference of any pair; NaN where one is no number, or the other
    first: str  # the first pair that differs, and its first element that does


class Comparison(NamedTuple):
    """Two answers that should have the same bits."""

    pair: str  # which two
    share: float  # of the elements that differ
    largest: float  # absolute difference; NaN where only one is a number
    first: str  # element that differs, or why they cannot be compared


def bits(x) -> np.ndarray:
    """The bits of `x` as unsigned integers of its shape. NaNs have all the same.

    Which NaN an operation gives, sign and payload, no standard says, and no program should depend
    on it. +0 and −0 are different bits: 1/x tells them apart.
    """
    x = np.asarray(x)
    whole = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)
    return np.where(x != x, np.iinfo(whole.dtype).max, whole)


def compare(
    pair: str,
    answer: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    start: Sequence[int] = (),
) -> Comparison:
    """All arrays of two answers, element by element; the first is called out, the second lse.

    start: where along the first axes the arrays begin in what they were taken from.
    """
    kinds = [[(x.dtype, x.shape) for x in arrays] for arrays in (answer, expected)]
    if kinds[0] != kinds[1]:
        one, other = (", ".join(f"{dtype} {shape}" for dtype, shape in kind) for kind in kinds)
        return Comparison(pair, 1.0, np.nan, f"{one} against {other}")
    differs = [bits(x) != bits(y) for x, y in zip(answer, expected, strict=True)]
    count = sum(x.sum() for x in differs)
    size = sum(x.size for x in differs)
    first = ""
    largest = 0.0
    for name, where, x, y in zip(_names(answer), differs, answer, expected, strict=True):
        if where.any():
            place = [int(i) for i in np.argwhere(where)[0]]
            place[: len(start)] = [i + j for i, j in zip(place, start, strict=False)]
            first = first or f"{name}{place}"
            with np.errstate(invalid="ignore"):  # of ∞ − ∞
                off = np.abs(x[where].astype(np.float64) - y[where].astype(np.float64))
            largest = float(np.maximum(largest, off.max()))
    return Comparison(pair, float(count / max(size, 1)), largest, first)


def _names(answer: Sequence[np.ndarray]) -> list[str]:
    return [("out", "lse")[i] if i < 2 else f"array {i}" for i in range(len(answer))]


def summary(comparisons: Sequence[Comparison]) -> Difference | None:
    """Of all comparisons; None if all bits are the same."""
    differing = [x for x in comparisons if x.first]
    if not differing:
        return None
    return Difference(
        len(comparisons),
        len(differing),
        max(x.share for x in differing),
        float(np.max([x.largest for x in differing])),
        f"{differing[0].pair}: {differing[0].first}",
    )


def aligned(x: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy of `x` that starts `offset` bytes past a multiple of 64, an address of any kind."""
    memory = np.empty(x.nbytes + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
