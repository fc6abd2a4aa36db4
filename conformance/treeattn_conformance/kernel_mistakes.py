"""Known mistakes of kernels of attention, each as a kernel that makes it.

A kernel merges its keys as if each key were a shard. In most mistakes the scores are wrong, and the
merge is right: the right kernel with other options or other arguments. In the others the scores
are right, and one of `merge_mistakes` merges them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from . import merge_mistakes as merges
from .judge import Asked, Mistake
from .merge_mistakes import MERGE_CURES, Wrongs, merged
from .pairs import Family, PairMistake
from .reference import attend, scores, softmax
from .signs import SIGN_CURES, SIGNS

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
    SIGN_CURES
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


POSITIONS = ("query_positions", "key_positions")


def kernel_mistakes() -> Iterator[Mistake]:
    """Known mistakes, one for each form."""
    yield from (*SIGNS, Regrouped("heads regrouped", attend))
    for name, wrong in itertools.chain(of_heads(), of_lse(), of_keys(), of_masks(), of_sums()):
        yield Mistake(name, wrong)
    for name, wrong in itertools.chain(of_numbers(), of_sinks(), of_logs()):
        yield PairMistake(name, wrong)
    for rule in (
        lambda given, d, c: (given or d**-0.5) * c,
        lambda given, d, c: (given or d**-0.5) ** c,
        lambda given, d, c: given or c,
        lambda given, d, c: c,
        lambda given, d, c: (given or 1) * c,
    ):
        yield Family("scale", functools.partial(scaled, rule=rule), 1e-4, 1e4)
    yield Family("a cap on scores", capped, 0.5, 5000.0)
    yield Family("sinks once a shard", shared_sinks, 1.5, 5000.0, whole=True)
    for wrong in merges.epsilons():
        yield Family("epsilon in the sum", of_shards(wrong), 1e-20, 0.1)


# Right scores, merged wrongly


def of_shards(wrong: Callable, block: int = 1, *, apart: bool = False, maxima: bool = False):
    """A kernel that merges blocks of `block` keys with a wrong merge.

    apart: sinks are merged rightly afterwards; otherwise they are one more shard
    maxima: the merge gets the largest score of each block, too
    """

    def kernel(q, k, v, *, sinks=None, **options):
        number = {"number": options.pop("number")} if "number" in options else {}
        s = np.moveaxis(scores(q, k, **options), -1, 0)
        values = np.repeat(np.asarray(v, np.float64), q.shape[2] // k.shape[2], axis=2)
        values = np.broadcast_to(values.swapaxes(0, 1)[:, :, None], (*s.shape, v.shape[-1]))
        blocks = [slice(i, i + block) for i in range(0, len(s), block)]
        largest = {"maxima": [s[x].max(axis=0) for x in blocks]} if maxima else {}
        if block > 1:
            parts = [merged(values[x], s[x]) for x in blocks]
            values, s = map(np.stack, zip(*parts, strict=True))
        if sinks is None:
            return wrong(values, s, **largest, **number)
        sink = np.zeros((1, *values.shape[1:])), np.broadcast_to(sinks, (1, *s.shape[1:]))
        if apart or maxima:
            keys = wrong(values, s, **largest, **number)
            return merged(*(np.stack([x, y[0]]) for x, y in zip(keys, sink, strict=True)))
        return wrong(*map(np.concatenate, zip((values, s), sink, strict=True)), **number)

    return kernel


def of_sums() -> Wrongs:
    for name, wrong in merges.wrong_pivots():
        for apart in (False, True):
            yield name, of_shards(wrong, apart=apart)
    for name, wrong in merges.wrong_sums():
        yield name, of_shards(wrong)
    for block, wrong, maxima in itertools.product((4, 8, 16, 32), merges.STALE, (False, True)):
        yield "stale pivot", of_shards(wrong, block, maxima=maxima)


def of_logs() -> Wrongs:
    for name, wrong in (*merges.wrong_logs(), *merges.of_turned_lse()):
        yield name, of_shards(wrong)


# Other scores


def scaled(q, k, v, *, rule, number, **options):
    options["scale"] = rule(options.get("scale"), q.shape[-1], number)
    return attend(q, k, v, **options)


def capped(q, k, v, *, number, sinks=None, **options):
    s = scores(q, k, **options)
    return softmax(np.where(np.isneginf(s), s, number * np.tanh(s / number)), v, sinks)


def of_heads() -> Wrongs:
    def tiled(q, k, v, **options):
        groups = q.shape[2] // k.shape[2]
        return attend(q, *(np.concatenate([x] * groups, axis=2) for x in (k, v)), **options)

    def first(q, k, v, *, of_queries, **options):
        q = np.repeat(q[:, :, :1], q.shape[2], axis=2) if of_queries else q
        return attend(q, k[:, :, :1], v[:, :, :1], **options)

    yield "heads tiled", tiled
    for of_queries in (False, True):
        yield "first head for all", functools.partial(first, of_queries=of_queries)


class Regrouped(Mistake):
    """Heads in another order, of out, lse or both; the order is found from the answer."""

    def explains(self, asked: Asked, same: Callable) -> np.ndarray:
        found = list(asked.question.right)
        for i, (x, right) in enumerate(zip(asked.answer, asked.question.right, strict=True)):
            if x is not None and x.shape == right.shape:
                heads = [np.moveaxis(np.nan_to_num(y), 2, 0) for y in (x, right)]
                off = [[np.abs(one - other).sum() for other in heads[1]] for one in heads[0]]
                order = np.argmin(off, axis=1)
                found[i] = right[:, :, order] if len({*order.tolist()}) == len(order) else right
        return same(asked.question, asked.answer, found)


def of_lse() -> Wrongs:
    def times(q, k, v, *, factor, **options):
        out, lse = attend(q, k, v, **options)
        return out, lse * factor(options.get("scale", q.shape[-1] ** -0.5))

    def of_unscaled(q, k, v, **options):
        return attend(q, k, v, **options)[0], attend(q, k, v, **options | {"scale": 1})[1]

    yield "log base 10", functools.partial(times, factor=lambda scale: 1 / np.log(10))
    yield "lse of other scores", of_unscaled
    yield "lse of other scores", functools.partial(times, factor=lambda scale: scale)


def of_numbers() -> Wrongs:
    def one_more(q, k, v, *, one, guarded, **options):
        out, lse = attend(q, k, v, **options)
        m = scores(q, k, **{x: y for x, y in options.items() if x != "sinks"}).max(axis=-1)
        m = np.maximum(m, options.get("sinks", -np.inf))
        pivot = np.where(np.isneginf(m), 0, m)
        d = np.exp(lse - pivot)
        total = d + one(pivot)
        wrong = pivot + np.log(total)
        return out * (d / total)[..., None], wrong if guarded else np.where(d == 0, lse, wrong)

    def of_all_keys(q, k, v, *, sinks=None, **options):
        """The sum is relative to the seen keys' maximum; out and lse use that of all keys."""
        out, lse = attend(q, k, v, sinks=sinks, **options)
        seen = scores(q, k, **options).max(axis=-1)
        rise = np.fmax.reduce(scores(q, k, scale=options.get("scale")), axis=-1) - seen
        rise = np.where(np.isneginf(seen), 0, rise)
        return out * np.exp(-rise)[..., None], lse + rise

    for one, guarded in itertools.product((np.ones_like, lambda m: np.exp(-m)), (True, False)):
        yield "one more in the sum", functools.partial(one_more, one=one, guarded=guarded)
    yield "maximum of other keys", of_all_keys


