"""Mistakes of kernels in what they attend to: keys, lengths, masks, positions and sinks."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .reference import attend, merge, scores

Wrongs = Iterator[tuple[str, Callable]]


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


def attend_to_scores(s, seen, v, sinks=None):
    """(out, lse) of given scores (b, l, h, n), where they are seen."""
    n = s.shape[-1]
    v = np.repeat(np.asarray(v, np.float64), s.shape[2] // v.shape[2], axis=2)
    parts = [(np.zeros((*s.shape[:-1], v.shape[-1])), np.full(s.shape[:-1], -np.inf))]
    for i in range(n):
        value = np.broadcast_to(v[:, None, i], (*s.shape[:-1], v.shape[-1]))
        parts.append((value, np.where(seen[..., i], s[..., i], -np.inf)))
    if sinks is not None:
        parts.append((0 * parts[0][0], np.broadcast_to(sinks, s.shape[:-1])))
    return merge(parts)


def of_keys() -> Wrongs:
    def some(q, k, v, *, kept, or_all=True, **options):
        """A slice of the keys; where it is empty, all of them or none."""
        n = k.shape[1]
        which = kept(n) if len(range(n)[kept(n)]) or not or_all else slice(None)
        if "mask" in options:
            options["mask"] = options["mask"][..., which]
        if "key_positions" in options:
            options["key_positions"] = options["key_positions"][which]
        if "kv_lengths" in options:
            before = range(n)[which].start if len(range(n)[which]) else n
            options["kv_lengths"] = np.maximum(options["kv_lengths"] - before, 0)
        return attend(q, k[:, which], v[:, which], **options)

    def to_whole_blocks(q, k, v, *, rule, given, **options):
        """Lengths are rounded, down or up; where none are given it is that of all keys, or none."""
        n = k.shape[1]
        if given and "kv_lengths" not in options:
            return attend(q, k, v, **options)
        lengths = np.asarray(options.get("kv_lengths", np.full(len(q), n)))
        return attend(q, k, v, **options | {"kv_lengths": np.minimum(rule(lengths), n)})

    def last_of_the_row(q, k, v, *, by, **options):
        n = k.shape[1]
        lengths = np.asarray(options.get("kv_lengths", np.full(len(q), n)))
        return attend(q, k, v, **options | {"kv_lengths": np.clip(lengths + by, 0, n)})

    for or_all in (True, False):
        for kept in (lambda n: slice(1, None), lambda n: slice(0, -1)):
            yield "keys left out", functools.partial(some, kept=kept, or_all=or_all)
    yield "keys left out", functools.partial(last_of_the_row, by=-1)
    for block in (2, 4, 8, 10, 16, 20, 32):
        for or_all in (True, False):
            for kept in (
                lambda n, b=block: slice(0, max(n - b, 0)),
                lambda n, b=block: slice(0, max(-(-n // b) - 1, 0) * b),
                lambda n, b=block: slice(b, None),
                lambda n, b=block: slice(0, b),
                lambda n, b=block: slice(max(n - b, 0), None),
                lambda n, b=block: slice(max(-(-n // b) - 1, 0) * b, None),
            ):
                yield "keys left out", functools.partial(some, kept=kept, or_all=or_all)
            partial = functools.partial(some, kept=lambda n, b=block: slice(0, n // b * b))
            yield "a partial block left out", functools.partial(partial, or_all=or_all)
        rules = (
            ("a partial block left out", lambda x, b=block: x // b * b),
            ("keys beyond the length", lambda x, b=block: -(-x // b) * b),
            ("keys beyond the length", lambda x, b=block: (x // b + 1) * b),
        )
        for (name, rule), given in itertools.product(rules, (False, True)):
            yield name, functools.partial(to_whole_blocks, rule=rule, given=given)
    yield "keys beyond the length", functools.partial(last_of_the_row, by=1)
    for of_all in (
        lambda x: np.full(len(x), x[0]),
        lambda x: np.full(len(x), x.max()),
        lambda x: np.full(len(x), x.min()),
        lambda x: np.full(len(x), x[-1]),
    ):
        yield "one row's length for all", _with(kv_lengths=of_all)
    yield "lengths ignored", _without("kv_lengths")
    yield "mask ignored", _without("mask")
    yield "positions ignored", _without("query_positions", "key_positions")


def of_masks() -> Wrongs:
    yield "mask inverted", _with(mask=lambda x: ~x)
    yield "one row's mask for all", _with(mask=lambda x: np.repeat(x[:1], len(x), axis=0))
    yield "one row's mask for all", _with(mask=lambda x: np.repeat(x[:, :, :1], x.shape[2], 2))
    yield "one row's mask for all", _with(mask=lambda x: np.repeat(x[:, :, -1:], x.shape[2], 2))

    def with_scores(q, k, v, *, names, change, **options):
        """Hidden keys that one of these options hides have another score than −∞."""
        if not any(name in options for name in names):
            return attend(q, k, v, **options)
        others = {name: x for name, x in options.items() if name not in names}
        sinks = others.pop("sinks", None)
        s = scores(q, k, **others)
        seen = ~np.isneginf(scores(q, k, **{x: y for x, y in options.items() if x != "sinks"}))
        return attend_to_scores(change(s, seen), ~np.isneginf(s), v, sinks)

    def after_the_softmax(q, k, v, *, names, **options):
        _, lse = attend(q, k, v, **{x: y for x, y in options.items() if x not in names})
        seen, lse_of_seen = attend(q, k, v, **options)
        share = np.where(np.isneginf(lse_of_seen), 0, np.exp(lse_of_seen - lse))
        return seen * share[..., None], lse

    families = (("mask",), ("kv_lengths",), ("query_positions", "key_positions"))
    families = (*families, ("mask", "kv_lengths"), sum(families, ()))
    for names in families:
        zero = functools.partial(with_scores, change=lambda s, seen: np.where(seen, s, 0))
        added = functools.partial(with_scores, change=lambda s, seen: s + seen)
        yield "hidden scores are 0", functools.partial(zero, names=names)
        yield "mask added as a number", functools.partial(added, names=names)
        yield "masked after the softmax", functools.partial(after_the_softmax, names=names)

    def bounded(q, k, v, *, bound, query_positions=None, key_positions=None, **options):
        if query_positions is None:
            return attend(q, k, v, **options)
        mask = bound(query_positions, key_positions)
        return attend(q, k, v, mask=mask[None, None], **options)

    yield (
        "a query does not see itself",
        functools.partial(bounded, bound=lambda query, key: key < query[:, None]),
    )
    yield (
        "causal from the first key",
        functools.partial(
            bounded, bound=lambda query, key: np.arange(len(key)) <= np.arange(len(query))[:, None]
        ),
    )
    for bound in _local_bounds():
        yield "local positions", functools.partial(bounded, bound=bound)


def _local_bounds() -> Iterator[Callable]:
    """Which of a device's n keys (l, n) the queries see where their positions are misread."""

    def from_the_last(query, key, *, p):
        """Keys dealt in stripes: number key // p of those on a device."""
        l = len(query)
        at = np.arange(len(key))
        kept = (len(key) - at % p + p - 1) // p
        return at // p <= kept - l + np.arange(l)[:, None]

    def by_place(query, key, *, p):
        return np.arange(len(key)) // p <= query[:, None]

    def as_single_keys(query, key):
        """Stripes of several keys, bounded as if they were of one: ⌈(position + 1 − rank) / p⌉."""
        jumps = np.flatnonzero(np.diff(key) > 1)
        stripe = jumps[0] + 1 if len(jumps) else len(key)
        p = (key[stripe] - key[0]) // stripe if len(jumps) else 1
        rank = key[0] // stripe if len(jumps) else 0
        return np.arange(len(key)) < (query[:, None] + p - rank) // p

    def as_one_device(query, key, *, p, rank):
        """The same, wherever the keys are."""
        return np.arange(len(key)) < (query[:, None] + p - rank) // p

    yield as_single_keys
    for p in range(1, 17):
        yield functools.partial(from_the_last, p=p)
        yield functools.partial(by_place, p=p)
    for p in range(2, 9):
        for rank in range(p):
            yield functools.partial(as_one_device, p=p, rank=rank)


def of_sinks() -> Wrongs:
    def in_lse_alone(q, k, v, *, in_lse, sinks=None, **options):
        without = attend(q, k, v, **options)
        both = attend(q, k, v, sinks=sinks, **options)
        return (without[0], both[1]) if in_lse else (both[0], without[1])

    def once_a_shard(q, k, v, *, p, sinks=None, **options):
        if sinks is None:
            return attend(q, k, v, **options)
        return attend(q, k, v, sinks=sinks + np.log(p), **options)

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
    for p in range(2, 65):
        yield "sinks once a shard", functools.partial(once_a_shard, p=p)
