"""Mistakes that are known of merges, each as a merge that makes it."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from .judging import Mistake
from .merge_forms import clean, each_way, flawed, in_pairs, in_turn
from .reference import merge
from .rounding import rounded
from .signs import NO_KEYS, SIGNS, SIXTEEN_BITS

MERGE_CURES = (
    NO_KEYS
    | SIXTEEN_BITS
    | {
        "log base 2": "lse is in base 2 on one side and natural on the other: multiply by log 2",
        "axes of lse": "lse is (b, l, h) here, (b, h, l) in many kernels: transpose, not reshape",
        "lse + block_lse": "sums of exponentials add, not their logarithms: use logaddexp",
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
        "a shard left out": "every shard counts, the first and the last as well",
        "weights of other shards": "a weight belongs to the out of its own shard",
        "epsilon in the sum": "a constant in the denominator outweighs small sums: select instead",
    }
)


def merge_mistakes() -> Iterator[Mistake]:
    """Known mistakes; several for one that has several forms."""
    yield from SIGNS
    families = (_of_no_keys, _of_pivots, _of_weights, _of_lse, _of_rounding, _of_epsilons, _of_axes)
    for family in families:
        for name, wrong in family():
            yield Mistake(name, wrong)


def _of_no_keys():
    for wrong in each_way(functools.partial(flawed, reads_inf=False)):
        yield "lse +inf for no keys", wrong
    for wrong in each_way(functools.partial(flawed, selects=False)):
        yield "stale NaN", wrong
    for wrong in each_way(functools.partial(flawed, guarded=False)):
        yield "NaN for no keys", wrong
    yield "no keys as lse 0", lambda parts: merge([_zeros_for_no_keys(part) for part in parts])


def _zeros_for_no_keys(part):
    """Memory that a shard without keys never wrote: zeros, in both."""
    out, lse = part
    empty = np.isinf(lse)
    return np.where(empty[..., None], 0, out), np.where(empty, 0, lse)


def _of_pivots():
    def of_all_but(axes):
        return lambda lse: np.broadcast_to(lse.max(axis=axes, keepdims=True)[0], lse[0].shape)

    others = [of_all_but(axes) for axes in ((0, 1, 2, 3), (0, 1), (0, 2), (0, 3), (0, 1, 2))]
    others += [of_all_but(axes) for axes in ((0, 2, 3), (0, 1, 3))]
    wrong = {
        "exp overflows": [lambda lse: np.zeros_like(lse[0])],
        "pivot of other rows": others,
        "pivot is not the maximum": [
            lambda lse: lse.min(axis=0),
            lambda lse: lse[0],
            lambda lse: lse[-1],
            lambda lse: lse.mean(axis=0),
        ],
    }
    for name, pivots in wrong.items():
        once = name == "exp overflows"  # in any order the same
        dtypes = ("float16", "float32", "float64") if once else ("float32", "float64")
        for pivot, dtype, guarded in itertools.product(pivots, dtypes, (False, True)):
            at_once = functools.partial(flawed, pivot=pivot, dtype=dtype, guarded=guarded)
            yield name, at_once
            if not once:
                yield name, in_turn(at_once)
    for wrong_merge in (_stale_pivot, in_turn(_stale_pivot)):
        yield "stale pivot", wrong_merge


def _stale_pivot(parts):
    """Sums relative to the maximum so far, which are not rescaled when it rises."""
    m = np.full(parts[0][1].shape, -np.inf)
    d = 0
    n = 0
    for out, lse in parts:
        lse = np.where(np.isposinf(lse), -np.inf, lse)
        m = np.maximum(m, lse)
        w = np.where(np.isneginf(lse), 0, np.exp(lse - m))
        d = d + w
        n = n + w[..., None] * np.where(np.isneginf(lse)[..., None], 0, out)
    return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)


def _of_weights():
    def not_divided(parts, pivot=lambda lse: lse.max(axis=0)):
        out, lse = merge(parts)
        m = pivot(np.stack([x[1] for x in clean(parts)]))
        return out * np.where(np.isneginf(lse), 0, np.exp(lse - m))[..., None], lse

    def mean(parts, kept=lambda lse: np.isfinite(lse)):
        pairs = clean(parts)
        count = sum(kept(lse) * 1.0 for _, lse in pairs)
        sums = sum(out * kept(lse)[..., None] for out, lse in pairs)
        return sums / np.maximum(count, 1)[..., None], merge(parts)[1]

    def moved(parts, by):
        pairs = clean(parts)
        total = merge(parts)[1]
        pivot = np.where(np.isneginf(total), 0, total)
        rolled = [pairs[(i + by) % len(pairs)][1] for i in range(len(pairs))]
        weights = [np.exp(lse - pivot)[..., None] for lse in rolled]
        return sum(out * w for (out, _), w in zip(pairs, weights, strict=True)), total

    def some_of(kept):
        return lambda parts: merge(parts[kept] or parts)

    def exchanged(parts):
        out = clean(parts)
        out[0], out[1 % len(out)] = out[1 % len(out)], out[0]
        pairs = [(a[0], b[1]) for a, b in zip(out, clean(parts), strict=True)]
        return merge(pairs)[0], merge(parts)[1]

    yield "not divided", not_divided
    yield "not divided", functools.partial(not_divided, pivot=lambda lse: 0)
    yield "not divided", in_turn(not_divided)
    yield "outs not weighted", mean
    yield "outs not weighted", functools.partial(mean, kept=lambda lse: np.ones(lse.shape, bool))
    yield "outs not weighted", in_turn(mean)
    yield "weights of other shards", functools.partial(moved, by=1)
    yield "weights of other shards", functools.partial(moved, by=-1)
    yield "weights of other shards", exchanged
    yield "weights of other shards", in_turn(exchanged)
    yield "a shard left out", in_pairs(merge, odd=False)
    for some in (some_of(slice(0, -1)), some_of(slice(1, None))):
        yield "a shard left out", some
        yield "a shard left out", lambda parts, some=some: (some(parts)[0], merge(parts)[1])


def _of_lse():
    def added(parts, *, also_in_out, kept, dtype):
        """The sum of all lse; where only finite ones are kept, no keys are left out of it."""
        parts = [(out, np.asarray(lse, dtype)) for out, lse in parts]
        total = sum(np.where(np.isinf(lse) & kept, 0, lse) for _, lse in parts)
        pivot = total
        if kept:
            parts = clean(parts)
            total = np.where(np.all([np.isinf(lse) for _, lse in parts], axis=0), -np.inf, total)
        out = sum(out * np.exp(lse - pivot)[..., None] for out, lse in parts)
        return out if also_in_out else merge(parts)[0], total

    def in_base(parts, factor):
        return merge([(out, lse * factor) for out, lse in parts])

    def of_maximum(parts, left):
        """lse is the maximum alone, or what is left of it."""
        out, lse = merge(parts)
        m = np.stack([x[1] for x in clean(parts)]).max(axis=0)
        return out, np.where(np.isneginf(m), m, lse - m) if left else m

    ln2 = np.log(2)
    yield "log base 2", lambda parts: (merge(parts)[0], merge(parts)[1] / ln2)
    yield "log base 2", functools.partial(in_base, factor=ln2)
    yield "log base 2", functools.partial(in_base, factor=1 / ln2)
    yield "log base 2", lambda parts: (in_base(parts, ln2)[0], in_base(parts, ln2)[1] / ln2)
    for flags in itertools.product((True, False), (True, False), ("float32", "float64")):
        options = dict(zip(("also_in_out", "kept", "dtype"), flags, strict=True))
        wrong = functools.partial(added, **options)
        yield "lse + block_lse", wrong
        yield "lse + block_lse", in_turn(wrong)
    yield "lse without its maximum", functools.partial(of_maximum, left=True)
    yield "lse is the maximum", functools.partial(of_maximum, left=False)


def _of_rounding():
    def of_outs(parts, dtype):
        return merge([(rounded(np.float32(out), dtype), lse) for out, lse in parts])

    def of_result(parts, dtype):
        out, lse = merge(parts)
        return out, rounded(lse, dtype)

    def of_lse(parts, dtype, back):
        out, lse = merge([(o, rounded(x, dtype)) for o, x in parts])
        return out, {"all": rounded(lse, dtype), "read": lse, "out": merge(parts)[1]}[back]

    for dtype in ("bfloat16", "float16"):
        for wrong in each_way(functools.partial(of_outs, dtype=dtype)):
            yield "sums in 16 bits", wrong
        for back in ("all", "read", "out"):
            yield f"lse in {dtype}", functools.partial(of_lse, dtype=dtype, back=back)
        for two in (of_result, functools.partial(of_lse, back="all")):
            yield f"lse in {dtype}", in_turn(functools.partial(two, dtype=dtype))
            yield f"lse in {dtype}", in_pairs(functools.partial(two, dtype=dtype))


def _of_epsilons():
    def in_the_sum(parts, epsilon, also_in_lse):
        out, lse = merge(parts)
        share = 1 / (1 + epsilon * np.exp(-lse))  # of d / (d + ε)
        return out * share[..., None], np.log(np.exp(lse) + epsilon) if also_in_lse else lse

    def after_the_pivot(parts, epsilon):
        out, lse = merge(parts)
        m = np.stack([x[1] for x in clean(parts)]).max(axis=0)
        pivot = np.where(np.isneginf(m), 0, m)
        with_epsilon = pivot + np.log(np.exp(lse - pivot) + epsilon)
        return out * np.exp(lse - with_epsilon)[..., None], with_epsilon

    for epsilon in 10.0 ** np.arange(-16, -2):
        for also_in_lse in (False, True):
            options = {"epsilon": epsilon, "also_in_lse": also_in_lse}
            yield "epsilon in the sum", functools.partial(in_the_sum, **options)
        yield "epsilon in the sum", functools.partial(after_the_pivot, epsilon=epsilon)


def _of_axes():
    """Weights whose axes of queries and heads change places, or that are read as if they had."""

    def weighed(parts, change, turned):
        lse = merge(parts)[1]
        pivot = np.where(np.isinf(lse), 0, lse)
        pairs = clean(parts)
        try:
            out = sum(out * change(np.exp(x - pivot)) for out, x in pairs)
        except ValueError:  # these shapes do not even broadcast
            out = np.empty(0)
        return out, lse.swapaxes(1, 2) if turned else lse

    changes = (
        lambda w: w.swapaxes(1, 2)[..., None],
        lambda w: w,
        lambda w: w.swapaxes(1, 2),
        lambda w: w.swapaxes(1, 2).reshape(w.shape)[..., None],
        lambda w: w[..., None],
    )
    for i, change in enumerate(changes):
        for turned in (False, True) if i < 4 else (True,):
            yield "axes of lse", functools.partial(weighed, change=change, turned=turned)
    yield "axes of lse", lambda parts: (merge(parts)[0], reshaped(merge(parts)[1]))
    # The order of the axes is guessed from their sizes.
    yield "axes of lse", lambda parts: merge([(out, turned_if_square(lse)) for out, lse in parts])


def reshaped(lse):
    return lse.swapaxes(1, 2).reshape(lse.shape)


def turned_if_square(lse):
    return lse.swapaxes(1, 2) if lse.shape[1] == lse.shape[2] else lse