# Other keys


def with_(**changes: Callable) -> Callable:
    """A kernel that replaces the value of each given option `name` by change(value)."""

    def wrong(q, k, v, **options):
        changed = {
            name: change(options[name]) for name, change in changes.items() if name in options
        }
        return attend(q, k, v, **options | changed)

    return wrong


def without(*names: str) -> Callable:
    def wrong(q, k, v, **options):
        return attend(q, k, v, **{name: x for name, x in options.items() if name not in names})

    return wrong


def some_keys(kept: Callable, or_all: bool = True) -> Callable:
    """A kernel that sees the slice kept(n) of n keys; if it is empty, all keys or none."""

    def wrong(q, k, v, **options):
        n = k.shape[1]
        seen = np.isin(np.arange(n), np.arange(n)[kept(n)])
        seen = options.get("mask", True) & (seen | (or_all and not seen.any()))
        return attend(
            q, k, v, **options | {"mask": np.broadcast_to(seen, (len(q), 1, q.shape[1], n))}
        )

    return wrong


def lengths(rule: Callable) -> Callable:
    return with_(kv_lengths=lambda x: np.maximum(rule(x), 0))


def of_keys() -> Wrongs:
    def twice(q, k, v, *, sinks=None, **options):
        return softmax(scores(q, k, **options) + np.log(2), v, sinks)

    for b in (1, 2, 4, 8, 10, 16, 20, 32):
        for kept in (
            lambda n, b=b: slice(0, max(n - b, 0)),
            lambda n, b=b: slice(0, max(-(-n // b) - 1, 0) * b),
            lambda n, b=b: slice(b, None),
            lambda n, b=b: slice(0, b),
        ):
            yield "keys left out", some_keys(kept)
            yield "keys left out", some_keys(kept, or_all=False)
        if b > 1:
            yield "a partial block left out", some_keys(lambda n, b=b: slice(0, n // b * b))
            yield "a partial block left out", lengths(lambda x, b=b: x // b * b)
            yield "keys beyond the length", lengths(lambda x, b=b: -(-x // b) * b)
        yield "keys beyond the length", lengths(lambda x, b=b: (x // b + 1) * b)
    yield "keys left out", lengths(lambda x: x - 1)
    yield "counted twice", twice
    for of_all in (lambda x: x[0], lambda x: x[-1], np.max, np.min):
        yield "one row's length for all", lengths(lambda x, f=of_all: np.full(len(x), f(x)))
    yield "lengths ignored", without("kv_lengths")
    yield "mask ignored", without("mask")
    yield "positions ignored", without(*POSITIONS)


def of_masks() -> Wrongs:
    yield "mask inverted", with_(mask=np.logical_not)
    for one in (np.s_[:1], np.s_[:, :, :1], np.s_[:, :, -1:]):
        yield "one row's mask for all", with_(mask=lambda x, i=one: np.broadcast_to(x[i], x.shape))

    def other_scores(q, k, v, *, names, change, sinks=None, **options):
        """Keys that one of the options `names` hides have another score than −∞."""
        s = scores(q, k, **{name: x for name, x in options.items() if name not in names})
        changed = change(s, ~np.isneginf(scores(q, k, **options))) if names & options.keys() else s
        return softmax(changed, v, sinks)

    def after_the_softmax(q, k, v, *, names, **options):
        _, lse = without(*names)(q, k, v, **options)
        seen, lse_of_seen = attend(q, k, v, **options)
        share = np.where(np.isneginf(lse_of_seen), 0, np.exp(lse_of_seen - lse))
        return seen * share[..., None], lse

    zero = functools.partial(other_scores, change=lambda s, seen: np.where(seen, s, 0 * s))
    added = functools.partial(other_scores, change=np.add)
    for names in ({"mask"}, {"kv_lengths"}, {*POSITIONS}, {"mask", "kv_lengths", *POSITIONS}):
        yield "hidden scores are 0", functools.partial(zero, names=names)
        yield "mask added as a number", functools.partial(added, names=names)
        yield "masked after the softmax", functools.partial(after_the_softmax, names=names)

    def bounded(q, k, v, *, bound, query_positions=None, key_positions=None, **options):
        if query_positions is None:
            return attend(q, k, v, **options)
        mask = bound(query_positions[:, None], key_positions)
        return attend(q, k, v, mask=mask[None, None], **options)

    for name, bound in bounds():
        yield name, functools.partial(bounded, bound=bound)


def bounds() -> Wrongs:
    """The keys (n,) that queries (l, 1) see on a device that misreads their positions."""

    def from_the_last(query, key, *, p):
        """Keys in stripes: a key at position `key` is key number key // p of its device."""
        l, at = len(query), np.arange(len(key))
        kept = (len(key) - at % p + p - 1) // p
        return at // p <= kept - l + np.arange(l)[:, None]

    def as_single_keys(query, key):
        """Stripes of several keys, with the bound of one-key stripes:
        ⌈(position + 1 − rank) / p⌉."""
        jumps = np.flatnonzero(np.diff(key) > 1)
        stripe = jumps[0] + 1 if len(jumps) else len(key)
        p = (key[stripe] - key[0]) // stripe if len(jumps) else 1
        rank = key[0] // stripe if len(jumps) else 0
        return np.arange(len(key)) < (query + p - rank) // p

    yield "a query does not see itself", lambda query, key: key < query
    yield "causal from the first key", lambda query, key: np.tri(len(query), len(key), dtype=bool)
    yield "local positions", as_single_keys
    for p in (1, 2, 3, 4, 8, 16):
        yield "local positions", functools.partial(from_the_last, p=p)


def of_sinks() -> Wrongs:
    def not_in_the_maximum(q, k, v, *, dtype, sinks=None, **options):
        out, lse = attend(q, k, v, **options)
        if sinks is None:
            return out, lse
        m = scores(q, k, **options).max(axis=-1)
        d = np.exp(lse - m) + np.exp((sinks - m).astype(dtype))
        return out * (np.exp(lse - m) / d)[..., None], m + np.log(d)

    for dtype in ("float16", "float32", "float64"):
        yield "sinks not in the maximum", functools.partial(not_in_the_maximum, dtype=dtype)
    yield "sinks ignored", without("sinks")


def shared_sinks(q, k, v, *, number, **options):
    """A sink that counts once on each of `number` shards."""
    return with_(sinks=lambda x: x + np.log(number))(q, k, v, **options)
