"""The forms that merges come in: at once, in turn, along a tree; with or without a precaution."""

import functools
from collections.abc import Callable

import numpy as np


def flawed(
    parts,
    *,
    pivot: Callable = lambda lse: lse.max(axis=0),
    dtype: str = "float64",
    guarded: bool = True,
    reads_inf: bool = True,
    selects: bool = True,
):
    """A merge in this dtype with another pivot, or without one of its precautions.

    guarded: pivots of −∞ are replaced by 0, and divisors of 0 by 1. reads_inf: +∞ as −∞.
    selects: what stands in the out of no keys is not read.
    """
    out = np.stack([np.asarray(part[0], dtype) for part in parts])
    lse = np.stack([np.asarray(part[1], dtype) for part in parts])
    if reads_inf:
        lse = np.where(np.isposinf(lse), -np.inf, lse).astype(dtype)
    if selects:
        out = np.where(np.isinf(lse)[..., None], 0, out).astype(dtype)
    m = pivot(lse).astype(dtype)
    if guarded:
        m = np.where(np.isneginf(m), 0, m).astype(dtype)
    w = np.exp(lse - m)
    d = w.sum(axis=0)
    n = (out * w[..., None]).sum(axis=0)
    if guarded:
        return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)
    return n / d[..., None], m + np.log(d)


def in_turn(merge_two: Callable) -> Callable:
    """From left to right, two by two."""
    return lambda parts: functools.reduce(lambda a, b: merge_two([a, b]), parts)


def from_nothing(merge_two: Callable) -> Callable:
    """From left to right, beginning with a state of no keys."""

    def merge_all(parts):
        out, lse = parts[0]
        return in_turn(merge_two)([(np.zeros(out.shape), np.full(lse.shape, -np.inf)), *parts])

    return merge_all


def in_pairs(merge_two: Callable, *, odd: bool = True) -> Callable:
    """Along a tree, which keeps what is left over of an odd number, or not."""

    def merge_all(parts):
        while len(parts) > 1:
            rest = parts[len(parts) // 2 * 2 :] if odd else []
            parts = [merge_two(parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)] + rest
        return parts[0]

    return merge_all


def each_way(merge_any: Callable) -> tuple[Callable, ...]:
    return merge_any, in_turn(merge_any), in_pairs(merge_any), from_nothing(merge_any)


def clean(parts) -> list:
    """Pairs in float64 as a right merge reads them: no keys are out 0 and lse −∞."""
    pairs = []
    for out, lse in parts:
        none = np.isinf(lse)
        out = np.where(none[..., None], 0, np.asarray(out, np.float64))
        pairs.append((out, np.where(none, -np.inf, np.asarray(lse, np.float64))))
    return pairs
