"""Mistakes that are known of kernels of attention, each as a kernel that makes it."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .judging import Mistake
from .key_mistakes import Wrongs, attend_to_scores, of_keys, of_masks, of_sinks
from .merge_mistakes import MERGE_CURES, reshaped, turned_if_square
from .reference import attend, merge, scores
from .signs import NO_KEYS, SIGNS, SIXTEEN_BITS

SHARED = (  # with merges
    "log base 2",
    "axes of lse",
    "lse without its maximum",
    "lse is the maximum",
    "not divided",
    "exp overflows",
    "pivot of other rows",
)
KERNEL_CURES = (
    NO_KEYS
    | SIXTEEN_BITS
    | {name: MERGE_CURES[name] for name in SHARED}
    | {
        "log base 10": "lse is in base 10: multiply by log 10",
        "lse of other scores": "lse is of the scores that softmax saw: scaled once, in one base",
        "one more in the sum": "log1p, or softmax with a 1 in its denominator, counts a key that "
        "is not there",
        "a cap on scores": "c · tanh(s / c) is another attention: turn the cap off",
        "scale": "scores are q·k · scale, with 1/√d where no scale is given",
        "maximum of other keys": "lse = max + log Σ exp(s − max): the same maximum, of seen keys",
        "heads tiled": "query head i reads key head i // (h // h_kv): repeat each, do not tile all",
        "first head for all": "query head i reads key head i // (h // h_kv)",
        "heads regrouped": "a device has other heads than it merged: regroup before, or send back",
        "keys left out": "all keys count: also the last block, the first key and the last",
        "a partial block left out": "the last block of keys may be partial: round its number up",
        "keys beyond the length": "mask the rest of the last block: only kv_lengths keys count",
        "one row's length for all": "every row of the batch has a length of its own",
        "lengths ignored": "only kv_lengths[i] keys of row i count",
        "mask ignored": "a query sees only keys where the mask is True",
        "mask inverted": "True is where a query may see a key",
        "one row's mask for all": "each row of the batch and each query has a mask of its own",
        "hidden scores are 0": "a score of 0 is the weight of a key: hidden ones are −∞",
        "masked after the softmax": "mask the scores: what is hidden counts in no denominator",
        "mask added as a number": "adding True adds 1: select −∞ where it is False",
        "positions ignored": "a query sees the keys up to its own position only",
        "a query does not see itself": "position of key ≤ position of query, not <",
        "causal from the first key": "the queries are the last of the text: query i sees key j for "
        "j ≤ n − l + i",
        "local positions": "compare positions in the text: key j of a stripe is at j · p + rank",
        "sinks ignored": "a sink adds exp(sink) to the denominator, also when lse is returned",
        "sinks not in the maximum": "a sink is one more key: subtract the maximum of all",
        "sinks once a shard": "a sink is one more key: add it on one device, or after the merge",
    }
)


def kernel_mistakes() -> Iterator[Mistake]:
    """Known mistakes; several for one that has several forms."""
    yield from SIGNS
    for family in (_of_lse, _of_sums, _of_scores, _of_heads, of_keys, of_masks, of_sinks):
        for name, wrong in family():
            yield Mistake(name, wrong)


def _after(change: Callable) -> Callable:
    """change(out, lse, maximum) -> (out, lse) of a right kernel's; the maximum is of the scores."""

    def wrong(q, k, v, *, sinks=None, **options):
        out, lse = attend(q, k, v, sinks=sinks, **options)
        m = scores(q, k, **options).max(axis=-1)
        m = m if sinks is None else np.maximum(m, sinks)
        return change(out, lse, m)

    return wrong


