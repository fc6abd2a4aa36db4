"""The forms that merges come in: at once, in turn, along a tree; with or without a precaution.

They take stacked arrays: outs (p, b, l, h, d) and lses (p, b, l, h) of p shards.
"""

from collections.abc import Callable

import numpy as np

from .reference import weighed


def of_parts(wrong: Callable) -> Callable:
    """A merge of stacked arrays as one of pairs."""

    def merge_pairs(parts, **options):
        stacked = (np.stack(x).astype(np.float64) for x in zip(*parts, strict=True))
        return wrong(*stacked, **options)

    return merge_pairs


def merged(out, lse):
    """The right one."""
    return weighed(*clean(out, lse))


def clean(out, lse):
    """As a right merge reads them: no keys are out 0 and lse −∞."""
    none = np.isinf(lse)
    return np.where(none[..., None], 0, out), np.where(none, -np.inf, lse)


def in_turn(merge_two: Callable) -> Callable:
    """From left to right, two by two."""

    def merge_all(out, lse):
        found = out[0], lse[0]
        for other in zip(out[1:], lse[1:], strict=True):
            found = merge_two(*map(np.stack, zip(found, other, strict=True)))
        return found

    return merge_all


def from_nothing(merge_two: Callable) -> Callable:
    """From left to right, beginning with a state of no keys."""

    def merge_all(out, lse):
        nothing = np.zeros((1, *out.shape[1:])), np.full((1, *lse.shape[1:]), -np.inf)
        return in_turn(merge_two)(*map(np.concatenate, zip(nothing, (out, lse), strict=True)))

    return merge_all


def in_pairs(merge_two: Callable, *, odd: bool = True) -> Callable:
    """Along a tree, which keeps what is left over of an odd number, or not."""

    def merge_all(out, lse):
        while len(lse) > 1:
            even = len(lse) // 2 * 2
            two = merge_two(
                *(x[:even].reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1) for x in (out, lse))
            )
            rest = [x[even:] if odd else x[:0] for x in (out, lse)]
            out, lse = (np.concatenate(x) for x in zip(two, rest, strict=True))
        return out[0], lse[0]

    return merge_all


def each_way(wrong: Callable) -> tuple[Callable, ...]:
    return wrong, in_turn(wrong), in_pairs(wrong), from_nothing(wrong)


def flawed(
    out,
    lse,
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
    out, lse = out.astype(dtype), lse.astype(dtype)
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
    return n / (np.where(d == 0, 1, d) if guarded else d)[..., None], m + np.log(d)
