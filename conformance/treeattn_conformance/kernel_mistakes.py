"""Mistakes that are known of kernels of attention, each as a kernel that makes it.

A kernel merges its keys, of which each is a shard: its mistakes are those of its scores, here, and
those of its merge, which `merge_mistakes` has.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from . import merge_mistakes as merges
from .judge import Mistake
from .key_mistakes import of_keys, of_masks, of_sinks, shared_sinks
from .merge_forms import merged
from .merge_mistakes import MERGE_CURES, Wrongs
from .reference import attend, scores, softmax
from .signs import NO_KEYS, SIGNS, SIXTEEN_BITS
from .solving import Family

SHARED = (  # with merges
    "log base 2",
    "axes of lse",
    "lse without its maximum",
    "lse is the maximum",
    "not divided",
    "exp overflows",
    "pivot of other rows",
    "pivot is not the maximum",
    "stale pivot",
    "counted twice",
    "epsilon in the sum",
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
    for family in (of_scores, of_heads, of_lse, of_sums, of_keys, of_masks, of_sinks, of_the_merge):
        for name, wrong in family():
            yield Mistake(name, wrong)
    for rule in (
        lambda given, d, c: (given or d**-0.5) * c,
        lambda given, d, c: given or c,
        lambda given, d, c: c,
        lambda given, d, c: (given or 1) * c,
    ):
        yield Family("scale", functools.partial(scaled, rule=rule), 1e-4, 1e4)
    yield Family("a cap on scores", capped, 0.5, 5000.0)
    yield Family("sinks once a shard", shared_sinks, 1.5, 5000.0, whole=True)
    for name, wrong in merges.epsilons():
        yield Family(name, of_shards(wrong, 1), 1e-20, 0.1)


# What a kernel has in common with a merge


def of_shards(wrong: Callable, block: int, apart: bool = False) -> Callable:
    """A kernel that merges blocks of so many keys with a wrong merge.

    apart: sinks are merged after it, and rightly; else they are one more shard
    """

    def kernel(q, k, v, *, sinks=None, number=None, **options):
        s = np.moveaxis(scores(q, k, **options), -1, 0)
        values = np.repeat(np.asarray(v, np.float64), q.shape[2] // k.shape[2], axis=2)
        values = np.broadcast_to(values.swapaxes(0, 1)[:, :, None], (*s.shape, v.shape[-1]))
        if block > 1:
            blocks = [slice(i, i + block) for i in range(0, len(s), block)]
            parts = [merged(values[x], s[x]) for x in blocks]
            values, s = map(np.stack, zip(*parts, strict=True))
        sink = None
        if sinks is not None:
            sink = np.zeros((1, *values.shape[1:])), np.broadcast_to(sinks, (1, *s.shape[1:]))
        if sink is not None and not apart:
            values, s = map(np.concatenate, zip((values, s), sink, strict=True))
        found = wrong(values, s) if number is None else wrong(values, s, number=number)
        if sink is None or not apart:
            return found
        both = zip(found, (x[0] for x in sink), strict=True)
        return merged(*map(np.stack, both))

    return kernel


def of_the_merge() -> Wrongs:
    for name, wrong in merges.of_pivots():
        for apart in (False, True):
            yield name, of_shards(wrong, 1, apart)
    for family in (merges.of_divisions, merges.of_logs, merges.of_turned_lse):
        for name, wrong in family():
            yield name, of_shards(wrong, 1)
    for block in (1, 4, 8, 16, 32):
        for name, wrong in merges.in_blocks():
            yield name, of_shards(wrong, block)
    for block, rescaled in itertools.product((4, 8, 16, 32), ("", "d", "n")):
        yield "stale pivot", functools.partial(online, block=block, rescaled=rescaled)


def online(q, k, v, *, block, rescaled, sinks=None, **options):
    """A loop over blocks whose maximum is one of scores, and whose sums keep an old one."""
    s = scores(q, k, **options)
    m, d, n = np.full(s.shape[:3], -np.inf), 0, 0
    for i in range(0, s.shape[-1], block):
        part = slice(i, i + block)
        out, lse = softmax(s[..., part], v[:, part])
        new = np.maximum(m, s[..., part].max(axis=-1))
        old, w = (np.where(np.isneginf(x), 0, np.exp(x - new)) for x in (m, lse))
        d = d * (old if rescaled == "d" else 1) + w
        n = n * (old if rescaled == "n" else np.ones_like(old))[..., None] + w[..., None] * out
        m = new
    found = n / np.where(d == 0, 1, d)[..., None], m + np.log(d)
    if sinks is None:
        return found
    sink = np.zeros_like(found[0]), np.broadcast_to(sinks, m.shape)
    return merged(*map(np.stack, zip(found, sink, strict=True)))


# Scores, heads, and what becomes of lse


def scaled(q, k, v, *, rule, number=None, **options):
    options["scale"] = rule(options.get("scale"), q.shape[-1], number)
    return attend(q, k, v, **options)


def capped(q, k, v, *, number, sinks=None, **options):
    s = scores(q, k, **options)
    return softmax(np.where(np.isneginf(s), s, number * np.tanh(s / number)), v, sinks)


def of_scores() -> Wrongs:
    for rule in (
        lambda given, d, _: d**-0.5,
        lambda given, d, _: (given or d**-0.5) ** 2,
        lambda given, d, _: (given or 1) * d**-0.5,
    ):
        yield "scale", functools.partial(scaled, rule=rule)


def of_heads() -> Wrongs:
    def tiled(q, k, v, **options):
        groups = q.shape[2] // k.shape[2]
        return attend(q, *(np.concatenate([x] * groups, axis=2) for x in (k, v)), **options)

    def first(q, k, v, *, of_queries=False, **options):
        q = np.repeat(q[:, :, :1], q.shape[2], axis=2) if of_queries else q
        return attend(q, k[:, :, :1], v[:, :, :1], **options)

    def regrouped(q, k, v, *, order, in_out, in_lse, **options):
        out, lse = attend(q, k, v, **options)
        heads = order(np.arange(q.shape[2]))
        return out[:, :, heads] if in_out else out, lse[:, :, heads] if in_lse else lse

    def in_groups(heads, groups):
        return heads.reshape(groups, -1).T.ravel() if len(heads) % groups == 0 else heads

    yield "heads tiled", tiled
    for of_queries in (False, True):
        yield "first head for all", functools.partial(first, of_queries=of_queries)
    orders = [functools.partial(np.roll, shift=by) for by in (-3, -2, -1, 1, 2, 3)]
    orders += [functools.partial(in_groups, groups=groups) for groups in (2, 3)]
    orders += [lambda heads: heads[::-1]]
    both = ((True, True), (True, False), (False, True))
    for order, (in_out, in_lse) in itertools.product(orders, both):
        options = {"order": order, "in_out": in_out, "in_lse": in_lse}
        yield "heads regrouped", functools.partial(regrouped, **options)


def of_lse() -> Wrongs:
    def times(q, k, v, *, factor, **options):
        out, lse = attend(q, k, v, **options)
        return out, lse * factor(options.get("scale", q.shape[-1] ** -0.5))

    def of_unscaled(q, k, v, **options):
        return attend(q, k, v, **options)[0], attend(q, k, v, **options | {"scale": 1})[1]

    yield "log base 10", functools.partial(times, factor=lambda scale: 1 / np.log(10))
    yield "lse of other scores", of_unscaled
    for power in (-2, -1, 1, 2):
        yield "lse of other scores", functools.partial(times, factor=lambda x, p=power: x**p)
    for c in (np.log(2), np.log(2) ** 2, 1 / np.log(2) ** 2):
        yield "lse of other scores", functools.partial(times, factor=lambda scale, c=c: c)


def of_sums() -> Wrongs:
    def maximum(q, k, *, sinks=None, **options):
        m = scores(q, k, **options).max(axis=-1)
        return m if sinks is None else np.maximum(m, sinks)

    def one_more(q, k, v, *, one, guarded, in_out, in_lse, **options):
        out, lse = attend(q, k, v, **options)
        m = maximum(q, k, **options)
        pivot = np.where(np.isneginf(m), 0, m)
        d = np.exp(lse - pivot)
        total = d + one(pivot)
        wrong = pivot + np.log(total)
        wrong = wrong if guarded else np.where(np.isneginf(m), m, wrong)
        return out * (d / total)[..., None] if in_out else out, wrong if in_lse else lse

    def of_all_keys(q, k, v, *, sinks=None, in_out, in_lse, **options):
        """Sums relative to the maximum of the seen keys, and another maximum added again."""
        out, lse = attend(q, k, v, sinks=sinks, **options)
        seen = scores(q, k, **options).max(axis=-1)
        rise = np.fmax.reduce(scores(q, k, scale=options.get("scale")), axis=-1) - seen
        rise = np.where(np.isneginf(seen), 0, rise)
        smaller = out * np.exp(-rise)[..., None]
        return smaller if in_out else out, lse + rise if in_lse else lse

    ones = (np.ones_like, lambda m: np.exp(-m), lambda m: np.exp(np.float32(-m)))
    both = ((True, True), (True, False), (False, True))
    for in_out, in_lse in both:
        for one, guarded in itertools.product(ones, (True, False)):
            options = {"one": one, "guarded": guarded, "in_out": in_out, "in_lse": in_lse}
            yield "one more in the sum", functools.partial(one_more, **options)
        yield "maximum of other keys", functools.partial(of_all_keys, in_out=in_out, in_lse=in_lse)
