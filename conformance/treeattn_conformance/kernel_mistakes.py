"""Mistakes that are known of kernels of attention, each as a kernel that makes it."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .judging import Mistake
from .merging import MERGE_CURES, reshaped, turned_if_square
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

Wrongs = Iterator[tuple[str, Callable]]


def kernel_mistakes() -> Iterator[Mistake]:
    """Known mistakes; several for one that has several forms."""
    yield from SIGNS
    for family in (_of_lse, _of_sums, _of_scores, _of_heads, _of_keys, _of_masks, _of_sinks):
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


def _of_keys() -> Wrongs:
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


def _of_masks() -> Wrongs:
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


def _of_sinks() -> Wrongs:
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
