"""Mistakes that are known of merges, each as a merge that makes it.

A kernel makes the same mistakes among its keys, each of which is a shard, or among blocks of them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .judge import Mistake
from .merge_forms import clean, each_way, flawed, in_pairs, in_turn, merged, of_parts
from .rounding import rounded
from .signs import NO_KEYS, SIGNS, SIXTEEN_BITS
from .solving import Family

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
        "counted twice": "every shard, and every key, counts once: where do two of them overlap?",
        "weights of other shards": "a weight belongs to the out of its own shard",
        "epsilon in the sum": "a constant in the denominator outweighs small sums: select instead",
    }
)
Wrongs = Iterator[tuple[str, Callable]]


def merge_mistakes() -> Iterator[Mistake]:
    yield from SIGNS
    once = (
        of_no_keys,
        of_pivots,
        of_divisions,
        of_weights,
        of_shards,
        of_logs,
        of_rounding,
        of_axes,
    )
    forms = list(itertools.chain(*(family() for family in once)))
    turned = (of_pivots, of_divisions, of_weights, of_sums_of_logs, in_blocks)
    forms += [(name, in_turn(wrong)) for family in turned for name, wrong in family()]
    for name, wrong in itertools.chain(forms, of_sums_of_logs(), in_blocks()):
        yield Mistake(name, of_parts(wrong))
    for name, wrong in epsilons():
        yield Family(name, of_parts(wrong), 1e-20, 0.1)


def of_no_keys() -> Wrongs:
    for name, flag in (
        ("lse +inf for no keys", "reads_inf"),
        ("stale NaN", "selects"),
        ("NaN for no keys", "guarded"),
    ):
        for wrong in each_way(functools.partial(flawed, **{flag: False})):
            yield name, wrong

    def zeros_for_no_keys(out, lse):
        """Memory that a shard without keys never wrote: zeros, in both."""
        none = np.isinf(lse)
        return merged(np.where(none[..., None], 0, out), np.where(none, 0, lse))

    yield "no keys as lse 0", zeros_for_no_keys


def of_pivots() -> Wrongs:
    def over(axes):
        return lambda lse: np.broadcast_to(lse.max(axis=axes, keepdims=True)[0], lse[0].shape)

    pivots = {
        "exp overflows": [lambda lse: np.zeros_like(lse[0])],
        "pivot of other rows": [
            over((0, *others)) for others in ((1, 2, 3), (1,), (2,), (3,), (1, 2), (2, 3), (1, 3))
        ],
        "pivot is not the maximum": [
            lambda lse: lse.min(axis=0),
            lambda lse: lse[0],
            lambda lse: lse[-1],
            lambda lse: lse.mean(axis=0),
        ],
    }
    for name, forms in pivots.items():
        dtypes = ("float16", "float32", "float64") if len(forms) == 1 else ("float32", "float64")
        for pivot, dtype, guarded in itertools.product(forms, dtypes, (True, False)):
            yield name, functools.partial(flawed, pivot=pivot, dtype=dtype, guarded=guarded)


def in_blocks() -> Wrongs:
    """What goes wrong in a loop over blocks: sums that keep an old maximum."""

    def stale(out, lse, *, rescaled):
        out, lse = clean(out, lse)
        m, d, n = np.full(lse.shape[1:], -np.inf), 0, 0
        for block, block_lse in zip(out, lse, strict=True):
            new = np.maximum(m, block_lse)
            old = np.where(np.isneginf(m), 0, np.exp(m - new))
            w = np.where(np.isneginf(block_lse), 0, np.exp(block_lse - new))
            d = d * (old if rescaled == "d" else 1) + w
            n = (
                n * (old if rescaled == "n" else np.ones_like(old))[..., None]
                + w[..., None] * block
            )
            m = new
        return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)

    for rescaled in ("", "d", "n"):
        yield "stale pivot", functools.partial(stale, rescaled=rescaled)


def of_divisions() -> Wrongs:
    def not_divided(out, lse, *, pivot):
        right, total = merged(out, lse)
        m = clean(out, lse)[1].max(axis=0) if pivot else 0
        return right * np.where(np.isneginf(total), 0, np.exp(total - m))[..., None], total

    for pivot in (True, False):
        yield "not divided", functools.partial(not_divided, pivot=pivot)


def of_weights() -> Wrongs:
    def mean(out, lse, *, of_all=False):
        out, cleaned = clean(out, lse)
        counted = np.ones(lse.shape) if of_all else np.isfinite(cleaned) * 1.0
        sums = (out * counted[..., None]).sum(axis=0)
        return sums / np.maximum(counted.sum(axis=0), 1)[..., None], merged(out, lse)[1]

    def moved(out, lse, *, order):
        """Each out with the lse of another shard."""
        out, lse = clean(out, lse)
        total = merged(out, lse)[1]
        w = np.exp(order(lse) - np.where(np.isneginf(total), 0, total))
        return np.einsum("p...,p...d->...d", w, out), total

    def exchanged(lse):
        return lse[[1, 0, *range(2, len(lse))]] if len(lse) > 1 else lse

    yield "outs not weighted", mean
    yield "outs not weighted", functools.partial(mean, of_all=True)
    for order in (lambda x: np.roll(x, 1, 0), lambda x: np.roll(x, -1, 0), exchanged):
        yield "weights of other shards", functools.partial(moved, order=order)


def of_shards() -> Wrongs:
    """Of which one is left out, or counted twice."""

    def some(out, lse, *, kept, in_lse=True):
        found = merged(out[kept], lse[kept]) if len(lse[kept]) else merged(out, lse)
        return found if in_lse else (found[0], merged(out, lse)[1])

    yield "a shard left out", in_pairs(merged, odd=False)
    for kept, in_lse in itertools.product((slice(0, -1), slice(1, None)), (True, False)):
        yield "a shard left out", functools.partial(some, kept=kept, in_lse=in_lse)
    for again in (0, -1):
        yield (
            "counted twice",
            lambda out, lse, i=again: merged(*(np.concatenate([x, x[[i]]]) for x in (out, lse))),
        )


def of_sums_of_logs() -> Wrongs:
    def added(out, lse, *, also_in_out, kept, dtype):
        """The sum of all lse; where only finite ones are kept, no keys are left out of it."""
        lse = lse.astype(dtype)
        total = np.where(np.isinf(lse) & kept, 0, lse).sum(axis=0)
        pivot = total
        right = merged(out, lse)[0]
        if kept:
            out, lse = clean(out, lse)
            total = np.where(np.isinf(lse).all(axis=0), -np.inf, total)
        return (out * np.exp(lse - pivot)[..., None]).sum(axis=0) if also_in_out else right, total

    for flags in itertools.product((True, False), (True, False), ("float32", "float64")):
        options = dict(zip(("also_in_out", "kept", "dtype"), flags, strict=True))
        yield "lse + block_lse", functools.partial(added, **options)


def of_logs() -> Wrongs:
    def of_maximum(out, lse, *, left):
        """lse is the maximum alone, or what is left of it."""
        right, total = merged(out, lse)
        m = clean(out, lse)[1].max(axis=0)
        return right, np.where(np.isneginf(m), m, total - m) if left else m

    def in_base(out, lse, *, read, written):
        """Read in another base, written in another base; None: lse as if nothing were wrong."""
        wrong, total = merged(out, lse * read)
        return wrong, merged(out, lse)[1] if written is None else total * written

    ln2 = np.log(2)
    bases = ((1, 1 / ln2), (ln2, 1), (1 / ln2, 1), (ln2, 1 / ln2), (ln2, None), (1 / ln2, None))
    for read, written in bases:
        yield "log base 2", functools.partial(in_base, read=read, written=written)
    yield "lse without its maximum", functools.partial(of_maximum, left=True)
    yield "lse is the maximum", functools.partial(of_maximum, left=False)


def of_rounding() -> Wrongs:
    def of_outs(out, lse, *, dtype):
        return merged(rounded(np.float32(out), dtype).astype(np.float64), lse)

    def of_result(out, lse, *, dtype):
        right, total = merged(out, lse)
        return right, rounded(total, dtype).astype(np.float64)

    def of_lse(out, lse, *, dtype, back):
        wrong, total = merged(out, rounded(lse, dtype).astype(np.float64))
        back = {"all": rounded(total, dtype), "read": total, "out": merged(out, lse)[1]}[back]
        return wrong, back.astype(np.float64)

    for dtype in ("bfloat16", "float16"):
        for wrong in each_way(functools.partial(of_outs, dtype=dtype)):
            yield "sums in 16 bits", wrong
        for back in ("all", "read", "out"):
            yield f"lse in {dtype}", functools.partial(of_lse, dtype=dtype, back=back)
        for wrong in (of_result, functools.partial(of_lse, back="all")):
            yield f"lse in {dtype}", in_turn(functools.partial(wrong, dtype=dtype))
            yield f"lse in {dtype}", in_pairs(functools.partial(wrong, dtype=dtype))


def epsilons() -> Wrongs:
    """Merges that add a `number` to the sum of all weights."""

    def wrong(out, lse, *, number, pivot, in_out, in_lse):
        right, total = merged(out, lse)
        m = clean(out, lse)[1].max(axis=0) if pivot else np.zeros(total.shape)
        m = np.where(np.isneginf(m), 0, m)
        with_epsilon = m + np.logaddexp(total - m, np.log(number))
        share = np.exp(total - with_epsilon)[..., None]
        return right * share if in_out else right, with_epsilon if in_lse else total

    for pivot, (in_out, in_lse) in itertools.product(
        (True, False), ((True, True), (True, False), (False, True))
    ):
        options = {"pivot": pivot, "in_out": in_out, "in_lse": in_lse}
        yield "epsilon in the sum", functools.partial(wrong, **options)


def of_axes() -> Wrongs:
    """Weights whose axes of queries and heads change places, or that are read as if they had."""

    def weights(out, lse, *, change, turned):
        total = merged(out, lse)[1]
        out, cleaned = clean(out, lse)
        w = np.exp(cleaned - np.where(np.isinf(total), 0, total))
        try:
            wrong = sum(x * change(y) for x, y in zip(out, w, strict=True))
        except ValueError:  # these shapes do not even broadcast
            wrong = np.empty(0)
        return wrong, total.swapaxes(1, 2) if turned else total

    changes = (
        lambda w: w.swapaxes(1, 2)[..., None],
        lambda w: w,
        lambda w: w.swapaxes(1, 2),
        lambda w: reshaped(w)[..., None],
    )
    for change, turned in itertools.product(changes, (False, True)):
        yield "axes of lse", functools.partial(weights, change=change, turned=turned)
    yield from of_turned_lse()
    yield "axes of lse", lambda out, lse: merged(out, np.stack([*map(turned_if_square, lse)]))


def of_turned_lse() -> Wrongs:
    for change in (lambda lse: lse.swapaxes(1, 2), reshaped, turned_if_square):
        yield "axes of lse", functools.partial(_changed_lse, change)


def _changed_lse(change, out, lse):
    right, total = merged(out, lse)
    return right, change(total)


def reshaped(lse):
    return lse.swapaxes(1, 2).reshape(lse.shape)


def turned_if_square(lse):
    """The order of the axes is guessed from their sizes."""
    return lse.swapaxes(1, 2) if lse.shape[1] == lse.shape[2] else lse