def _of_lse() -> Wrongs:
    yield "log base 2", _after(lambda out, lse, m: (out, lse / np.log(2)))
    yield "log base 10", _after(lambda out, lse, m: (out, lse / np.log(10)))
    yield "axes of lse", _after(lambda out, lse, m: (out, lse.swapaxes(1, 2)))
    yield "axes of lse", _after(lambda out, lse, m: (out, reshaped(lse)))
    yield "axes of lse", _after(lambda out, lse, m: (out, turned_if_square(lse)))
    yield "lse is the maximum", _after(lambda out, lse, m: (out, m))
    yield (
        "lse without its maximum",
        _after(lambda out, lse, m: (out, np.where(np.isneginf(m), m, lse - m))),
    )

    def of_unscaled(q, k, v, **options):
        return attend(q, k, v, **options)[0], attend(q, k, v, **options | {"scale": 1})[1]

    def times_scale(q, k, v, *, power, **options):
        out, lse = attend(q, k, v, **options)
        return out, lse * options.get("scale", q.shape[-1] ** -0.5) ** power

    yield "lse of other scores", of_unscaled
    for power in (-2, -1, 1, 2):
        yield "lse of other scores", functools.partial(times_scale, power=power)
    for factor in (np.log(2), np.log(2) ** 2, 1 / np.log(2) ** 2):
        yield (
            "lse of other scores",
            lambda *qkv, c=factor, **options: (
                attend(*qkv, **options)[0],
                c * attend(*qkv, **options)[1],
            ),
        )


