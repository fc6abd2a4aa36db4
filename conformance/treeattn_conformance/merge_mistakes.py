"""Known mistakes of merges, each as a merge of stacked arrays that makes it.

outs (p, b, l, h, d) and lses (p, b, l, h) come from p shards. A kernel makes the same mistakes when
it merges its keys or blocks of keys.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .judge import Mistake
from .pairs import Family, PairMistake
from .reference import clean, merged, rounded
from .signs import SIGN_CURES, SIGNS

SUM_CURES = {  # of kernels, too
    "log base 2": "lse is in base 2 on one side and natural on the other: multiply by log 2",
    "axes of lse": "lse is (b, l, h) here, (b, h, l) in many kernels: transpose, not reshape",
    "exp overflows": "subtract the maximum before the exponential, across the shards too",
    "pivot of other rows": "every row, query and head has a maximum of its own: reduce over "
    "the shards, or the keys, alone",
    "pivot is not the maximum": "subtract the largest lse of the shards: with any other one "
    "exp overflows",
    "stale pivot": "when the maximum rises, rescale what was summed before: · exp(old − new)",
    "not divided": "divide the weighted sum by the sum of the weights",
    "lse without its maximum": "lse = max + log Σ exp(lse − max): add the maximum again",
    "lse is the maximum": "lse = max + log Σ exp(lse − max): the logarithm is missing",
    "outs not weighted": "each out counts by its mass: weigh it with exp(lse − max)",
    "epsilon in the sum": "a constant in the denominator outweighs small sums: select instead",
    "one more in the sum": "log1p, or softmax with a 1 in its denominator, counts a key that "
    "is not there",
}
MERGE_CURES = (
    SIGN_CURES
    | SUM_CURES
    | {
        "lse + block_lse": "sums of exponentials add, not their logarithms: use logaddexp",
        "counted twice": "every shard, and every key, counts once: where do two of them overlap?",
        "a shard left out": "every shard counts, the first and the last as well",
    }
)
LOW = (-1e4, -5e4)  # numbers that stand for −∞
Wrongs = Iterator[tuple[str, Callable]]


def merge_mistakes() -> Iterator[Mistake]:
    yield from SIGNS
    for name, wrong in of_no_keys():
        yield Mistake(name, of_parts(in_turn(wrong, from_nothing=True)))
    for name, wrong in itertools.chain(of_no_keys(), wrong_pivots(), wrong_sums()):
        for way in (wrong, in_turn(wrong)):
            yield Mistake(name, of_parts(way))
    for name, wrong in itertools.chain(of_shards(), wrong_logs(), of_rounding(), of_axes()):
        yield PairMistake(name, of_parts(wrong))
    yield from epsilons(of_parts)


# The forms that merges come in


def of_parts(wrong: Callable) -> Callable:
    """A merge of pairs, from a merge of stacked arrays."""
    return lambda parts: wrong(*(np.stack(x).astype(np.float64) for x in zip(*parts, strict=True)))


def in_turn(merge_two: Callable, *, from_nothing: bool = False) -> Callable:
    """A merge from left to right, two by two, that may begin with a state of no keys."""

    def merge_all(out, lse):
        nothing = np.zeros(out.shape[1:]), np.full(lse.shape[1:], -np.inf)
        found = nothing if from_nothing else (out[0], lse[0])
        for other in zip(out[not from_nothing :], lse[not from_nothing :], strict=True):
            found = merge_two(*map(np.stack, zip(found, other, strict=True)))
        return found

    return merge_all


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

    guarded: pivots of −∞ are replaced by 0, and divisors of 0 by 1. reads_inf: +∞ is read as −∞.
    selects: out is not read where there are no keys.
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


# The mistakes


def of_no_keys() -> Wrongs:
    yield "lse +inf for no keys", functools.partial(flawed, reads_inf=False)
    yield "stale NaN", functools.partial(flawed, selects=False)
    yield "NaN for no keys", functools.partial(flawed, guarded=False)

    def zeros_for_no_keys(out, lse):
        """A shard without keys never wrote its memory, so its out and lse are 0."""
        return merged(clean(out, lse)[0], np.where(np.isinf(lse), 0, lse))

    def lowest(out, lse, *, low):
        right, total = merged(out, lse)
        return right, np.where(np.isinf(total), total, np.maximum(total, low))

    def low_for_no_keys(out, lse, *, low):
        none = np.isinf(lse) & ~np.isinf(lse).all(axis=0)
        return merged(np.where(none[..., None], 0, out), np.where(none, low, lse))

    yield "no keys as lse 0", zeros_for_no_keys
    for low in LOW:
        for wrong in (lowest, low_for_no_keys):
            yield "−∞ is a number that scores reach", functools.partial(wrong, low=low)


def wrong_pivots() -> Wrongs:
    def over(axes):
        return lambda lse: np.broadcast_to(lse.max(axis=axes, keepdims=True)[0], lse[0].shape)

    pivots = [("exp overflows", lambda lse: np.zeros_like(lse[0]))]
    for others in ((1, 2, 3), (1,), (2,), (3,)):
        pivots.append(("pivot of other rows", over((0, *others))))
    for other in (
        lambda lse: lse.min(axis=0),
        lambda lse: lse.mean(axis=0),
        lambda lse: lse[0],
        lambda lse: lse[-1],
    ):
        pivots.append(("pivot is not the maximum", other))
    for (name, pivot), dtype, guarded in itertools.product(
        pivots, ("float32", "float64"), (True, False)
    ):
        yield name, functools.partial(flawed, pivot=pivot, dtype=dtype, guarded=guarded)


def stale(out, lse, *, rescaled, maxima=None):
    """A loop that leaves sums relative to an old maximum.

    rescaled: "d" or "n", the one sum that is rescaled to a new maximum; "" if neither is
    maxima: (p, b, l, h), the number to which each block is relative; None: its lse
    """
    out, lse = clean(out, lse)
    m, d, n = np.full(lse.shape[1:], -np.inf), 0, np.zeros(out.shape[1:])
    for block, block_lse, of_block in zip(out, lse, lse if maxima is None else maxima, strict=True):
        new = np.maximum(m, of_block)
        old, w = (np.where(np.isneginf(x), 0, np.exp(x - new)) for x in (m, block_lse))
        d = d * (old if rescaled == "d" else 1) + w
        n = n * (old[..., None] if rescaled == "n" else 1) + w[..., None] * block
        m = new
    return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)


STALE = [functools.partial(stale, rescaled=rescaled) for rescaled in ("", "d", "n")]


def largest(lse) -> np.ndarray:
    """The largest lse of a shard, or 0 where no shard has keys."""
    m = np.where(np.isinf(lse), -np.inf, lse).max(axis=0)
    return np.where(np.isneginf(m), 0, m)


def wrong_sums() -> Wrongs:
    def not_divided(out, lse):
        right, total = merged(out, lse)
        return right * np.exp(total - largest(lse))[..., None], total

    def mean(out, lse):
        return clean(out, lse)[0].mean(axis=0), merged(out, lse)[1]

    yield "outs not weighted", mean
    for wrong in STALE:
        yield "stale pivot", wrong
    yield "not divided", not_divided


def of_shards() -> Wrongs:
    def some(out, lse, *, kept):
        return merged(out[kept], lse[kept]) if len(lse[kept]) else merged(out, lse)

    def odd_one_lost(out, lse):
        """A merge along a tree, two by two, that drops the last of an odd number."""
        while len(lse) > 1:
            two = (x[: len(lse) // 2 * 2] for x in (out, lse))
            out, lse = merged(*(x.reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1) for x in two))
        return out[0], lse[0]

    yield "a shard left out", odd_one_lost
    for kept in (slice(0, -1), slice(1, None)):
        yield "a shard left out", functools.partial(some, kept=kept)
    for again in (0, -1):
        yield (
            "counted twice",
            lambda out, lse, i=again: merged(*(np.concatenate([x, x[[i]]]) for x in (out, lse))),
        )

    def added(out, lse, *, kept, dtype):
        """lse is the sum of all lse, or, with `kept`, of those of shards that have keys."""
        lse = lse.astype(dtype)
        if kept:
            out, lse = clean(out, lse)
        none = np.isinf(lse) & kept
        pivot = np.where(none, 0, lse).sum(axis=0)
        total = np.where(none.all(axis=0), -np.inf, pivot)
        return (out * np.exp(lse - pivot)[..., None]).sum(axis=0), total

    for kept, dtype in itertools.product((True, False), ("float32", "float64")):
        yield "lse + block_lse", functools.partial(added, kept=kept, dtype=dtype)


def wrong_logs() -> Wrongs:
    def in_base(out, lse, *, read, written):
        wrong, total = merged(out, lse * read)
        return wrong, total * written

    def of_maximum(out, lse, *, left):
        """lse is the maximum alone, or lse without the maximum."""
        right, total = merged(out, lse)
        m = clean(out, lse)[1].max(axis=0)
        return right, np.where(np.isneginf(m), m, total - m) if left else m

    ln2 = np.log(2)
    for read, written in ((1, 1 / ln2), (ln2, 1), (1 / ln2, 1), (ln2, 1 / ln2)):
        yield "log base 2", functools.partial(in_base, read=read, written=written)
    yield "lse without its maximum", functools.partial(of_maximum, left=True)
    yield "lse is the maximum", functools.partial(of_maximum, left=False)
    for pivot in (True, False):
        yield "one more in the sum", one_more(1.0, pivot=pivot)


def one_more(number: float, *, pivot: bool) -> Callable:
    """A merge that adds a number to the sum of all weights, after a pivot or without one."""

    def wrong(out, lse):
        right, total = merged(out, lse)
        m = largest(lse)
        d = np.exp(total - m)
        more = d + number * (1 if pivot else np.exp(-m))
        return right * (d / more)[..., None], m + np.log(more)

    return wrong


def epsilons(form: Callable) -> Iterator[Mistake]:
    """form: `of_parts`, or a kernel of a merge"""
    for pivot in (True, False):
        yield Family(
            "epsilon in the sum", lambda x, p=pivot: form(one_more(x, pivot=p)), 1e-20, 0.1
        )


def of_rounding() -> Wrongs:
    def of_outs(out, lse, *, dtype):
        return merged(rounded(np.float32(out), dtype), lse)

    def of_result(out, lse, *, dtype):
        right, total = merged(out, lse)
        return right, rounded(total, dtype).astype(np.float64)

    def of_lse(out, lse, *, dtype):
        return merged(out, rounded(lse, dtype).astype(np.float64))

    for dtype in ("bfloat16", "float16"):
        yield "rounded to 16 bits", functools.partial(of_outs, dtype=dtype)
        yield f"lse in {dtype}", functools.partial(of_lse, dtype=dtype)
        yield f"lse in {dtype}", in_turn(functools.partial(of_result, dtype=dtype))


def of_axes() -> Wrongs:
    """Weights, or lse, whose axes of queries and heads are swapped, by transpose or reshape."""

    def weights(out, lse, *, change):
        total = merged(out, lse)[1]
        out, cleaned = clean(out, lse)
        w = np.exp(cleaned - np.where(np.isinf(total), 0, total))
        try:
            return sum(x * change(y)[..., None] for x, y in zip(out, w, strict=True)), total
        except ValueError:  # these shapes do not even broadcast
            return np.empty(0), total

    for change in (turned, reshaped):
        yield "axes of lse", functools.partial(weights, change=change)
    yield "axes of lse", lambda out, lse: merged(out, np.stack([*map(turned_if_square, lse)]))
    yield from of_turned_lse()


def of_turned_lse() -> Wrongs:
    def changed_lse(out, lse, *, change):
        right, total = merged(out, lse)
        return right, change(total)

    for change in (turned, reshaped, turned_if_square):
        yield "axes of lse", functools.partial(changed_lse, change=change)


def turned(lse):
    return lse.swapaxes(1, 2)


def reshaped(lse):
    return turned(lse).reshape(lse.shape)


def turned_if_square(lse):
    """The order of the axes is guessed from their sizes, so equal sizes are swapped."""
    return turned(lse) if lse.shape[1] == lse.shape[2] else lse
