"""Mistakes of kernels in what they attend to: keys, lengths, masks, positions and sinks."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .merge_mistakes import Wrongs
from .reference import attend, scores, softmax


def _with(**changes: Callable) -> Callable:
    """A kernel whose options are changed where they are given: name=change(its value)."""

    def wrong(q, k, v, **options):
        for name, change in changes.items():
            if name in options:
                options[name] = change(options[name])
        return attend(q, k, v, **options)

    return wrong


def _without(*names: str) -> Callable:
    def wrong(q, k, v, **options):
        return attend(q, k, v, **{name: x for name, x in options.items() if name not in names})

    return wrong


def of_keys() -> Wrongs:
    def some(q, k, v, *, kept, or_all=True, **options):
        """A slice of the keys; where it is empty, all of them or none."""
        n = k.shape[1]
        seen = np.isin(np.arange(n), np.arange(n)[kept(n)])
        seen = np.ones(n, bool) if or_all and not seen.any() else seen
        mask = np.broadcast_to(options.get("mask", True) & seen, (len(q), 1, q.shape[1], n))
        return attend(q, k, v, **options | {"mask": mask})

    def other_lengths(q, k, v, *, rule, given, **options):
        """Lengths are rounded; where none are given it is that of all keys, or none."""
        n = k.shape[1]
        if given and "kv_lengths" not in options:
            return attend(q, k, v, **options)
        lengths = np.asarray(options.get("kv_lengths", np.full(len(q), n)))
        return attend(q, k, v, **options | {"kv_lengths": np.clip(rule(lengths), 0, n)})

    def again(q, k, v, *, which, sinks=None, **options):
        """Keys that are counted twice."""
        s = scores(q, k, **options)
        twice = np.isin(np.arange(k.shape[1]), which(np.arange(k.shape[1])))
        return softmax(s + np.log(2) * twice, v, sinks)

    slices = [lambda n: slice(1, None), lambda n: slice(0, -1)]
    rules = [("keys left out", lambda x: x - 1), ("keys beyond the length", lambda x: x + 1)]
    for block in (2, 4, 8, 10, 16, 20, 32):
        slices += [
            lambda n, b=block: slice(0, max(n - b, 0)),
            lambda n, b=block: slice(0, max(-(-n // b) - 1, 0) * b),
            lambda n, b=block: slice(b, None),
            lambda n, b=block: slice(0, b),
        ]
        for or_all in (True, False):
            kept = functools.partial(some, kept=lambda n, b=block: slice(0, n // b * b))
            yield "a partial block left out", functools.partial(kept, or_all=or_all)
        rules += [
            ("a partial block left out", lambda x, b=block: x // b * b),
            ("keys beyond the length", lambda x, b=block: -(-x // b) * b),
            ("keys beyond the length", lambda x, b=block: (x // b + 1) * b),
        ]
    for kept, or_all in itertools.product(slices, (True, False)):
        yield "keys left out", functools.partial(some, kept=kept, or_all=or_all)
    for (name, rule), given in itertools.product(rules, (False, True)):
        yield name, functools.partial(other_lengths, rule=rule, given=given)
    for which in (lambda at: at, lambda at: at[:1], lambda at: at[-1:]):
        yield "counted twice", functools.partial(again, which=which)
    for parts, by in itertools.product((2, 4, 8), (-1, 0)):
        edges = functools.partial(_edges, parts=parts, by=by)
        yield "counted twice", functools.partial(again, which=edges)
    for of_all in (lambda x: x[0], lambda x: x[-1], np.max, np.min):
        of_one = _with(kv_lengths=lambda x, f=of_all: np.full(len(x), f(x)))
        yield "one row's length for all", of_one
    yield "lengths ignored", _without("kv_lengths")
    yield "mask ignored", _without("mask")
    yield "positions ignored", _without("query_positions", "key_positions")


def _edges(at: np.ndarray, *, parts: int, by: int) -> np.ndarray:
    """The keys where one of several parts ends and another begins."""
    size = -(-len(at) // parts)
    return np.arange(size, len(at), size) + by


def of_masks() -> Wrongs:
    yield "mask inverted", _with(mask=lambda x: ~x)
    yield "one row's mask for all", _with(mask=lambda x: np.repeat(x[:1], len(x), axis=0))
    yield "one row's mask for all", _with(mask=lambda x: np.repeat(x[:, :, :1], x.shape[2], 2))
    yield "one row's mask for all", _with(mask=lambda x: np.repeat(x[:, :, -1:], x.shape[2], 2))

    def other_scores(q, k, v, *, names, change, sinks=None, **options):
        """Hidden keys that one of these options hides have another score than −∞."""
        if not any(name in options for name in names):
            return attend(q, k, v, sinks=sinks, **options)
        others = {name: x for name, x in options.items() if name not in names}
        s = scores(q, k, **others)
        return softmax(change(s, ~np.isneginf(scores(q, k, **options))), v, sinks)

    def after_the_softmax(q, k, v, *, names, **options):
        _, lse = attend(q, k, v, **{x: y for x, y in options.items() if x not in names})
        seen, lse_of_seen = attend(q, k, v, **options)
        share = np.where(np.isneginf(lse_of_seen), 0, np.exp(lse_of_seen - lse))
        return seen * share[..., None], lse

    families = (("mask",), ("kv_lengths",), ("query_positions", "key_positions"))
    families = (*families, ("mask", "kv_lengths"), sum(families, ()))
    zero = functools.partial(other_scores, change=lambda s, seen: np.where(seen, s, 0 * s))
    added = functools.partial(other_scores, change=lambda s, seen: s + seen)
    for names in families:
        yield "hidden scores are 0", functools.partial(zero, names=names)
        yield "mask added as a number", functools.partial(added, names=names)
        yield "masked after the softmax", functools.partial(after_the_softmax, names=names)

    def bounded(q, k, v, *, bound, query_positions=None, key_positions=None, **options):
        if query_positions is None:
            return attend(q, k, v, **options)
        mask = bound(query_positions[:, None], key_positions)
        return attend(q, k, v, mask=mask[None, None], **options)

    for name, bound in _bounds():
        yield name, functools.partial(bounded, bound=bound)


def _bounds() -> Wrongs:
    """Which of a device's n keys the queries (l, 1) see where their positions are misread."""

    def from_the_last(query, key, *, p):
        """Keys dealt in stripes: number key // p of those on a device."""
        l, at = len(query), np.arange(len(key))
        kept = (len(key) - at % p + p - 1) // p
        return at // p <= kept - l + np.arange(l)[:, None]

    def as_single_keys(query, key):
        """Stripes of several keys, bounded as if they were of one: ⌈(position + 1 − rank) / p⌉."""
        jumps = np.flatnonzero(np.diff(key) > 1)
        stripe = jumps[0] + 1 if len(jumps) else len(key)
        p = (key[stripe] - key[0]) // stripe if len(jumps) else 1
        rank = key[0] // stripe if len(jumps) else 0
        return as_one_device(query, key, p=p, rank=rank)

    def as_one_device(query, key, *, p, rank):
        """The same, wherever the keys are."""
        return np.arange(len(key)) < (query + p - rank) // p

    yield "a query does not see itself", lambda query, key: key < query
    yield (
        "causal from the first key",
        lambda query, key: np.arange(len(key)) <= np.arange(len(query))[:, None],
    )
    yield "local positions", as_single_keys
    for p in (1, 2, 3, 4, 8, 16):
        yield "local positions", functools.partial(from_the_last, p=p)
        yield "local positions", lambda query, key, p=p: np.arange(len(key)) // p <= query
    for p in (2, 3, 4, 8):
        for rank in range(p):
            yield "local positions", functools.partial(as_one_device, p=p, rank=rank)


def of_sinks() -> Iterator[tuple[str, Callable]]:
    def in_lse_alone(q, k, v, *, in_lse, sinks=None, **options):
        without = attend(q, k, v, **options)
        both = attend(q, k, v, sinks=sinks, **options)
        return (without[0], both[1]) if in_lse else (both[0], without[1])

    def not_in_the_maximum(q, k, v, *, dtype, sinks=None, **options):
        out, lse = attend(q, k, v, **options)
        if sinks is None:
            return out, lse
        m = scores(q, k, **options).max(axis=-1)
        d = np.exp(lse - m) + np.exp((sinks - m).astype(dtype))
        return out * (np.exp(lse - m) / d)[..., None], m + np.log(d)

    for dtype in ("float16", "float32", "float64"):
        yield "sinks not in the maximum", functools.partial(not_in_the_maximum, dtype=dtype)
    yield "sinks ignored", _without("sinks")
    for in_lse in (False, True):
        yield "sinks ignored", functools.partial(in_lse_alone, in_lse=in_lse)


def shared_sinks(q, k, v, *, number, sinks=None, **options):
    """A sink on every one of so many shards."""
    sinks = None if sinks is None else sinks + np.log(number)
    return attend(q, k, v, sinks=sinks, **options)