def _of_sums() -> Wrongs:
    def without_division(out, lse, m, *, pivot):
        weight = np.exp(lse - (m if pivot else 0))
        return out * np.where(np.isneginf(lse), 0, weight)[..., None], lse

    def one_more(out, lse, m, *, one, guarded, in_out, in_lse):
        pivot = np.where(np.isneginf(m), 0, m)
        d = np.exp(lse - pivot)
        total = d + one(pivot)
        wrong = pivot + np.log(total)
        wrong = wrong if guarded else np.where(np.isneginf(m), m, wrong)
        return out * (d / total)[..., None] if in_out else out, wrong if in_lse else lse

    for pivot in (True, False):
        yield "not divided", _after(functools.partial(without_division, pivot=pivot))
    ones = (np.ones_like, lambda m: np.exp(-m), lambda m: np.exp(np.float32(-m)))
    for one, guarded in itertools.product(ones, (True, False)):
        for in_out, in_lse in ((True, True), (True, False), (False, True)):
            options = {"one": one, "guarded": guarded, "in_out": in_out, "in_lse": in_lse}
            yield "one more in the sum", _after(functools.partial(one_more, **options))

    def with_pivot(q, k, v, *, sinks=None, pivot, dtype, guarded, apart, **options):
        """As textbooks have it, in this dtype and relative to another number.

        apart: sinks are merged after it, and rightly
        """
        if apart and sinks is not None:
            wrong = with_pivot(
                q, k, v, pivot=pivot, dtype=dtype, guarded=guarded, apart=True, **options
            )
            return merge([wrong, (0 * wrong[0], np.broadcast_to(sinks, wrong[1].shape))])
        s = scores(q, k, **options)
        if sinks is not None:  # one more key
            s = np.concatenate([s, np.broadcast_to(sinks[:, None], (*s.shape[:-1], 1))], axis=-1)
        m = np.broadcast_to(pivot(s), s.shape[:-1])
        m = np.where(np.isneginf(m), 0, m)
        w = np.exp((s - m[..., None]).astype(dtype))
        d = w.sum(axis=-1)
        v = np.repeat(np.nan_to_num(v).astype(dtype), q.shape[2] // v.shape[2], axis=2)
        n = np.einsum("blhn,bnhd->blhd", w[..., : v.shape[1]], v)
        return n / (np.where(d == 0, 1, d) if guarded else d)[..., None], m + np.log(d)

    def over(axes):
        return lambda s: s.max(axis=axes, keepdims=True)[..., 0]

    pivots = [("exp overflows", lambda s: np.zeros(1))]
    pivots += [
        ("pivot of other rows", over(axes))
        for axes in ((0, 1, 2, 3), (0, 3), (1, 3), (2, 3), (1, 2, 3), (0, 1, 3), (0, 2, 3))
    ]
    for name, pivot in pivots:
        flags = itertools.product(("float16", "float32", "float64"), (True, False), (True, False))
        for dtype, guarded, apart in flags:
            options = {"pivot": pivot, "dtype": dtype, "guarded": guarded, "apart": apart}
            yield name, functools.partial(with_pivot, **options)

    def of_all_keys(q, k, v, *, sinks=None, in_out, in_lse, **options):
        """Sums relative to the maximum of the seen keys, and another maximum added again."""
        out, lse = attend(q, k, v, sinks=sinks, **options)
        seen = scores(q, k, **options).max(axis=-1)
        rise = np.fmax.reduce(scores(q, k, scale=options.get("scale")), axis=-1) - seen
        rise = np.where(np.isneginf(seen), 0, rise)
        smaller = out * np.exp(-rise)[..., None]
        return smaller if in_out else out, lse + rise if in_lse else lse

    for in_out, in_lse in ((True, True), (True, False), (False, True)):
        yield "maximum of other keys", functools.partial(of_all_keys, in_out=in_out, in_lse=in_lse)


def _of_scores() -> Wrongs:
    def scaled(q, k, v, *, rule, **options):
        return attend(q, k, v, **options | {"scale": rule(options.get("scale"), q.shape[-1])})

    for rule in (
        lambda given, d: 1,
        lambda given, d: 1 / d,
        lambda given, d: given if given else 1,
        lambda given, d: given if given else 1 / d,
        lambda given, d: d**-0.5,
        lambda given, d: (given or d**-0.5) ** 2,
        lambda given, d: (given or 1) * d**-0.5,
        lambda given, d: (given or d**-0.5) * np.log2(np.e),
        lambda given, d: (given or d**-0.5) * np.log(2),
        lambda given, d: 0.5,
        lambda given, d: 64**-0.5,
        lambda given, d: 128**-0.5,
    ):
        yield "scale", functools.partial(scaled, rule=rule)

    def capped(q, k, v, *, cap, sinks=None, **options):
        s = scores(q, k, **options)
        return attend_to_scores(cap * np.tanh(s / cap), ~np.isneginf(s), v, sinks)

    for cap in (5, 10, 15, 20, 25, 30, 50, 100):
        yield "a cap on scores", functools.partial(capped, cap=float(cap))


def _of_heads() -> Wrongs:
    def tiled(q, k, v, **options):
        groups = q.shape[2] // k.shape[2]
        return attend(q, *(np.concatenate([x] * groups, axis=2) for x in (k, v)), **options)

    def first(q, k, v, **options):
        return attend(q, k[:, :, :1], v[:, :, :1], **options)

    def first_of_all(q, k, v, **options):
        first_queries = np.repeat(q[:, :, :1], q.shape[2], axis=2)
        return first(first_queries, k, v, **options)

    def regrouped(q, k, v, *, order, in_out, in_lse, **options):
        out, lse = attend(q, k, v, **options)
        heads = order(np.arange(q.shape[2]))
        return out[:, :, heads] if in_out else out, lse[:, :, heads] if in_lse else lse

    def in_groups(heads, groups):
        return heads.reshape(groups, -1).T.ravel() if len(heads) % groups == 0 else heads

    yield "heads tiled", tiled
    yield "first head for all", first
    yield "first head for all", first_of_all
    orders = [functools.partial(np.roll, shift=by) for by in (-3, -2, -1, 1, 2, 3)]
    orders += [functools.partial(in_groups, groups=groups) for groups in (2, 3)]
    orders += [lambda heads: heads[::-1]]
    for order in orders:
        for in_out, in_lse in ((True, True), (True, False), (False, True)):
            options = {"order": order, "in_out": in_out, "in_lse": in_lse}
            yield "heads regrouped", functools.partial(regrouped, **options)
