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
from .merge_mistakes import SUM_CURES, Wrongs
from .pairs import Family, PairMistake
from .reference import attend, merged, scores, softmax
from .signs import SIGN_CURES, SIGNS, Sign

KERNEL_CURES = (
    SIGN_CURES
    | SUM_CURES
    | {
        "scale": "scores are q·k · scale, with 1/√d where no scale is given",
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
        "hidden scores are 0": "a score of 0 is the weight of a key: hidden ones are −∞",
        "keys lost beside hidden ones": "skip a block only for the queries, rows and tiles that "
        "it is hidden from, and go on behind it; where a hidden one is first, guard −∞ − −∞",
        "another first key of the window": "a query sees itself and `window` − 1 positions before",
        "masked after the softmax": "mask the scores: what is hidden counts in no denominator",
        "positions ignored": "a query sees the keys up to its own position only",
        "a query does not see itself": "position of key ≤ position of query, not <",
        "causal from the first key": "query i of l sees key j of n where j ≤ n − l + i",
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
    for name, option, ways, others in (
        ("keys lost beside hidden ones", "mask", (1, -1), {}),
        ("keys lost beside hidden ones", "window", (1,), {}),
        ("another first key of the window", "window", (-1,), {"window": 10**6}),
    ):
        yield Sign(name, functools.partial(reach, option=option, ways=ways, **others))
    for name, wrong in itertools.chain(of_heads(), of_keys(), of_masks(), of_sums()):
        yield Mistake(name, wrong)
    for name, wrong in itertools.chain(of_lse(), of_sinks()):
        yield PairMistake(name, wrong)
    for rule in (
        lambda given, d, c: (given or d**-0.5) * c,
        lambda given, d, c: (given or d**-0.5) ** c,
        lambda given, d, c: given or c,
        lambda given, d, c: c,
    ):
        yield Family("scale", functools.partial(scaled, rule), 1e-4, 1e4)
    yield Family("sinks once a shard", shared_sinks, 1.5, 5000.0)
    yield from merges.epsilons(of_shards)


# Right scores, merged wrongly


def of_shards(wrong: Callable, block: int = 1, *, apart: bool = False, maxima: bool = False):
    """A kernel that merges blocks of `block` keys with a wrong merge.

    apart: sinks are merged rightly afterwards; otherwise they are one more shard
    maxima: the merge gets the largest score of each block, too
    """

    def kernel(q, k, v, *, sinks=None, **options):
        s = np.moveaxis(scores(q, k, **options), -1, 0)
        values = np.repeat(np.asarray(v, np.float64), q.shape[2] // k.shape[2], axis=2)
        values = np.broadcast_to(values.swapaxes(0, 1)[:, :, None], (*s.shape, v.shape[-1]))
        blocks = [slice(i, i + block) for i in range(0, len(s), block)]
        largest = {"maxima": [s[x].max(axis=0) for x in blocks]} if maxima else {}
        if block > 1:
            parts = [merged(values[x], s[x]) for x in blocks]
            values, s = map(np.stack, zip(*parts, strict=True))
        if sinks is None:
            return wrong(values, s, **largest)
        if not apart:
            return wrong(*with_sink(values, s, sinks))
        out, lse = wrong(values, s, **largest)
        return merged(*with_sink(out[None], lse[None], sinks))

    return kernel


def with_sink(out, lse, sinks):
    """Stacked outs and lses, and one more shard of the sinks."""
    sink = np.zeros((1, *out.shape[1:])), np.broadcast_to(sinks, (1, *lse.shape[1:]))
    return tuple(map(np.concatenate, zip((out, lse), sink, strict=True)))


def of_sums() -> Wrongs:
    for (name, wrong), apart in itertools.product(merges.wrong_pivots(), (False, True)):
        yield name, of_shards(wrong, apart=apart)
    for name, wrong in merges.wrong_sums():
        yield name, of_shards(wrong)
    for block, wrong, maxima in itertools.product((4, 8, 16, 32), merges.STALE, (False, True)):
        yield "stale pivot", of_shards(wrong, block, apart=True, maxima=maxima)


# Other scores


def scaled(rule: Callable, number: float) -> Callable:
    def wrong(q, k, v, **options):
        options["scale"] = rule(options.get("scale"), q.shape[-1], number)
        return attend(q, k, v, **options)

    return wrong


def of_heads() -> Wrongs:
    def tiled(q, k, v, **options):
        groups = q.shape[2] // k.shape[2]
        return attend(q, *(np.concatenate([x] * groups, axis=2) for x in (k, v)), **options)

    def first(q, k, v, **options):
        q = np.repeat(q[:, :, :1], q.shape[2], axis=2)
        return attend(q, k[:, :, :1], v[:, :, :1], **options)

    yield "heads tiled", tiled
    yield "first head for all", first


class Regrouped(Mistake):
    """Heads in another order, of out, lse or both; the order is found from the answer."""

    def explains(self, asked: Asked, same: Callable) -> np.ndarray:
        found = map(self.ordered, asked.answer, asked.question.right)
        return same(asked.question, asked.answer, tuple(found))

    @staticmethod
    def ordered(x: np.ndarray | None, right: np.ndarray) -> np.ndarray:
        """The right answer's heads, each where x has a head that is nearest to it."""
        if x is None or x.shape != right.shape:
            return right
        heads = [np.moveaxis(np.nan_to_num(y), 2, 0) for y in (x, right)]
        off = [[np.abs(one - other).sum() for other in heads[1]] for one in heads[0]]
        order = np.argmin(off, axis=1)
        return right[:, :, order] if len(set(order)) == len(order) else right


def reach(question, out, lse, *, option, ways, **others):
    """Where the keys that count are others than those seen: so many from one end, found by lse.

    A mask hides keys from all heads alike, so a mistake of one head is another mistake.
    """
    off = ~np.isclose(lse, question.right[1])
    shows = off & False
    if option not in question.options or (off != off[..., :1]).any():
        return shows, shows
    q, k, v = question.arguments.values()
    s = scores(q, k, **question.options | others)
    least = lse + 1e-5 + 1e-7 * question.largest
    for way in ways:
        sums = np.logaddexp.accumulate(s[..., ::way], axis=-1)[..., ::way]
        x, y = softmax(np.where(sums <= least[..., None], s, -np.inf), v)
        shows |= np.isclose(out, x, atol=1e-4).all(axis=-1) & np.isclose(lse, y, atol=1e-4)
    shows &= np.isfinite(lse) if others else np.isneginf(s).any(axis=-1)
    return shows, shows


def of_lse() -> Wrongs:
    for name, wrong in (*merges.wrong_logs(), *merges.of_turned_lse()):
        yield name, of_shards(wrong)


# Other keys


def with_(name: str, change: Callable) -> Callable:
    """A kernel that replaces the value of an option, where it is given, by change(value)."""

    def wrong(q, k, v, **options):
        if name in options:
            options[name] = change(options[name])
        return attend(q, k, v, **options)

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
    return with_("kv_lengths", lambda x: np.maximum(rule(x), 0))


def of_keys() -> Wrongs:
    # A block of one key is never partial: two forms are right then, and explain no wrong number.
    for b in (32, 20, 16, 8, 4, 2, 1):
        for kept in (
            lambda n, b=b: slice(0, max(n - b, 0)),
            lambda n, b=b: slice(0, max(-(-n // b) - 1, 0) * b),
            lambda n, b=b: slice(b, None),
            lambda n, b=b: slice(0, b),
        ):
            yield "keys left out", some_keys(kept)
            yield "keys left out", some_keys(kept, or_all=False)
        yield "a partial block left out", some_keys(lambda n, b=b: slice(0, n // b * b))
        yield "a partial block left out", lengths(lambda x, b=b: x // b * b)
        yield "keys beyond the length", lengths(lambda x, b=b: -(-x // b) * b)
        yield "keys beyond the length", lengths(lambda x, b=b: (x // b + 1) * b)
    yield "keys left out", lengths(lambda x: x - 1)
    for of_all in (lambda x: x[0], lambda x: x[-1], np.max, np.min):
        yield "one row's length for all", lengths(lambda x, f=of_all: np.full(len(x), f(x)))
    yield "lengths ignored", without("kv_lengths")
    yield "mask ignored", without("mask")
    yield "positions ignored", without(*POSITIONS)


def of_masks() -> Wrongs:
    yield "mask inverted", with_("mask", np.logical_not)

    def replaced(q, k, v, *, rule, guarded, sinks=None, scale=None, **hiding):
        """Hidden keys have other scores than −∞; `guarded`: just for queries that see some key, and
        without a look at NaN."""
        s = np.nan_to_num(scores(q, k, scale=scale))
        hidden = np.isneginf(scores(q, k, **hiding))
        none = guarded & hidden.all(axis=-1, keepdims=True)
        s = np.where(hidden, np.where(none, -np.inf, rule(s)), s)
        return softmax(s, np.nan_to_num(v) if guarded else v, sinks)

    def after_the_softmax(q, k, v, **options):
        _, lse = without("mask", "kv_lengths", *POSITIONS)(q, k, v, **options)
        seen, lse_of_seen = attend(q, k, v, **options)
        return seen * np.exp(lse_of_seen - lse)[..., None], lse

    rules = [("hidden scores are 0", np.zeros_like)]
    for low in merges.LOW:
        for rule in (lambda s, x=low: np.full_like(s, x), lambda s, x=low: s + x):
            rules.append(("−∞ is a number that scores reach", rule))
    for (name, rule), guarded in itertools.product(rules, (True, False)):
        yield name, functools.partial(replaced, rule=rule, guarded=guarded)
    yield "masked after the softmax", after_the_softmax

    def bounded(q, k, v, *, bound, query_positions=None, key_positions=None, **options):
        if query_positions is None:
            return attend(q, k, v, **options)
        mask = bound(query_positions[:, None], key_positions)
        return attend(q, k, v, mask=mask[None, None], **options)

    def from_the_last(query, key, *, p):
        """Keys in stripes: a key at position `key` is key number key // p of its device."""
        l, at = len(query), np.arange(len(key))
        kept = (len(key) - at % p + p - 1) // p
        return at // p <= kept - l + np.arange(l)[:, None]

    for name, bound in (
        ("a query does not see itself", lambda query, key: key < query),
        ("causal from the first key", lambda query, key: np.tri(len(query), len(key), dtype=bool)),
        *(("local positions", functools.partial(from_the_last, p=p)) for p in (1, 2, 3, 4, 8, 16)),
    ):
        yield name, functools.partial(bounded, bound=bound)


def of_sinks() -> Wrongs:
    def not_in_the_maximum(q, k, v, *, dtype, sinks=None, **options):
        out, lse = attend(q, k, v, **options)
        if sinks is None:
            return out, lse
        stacked = with_sink(out[None], lse[None], sinks)
        return merges.flawed(*stacked, pivot=lambda lse: lse[0], dtype=dtype)

    for dtype in ("float32", "float64"):
        yield "sinks not in the maximum", functools.partial(not_in_the_maximum, dtype=dtype)
    yield "sinks ignored", without("sinks")


def shared_sinks(number: float) -> Callable:
    """A sink that counts once on each of `number` shards."""
    return with_("sinks", lambda x: x + np.log(number))
