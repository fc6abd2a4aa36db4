"""Faults in a few lines each, planted by three readers who did not know the table of names.

A fault gets its own name or none. If it gets none, the report still says which numbers are off.
"""

import functools
import itertools

import numpy as np
import pytest
from public_bugs import changed
from right_ones import build, commit, kernel, merge_at_once, merge_two

from treeattn_conformance import attend, check_attention, check_gradients, check_merge, check_tree
from treeattn_conformance.gradients import Slip, backward
from treeattn_conformance.reference import scores, softmax

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check_commit(f):
    return check_tree(commit=f)


# Merges


PIVOT = "m = lse.max(axis=0)"


def one_pivot(parts):
    """As servers batch requests: one maximum for the whole tensor."""
    l = np.stack([l for _, l in parts])
    l = np.where(l == np.inf, -np.inf, l)
    o = np.where(np.isneginf(l)[..., None], 0, np.stack([o for o, _ in parts]))
    m = l.max()
    m = 0 if np.isneginf(m) else m
    w = np.exp(l - m)
    d = w.sum(0)
    return (o * w[..., None]).sum(0) / np.where(d == 0, 1, d)[..., None], m + np.log(d)


def uniform_over_nothing(parts):
    """Two by two, with the lowest number for −∞."""
    lowest = np.finfo(np.float32).min

    def merge_two(a, b):
        m = np.maximum(a[1], b[1])
        x, y = (np.exp(lse - m) for lse in (a[1], b[1]))
        return (a[0] * x[..., None] + b[0] * y[..., None]) / (x + y)[..., None], m + np.log(x + y)

    read = [(np.nan_to_num(o), np.where(np.isinf(l), lowest, l)) for o, l in parts]
    return functools.reduce(merge_two, read)


def left_over(parts):
    """The first out stays as it is in rows without keys."""
    out, lse = merge_at_once(parts)
    return np.where(np.isneginf(lse)[..., None], parts[0][0], out), lse


def equal_lse_lost(parts):
    """If two lse are equal, only one shard counts."""

    def merge_two(a, b):
        hidden = np.where(a[1] == b[1], -np.inf, b[1])
        return merge_at_once([a, (b[0], hidden)])

    return functools.reduce(
        merge_two, parts, (0 * parts[0][0], np.full(parts[0][1].shape, -np.inf))
    )


def swap(parts):
    return [parts[1], parts[0], *parts[2:]] if len(parts) > 1 else parts


def heaviest(parts):
    """Out of the shard with the largest lse alone."""
    out, lse = (np.stack(x) for x in zip(*parts, strict=True))
    first = np.where(np.isinf(lse), -np.inf, lse).argmax(axis=0)
    chosen = np.take_along_axis(out, first[None, ..., None], axis=0)[0]
    right, total = merge_at_once(parts)
    return np.where(np.isneginf(total)[..., None], right, chosen), total


def lse_of_the_first(parts):
    """Merged in turn, and the running lse stays the first shard's."""
    out, lse = parts[0]
    for part in parts[1:]:
        out, _ = merge_two((out, lse), part)
    return out, merge_at_once(parts)[1]


def sign_of_the_sigmoid(parts):
    """The running out and the new block have exchanged their shares."""
    nothing = (0 * parts[0][0], np.full(parts[0][1].shape, -np.inf))
    out, lse = merge_two(nothing, parts[0])
    for part in parts[1:]:
        block, block_lse = merge_two(nothing, part)
        total = np.logaddexp(lse, block_lse)
        share = np.where(np.isneginf(total), 0, np.exp(lse - total))
        out, lse = out + share[..., None] * (block - out), total
    return out, lse


def odd_one_dropped(parts):
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [merge_two(a, b) for a, b in pairs]
    return merge_two(parts[0], (0 * parts[0][0], np.full(parts[0][1].shape, -np.inf)))


def clipped(bound):
    exponent = f"np.where(np.isneginf(lse), lse, np.maximum(lse - pivot, {bound}))"
    return changed(merge_at_once, ("lse - pivot", exponent))


MERGES = {
    "uniform over nothing, in turn": (
        uniform_over_nothing,
        {"mean(V) for no keys", "finite lse for no keys", "NaN lost"},
    ),
    "out of no keys left over": (left_over, set()),
    "of equal lse one lost": (equal_lse_lost, set()),
    "one pivot for the whole tensor": (one_pivot, {"pivot of other rows"}),
    "the smaller lse as pivot": (
        changed(merge_at_once, (PIVOT, "m = lse.min(axis=0)"), ("float64", "float32")),
        {"pivot is not the maximum"},
    ),
    "the first shard's lse as pivot": (
        changed(merge_at_once, (PIVOT, "m = lse[0]"), ("float64", "float32")),
        {"pivot is not the maximum"},
    ),
    "not divided": (
        changed(merge_at_once, ("n / np.where(d > 0, d, 1)[..., None]", "n")),
        {"not divided"},
    ),
    "weights of two shards exchanged": (
        lambda parts: (
            merge_at_once([(a[0], b[1]) for a, b in zip(swap(parts), parts, strict=True)])[0],
            merge_at_once(parts)[1],
        ),
        set(),
    ),
    "the last shard forgotten": (
        lambda parts: merge_at_once(parts[:-1] or parts),
        {"a shard left out"},
    ),
    "outs averaged": (
        lambda parts: (np.mean([o for o, _ in parts], 0), merge_at_once(parts)[1]),
        {"outs not weighted", "mean(V) for no keys", "stale NaN"},
    ),
    "lse without the maximum": (
        changed(merge_at_once, ("pivot + np.log(d)", "np.log(d)")),
        {"lse without its maximum"},
    ),
    "lse of a mean": (changed(merge_at_once, ("np.log(d)", "np.log(d / len(parts))")), set()),
    "out negated": (lambda parts: (-merge_at_once(parts)[0], merge_at_once(parts)[1]), set()),
    "out of the heaviest shard alone": (heaviest, set()),
    "the running lse forgotten": (lse_of_the_first, set()),
    "the sign of the sigmoid": (sign_of_the_sigmoid, set()),
    "the odd one of a tree dropped": (odd_one_dropped, {"a shard left out"}),
    "exponents cut off at -5": (clipped(-5), set()),
    "exponents cut off at -10": (clipped(-10), set()),
    "weights by exp2": (changed(merge_at_once, ("np.exp(", "np.exp2(")), set()),
    "every NaN replaced": (
        lambda parts: merge_at_once([(np.nan_to_num(o), s) for o, s in parts]),
        {"NaN lost"},
    ),
    "the first shard twice": (lambda parts: merge_at_once([*parts, parts[0]]), {"counted twice"}),
}


# Kernels


SCALE = "1 / np.sqrt(q.shape[3]) if scale is None else scale"
SEEN = "seen = visible(q, k, mask, kv_lengths, query_positions, key_positions)"
SCORES = "s = np.where(seen, s, -np.inf)"


def with_option(name, change):
    """The kernel with an option changed where it is given."""

    def f(q, k, v, **options):
        if options.get(name) is not None:
            options[name] = change(options[name])
        return kernel(q, k, v, **options)

    return f


def causal_by_blocks(rows, columns, is_left_out):
    """Blocks of queries, each against the blocks of keys that are not left out."""

    def f(q, k, v, query_positions=None, key_positions=None):
        l, n = q.shape[1], k.shape[1]
        seen = np.ones((l, n), bool)
        if query_positions is not None:
            seen = key_positions <= query_positions[:, None]
            for i, j in itertools.product(range(0, l, rows), range(0, n, columns)):
                at, keys = query_positions[i : i + rows], key_positions[j : j + columns]
                seen[i : i + rows, j : j + columns] &= not is_left_out(at, keys)
        return kernel(q, k, v, mask=np.broadcast_to(seen, (len(q), 1, l, n)))

    return f


def before_the_mask(line):
    return changed(kernel, (SCORES, f"{line}\n    {SCORES}"))


def with_seen(condition):
    """Where positions are given, other keys are seen."""
    given = "query_positions is not None"
    return before_the_mask(f"seen = seen & ({condition}) if {given} else seen")


def with_lengths(change):
    def wrong(q, k, v, *, kv_lengths=None):
        return kernel(q, k, v, kv_lengths=None if kv_lengths is None else change(kv_lengths))

    return wrong


def not_rescaled(which):
    """An online softmax whose old sums of one kind stay relative to an old maximum."""

    def wrong(q, k, v):
        b, l, h, _ = q.shape
        m, d, n = np.full((b, l, h), -np.inf), 0, 0
        for i in range(0, k.shape[1], 4):
            out, lse = kernel(q, k[:, i : i + 4], v[:, i : i + 4])
            new = np.maximum(m, lse)
            w = np.exp(lse - new)
            d = d * (1 if which == "d" else np.exp(m - new)) + w
            n = n * (1 if which == "n" else np.exp(m - new)[..., None]) + w[..., None] * out
            m = new
        return n / d[..., None], m + np.log(d)

    return wrong


KERNELS = {
    "a causal loop that ends where its queries begin": (
        causal_by_blocks(16, 16, lambda at, keys: keys[0] > at[0]),
        set(),
    ),
    "the same of wide blocks": (
        causal_by_blocks(64, 32, lambda at, keys: keys[0] > at[0]),
        set(),
    ),
    "blocks on the diagonal left out": (
        causal_by_blocks(16, 16, lambda at, keys: keys[-1] > at[-1]),
        set(),
    ),
    "not divided": (
        changed(kernel, ("out / divisor[..., None]", "out")),
        {"not divided"},
    ),
    "last block of keys dropped": (
        changed(kernel, (SCORES, "s = np.where(seen & (np.arange(s.shape[3]) < 32), s, -np.inf)")),
        {"keys left out"},
    ),
    "partial page dropped": (
        with_option("kv_lengths", lambda x: x // 8 * 8),
        {"a partial block left out"},
    ),
    "mask inverted": (with_option("mask", lambda x: ~x), {"mask inverted"}),
    "m + log1p(d)": (
        changed(kernel, ("np.log(d)", "np.log1p(d)")),
        {"one more in the sum"},
    ),
    "key < query": (
        changed(
            kernel,
            (
                SEEN,
                f"{SEEN}\n    if query_positions is not None:\n"
                "        seen = seen & (key_positions < query_positions[:, None])",
            ),
        ),
        {"a query does not see itself"},
    ),
    "key head i % h_kv": (
        changed(
            kernel,
            ("np.repeat(k, g, axis=2)", "np.tile(k, (1, 1, g, 1))"),
            ("np.repeat(v, g, axis=2)", "np.tile(v, (1, 1, g, 1))"),
        ),
        {"heads tiled"},
    ),
    "scale ignored": (changed(kernel, (SCALE, "1 / np.sqrt(q.shape[3])")), {"scale"}),
    "1/d": (changed(kernel, ("1 / np.sqrt(q.shape[3])", "1 / q.shape[3]")), {"scale"}),
    "length of row 0": (
        with_option("kv_lengths", lambda x: np.full_like(x, x[0])),
        {"one row's length for all"},
    ),
    "tanh cap": (
        changed(kernel, (SCORES, "s = np.where(seen, 20 * np.tanh(s / 20), -np.inf)")),
        set(),
    ),
    "softmax + 1": (
        changed(kernel, ("d = p.sum(axis=3)", "d = p.sum(axis=3) + np.exp(-m)")),
        {"one more in the sum"},
    ),
    "lse in base 10": (
        changed(kernel, ("(m + np.log(d))", "((m + np.log(d)) / np.log(10))")),
        set(),
    ),
    "lse scaled": (
        changed(kernel, ("(m + np.log(d))", "((m + np.log(d)) * scale)")),
        set(),
    ),
    "values shifted by one key": (lambda q, k, v: kernel(q, k, np.roll(v, 1, axis=1)), set()),
    "keys and values exchanged": (lambda q, k, v: kernel(q, v, k), set()),
    "queries in reverse": (lambda q, k, v: kernel(q[:, ::-1], k, v), set()),
    "out of the next row": (
        lambda q, k, v: (np.roll(kernel(q, k, v)[0], 1, 0), kernel(q, k, v)[1]),
        set(),
    ),
    "every key twice": (
        lambda q, k, v: kernel(q, np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)),
        set(),
    ),
    "half of the head's dimensions": (lambda q, k, v: kernel(q[..., :8], k[..., :8], v), set()),
    "scale squared": (
        changed(kernel, (", k) * scale", ", k) * scale**2")),
        {"scale"},
    ),
    "a key beyond the length": (with_lengths(lambda x: x + 1), {"keys beyond the length"}),
    "a key short of the length": (with_lengths(lambda x: np.maximum(x - 1, 0)), {"keys left out"}),
    "lengths in blocks of 4": (with_lengths(lambda x: -(-x // 4) * 4), {"keys beyond the length"}),
    "the last keys count": (
        before_the_mask(
            "seen = seen if kv_lengths is None else "
            "(np.arange(s.shape[3]) >= s.shape[3] - kv_lengths[:, None])[:, None, None]"
        ),
        set(),
    ),
    "a window of 4": (with_seen("key_positions > query_positions[:, None] - 4"), set()),
    "denominator not rescaled": (not_rescaled("d"), {"stale pivot"}),
    "numerator not rescaled": (not_rescaled("n"), {"stale pivot"}),
    "sinks of key heads": (
        lambda q, k, v, *, sinks=None: kernel(
            q, k, v, sinks=None if sinks is None else np.resize(sinks[: k.shape[2]], q.shape[2])
        ),
        set(),
    ),
    "exponents cut off at -10": (
        changed(kernel, ("np.exp(s - m[..., None])", "np.exp(np.maximum(s - m[..., None], -10))")),
        set(),
    ),
    "the eight likeliest keys": (
        before_the_mask("seen = seen & (s >= np.sort(s)[..., -8:][..., :1])"),
        set(),
    ),
    "probabilities in float16": (
        changed(kernel, ('bhln,bnhd->blhd", p', 'bhln,bnhd->blhd", p.astype(np.float16)')),
        set(),
    ),
    "dropout left on": (
        changed(
            kernel,
            ('bhln,bnhd->blhd", p', 'bhln,bnhd->blhd", p * (np.arange(p.shape[3]) % 7 != 3)'),
        ),
        set(),
    ),
    "out read in other axes": (
        lambda q, k, v: (
            kernel(q, k, v)[0].transpose(0, 2, 1, 3).reshape(q.shape),
            kernel(q, k, v)[1],
        ),
        set(),
    ),
}


# Trees


ITSELF = "            mask[r, i, i] = True"


def with_mask(line):
    """The builder with a line before each node's own place in the mask is set."""
    return changed(build, (ITSELF, f"            {line}\n{ITSELF}"))


TREES = {
    "siblings seen": (with_mask("mask[r, i] |= parents[r] == p"), set()),
    "the parent alone": (
        with_mask("mask[r, i] = False; mask[r, i, max(p, 0)] = p >= 0"),
        {"only the parent seen"},
    ),
    "the first ancestor left out": (with_mask("mask[r, i, 0] = False"), set()),
    "the root not seen": (
        changed(build, (ITSELF, f"{ITSELF}\n            mask[r, i, 0] = i == 0")),
        set(),
    ),
    "depths downwards": (changed(build, ("positions[r, p] + 1", "positions[r, p] - 1")), set()),
    "siblings in a ring": (
        changed(
            build,
            (
                "next_sibling[r, last[p]] = i",
                "next_sibling[r, last[p]] = i; next_sibling[r, i] = last[p]",
            ),
        ),
        set(),
    ),
    "roots are no siblings": (changed(build, ("if p in last:", "if p in last and p >= 0:")), set()),
}
COMMITS = {
    "the path backwards": (
        lambda cache, lengths, accepted: commit(
            cache,
            lengths,
            np.array([[*row[row >= 0][::-1], *row[row < 0]] for row in accepted]),
        ),
        set(),
    ),
    "one too many": (
        lambda cache, lengths, accepted: (
            commit(cache, lengths, accepted)[0],
            commit(cache, lengths, accepted)[1] + 1,
        ),
        set(),
    ),
}


# Where options meet, or beyond a tile: none has a name


def without(kept, dropped):
    """Where the first option is asked, the others are forgotten."""

    def kernel(q, k, v, **options):
        if options.get(kept) is not None:
            options = {name: x for name, x in options.items() if name not in dropped}
        return attend(q, k, v, **options)

    return kernel


def mask_tiles_of_128(q, k, v, mask=None):
    if mask is not None:
        mask = mask[:, :, np.arange(q.shape[1]) % 128]
    return attend(q, k, v, mask=mask)


def sink_without_keys(q, k, v, sinks=None, kv_lengths=None):
    out, lse = attend(q, k, v, sinks=sinks, kv_lengths=kv_lengths)
    if kv_lengths is not None:
        lse[kv_lengths == 0] = -np.inf  # it should be the sink
    return out, lse


def evenly_spaced(q, k, v, query_positions=None, key_positions=None):
    """It reads the first two positions of keys alone."""
    if key_positions is not None:
        first, second = key_positions[:2]
        key_positions = first + (second - first) * np.arange(len(key_positions))
    return attend(q, k, v, query_positions=query_positions, key_positions=key_positions)


TOGETHER = {
    "keys at even distances": evenly_spaced,
    "sinks without a scale": without("sinks", ["scale"]),
    "sinks without lengths": without("sinks", ["kv_lengths"]),
    "lengths without a mask": without("kv_lengths", ["mask"]),
    "lengths without positions": without("kv_lengths", ["query_positions", "key_positions"]),
    "mask tiles of 128 queries": mask_tiles_of_128,
    "a sink without keys": sink_without_keys,
}


# Hidden blocks of keys, or tiles of queries


def kept(mask, rule, block=64, tile=64):
    """The mask; rule says which blocks of keys a tile of queries reads.

    rule(some) -> (blocks,) bool. some (blocks, tile) is where a query sees any key of a block.
    """
    mask = mask.copy()
    starts = range(0, mask.shape[3], block)
    for row in mask[:, 0]:
        for i in range(0, len(row), tile):
            rows = row[i : i + tile]
            some = np.stack([rows[:, j : j + block].any(axis=1) for j in starts])
            rows &= np.repeat(rule(some), block)[: rows.shape[1]]
    return mask


def by_tiles(rule, block=64):
    """A kernel or a backward pass, which computes as if the other blocks were hidden."""

    def wrong(right):
        def f(*arrays, mask=None):
            return right(*arrays, mask=None if mask is None else kept(mask, rule, block))

        return f

    return wrong


def backward_by_tiles(rule, *, loop, size=64):
    """A backward pass with forward's out and lse, whose loop over keys or queries is by tiles."""

    def wrong(q, k, v, dout, mask=None, causal=False):
        right = backward(q, k, v, dout, mask=mask, causal=causal)
        if mask is None and not causal:
            return right
        if q.shape[2] > k.shape[2]:
            raise NotImplementedError("grouped heads")
        s = scores(q, k, mask=mask, causal=causal)
        out, lse = softmax(s, v)
        seen = ~np.isneginf(s[:, :, :1]).swapaxes(1, 2)
        if loop == "keys":
            seen = kept(seen, rule, size, size)
        else:
            seen = kept(seen.swapaxes(2, 3), rule, size, size).swapaxes(2, 3)
        p = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None]) * seen.swapaxes(1, 2)
        dp = np.einsum("blhd,bnhd->blhn", dout, v)
        ds = p * (dp - (dout * out).sum(axis=-1, keepdims=True)) * q.shape[3] ** -0.5
        if loop == "keys":
            return np.einsum("blhn,bnhd->blhd", ds, k), *right[1:]
        return right[0], *(np.einsum("blhn,blhd->bnhd", *x) for x in ((ds, q), (p, dout)))

    return wrong


HIDDEN = {  # {the blocks that are read: rule}
    "up to a hidden one": lambda some: np.logical_and.accumulate(some.any(axis=1)),
    "up to a hole": lambda some: (
        ~np.logical_or.accumulate(np.logical_or.accumulate(some.any(axis=1)) & ~some.any(axis=1))
    ),
    "as many as are seen": lambda some: np.arange(len(some)) < some.any(axis=1).sum(),
    "seen by the first query": lambda some: some[:, 0],
    "seen by the last query": lambda some: some[:, -1],
    "none if the first is hidden": lambda some: np.full(len(some), some[0].any()),
    "none if the last is hidden": lambda some: np.full(len(some), some[-1].any()),
    "none if the first query sees none": lambda some: np.full(len(some), some[:, 0].any()),
    "none if any query sees none": lambda some: np.full(len(some), some.any(axis=0).all()),
    "seen by all queries": lambda some: some.all(axis=1),
}
LOST = {"keys lost beside hidden ones"}
TILES = {"tiles lost beside hidden ones"}
LOW = {"−∞ is a number that scores reach"}


def of_first_row(right):
    def wrong(*arrays, mask=None):
        return right(*arrays, mask=None if mask is None else mask[:1] & np.ones_like(mask))

    return wrong


def dq_alone(wrong):
    """The right dk and dv."""
    return lambda *x, mask=None: (wrong(*x, mask=mask)[0], *backward(*x, mask=mask)[1:])


def hidden_added(low):
    """`low` is added to hidden scores, and queries that see nothing are put right."""

    def wrong(q, k, v, mask=None):
        if mask is None:
            return attend(q, k, v)
        blind = ~mask.any(axis=3)[:, 0, :, None]
        bias = np.where(mask, 0, low).swapaxes(1, 2)
        out, lse = softmax(scores(q, k) + bias, v)
        return np.where(blind[..., None], 0, out), np.where(blind, -np.inf, lse)

    return wrong


def unwritten(q, k, v, dout, mask=None):
    """Where a key is seen by no query, dk and dv hold what was there before."""
    dq, *others = backward(q, k, v, dout, mask=mask)
    seen = True if mask is None else mask.any(axis=2)[:, 0, :, None, None]
    return dq, *(np.where(seen, x, 1) for x in others)


def wider(right):
    return lambda *x, window=None: right(*x, window=window and window + 1)


def times(of_q, of_kv):
    """In four shards: gradients of the sum of all devices' losses, or a sum of equal numbers."""
    return lambda *x: tuple(y * c for y, c in zip(backward(*x), (of_q, of_kv, of_kv), strict=True))


def of_one_shard(q, k, v, dout):
    _, dk, dv = backward(q, k, v, dout)
    return backward(q, k, v, dout, slip=Slip(3, part="first"))[0], dk, dv


def own_key_lost(q, k, v, dout, causal=False):
    """dq of a query whose own key begins a block of 64 lacks this key."""
    dq, dk, dv = backward(q, k, v, dout, causal=causal)
    l = q.shape[1]
    if causal and l > 64:
        out, lse = attend(q, k, v, query_positions=np.arange(l), key_positions=np.arange(l))
        scale = q.shape[3] ** -0.5
        ds = np.exp(scale * (q * k).sum(axis=-1) - lse) * (dout * (v - out)).sum(axis=-1)
        dq[:, 64::64] -= (scale * ds[..., None] * k)[:, 64::64]
    return dq, dk, dv


BEHIND = [
    *(
        (check_attention, f"{what}, {block}", by_tiles(rule, block)(attend), LOST)
        for what, rule in HIDDEN.items()
        for block in (32, 64)
    ),
    *(
        (check_gradients, f"{what}, loop over {loop}", backward_by_tiles(rule, loop=loop), TILES)
        for what, rule in HIDDEN.items()
        for loop in ("keys", "queries")
    ),
    *(
        (
            check_gradients,
            f"{what}, dq of a forward",
            dq_alone(by_tiles(rule)(backward)),
            set(),
        )
        for what, rule in list(HIDDEN.items())[:5]
    ),
    (check_gradients, "row 0's mask", of_first_row(backward), set()),
    (check_gradients, "hidden dk not written", unwritten, set()),
    (check_gradients, "a window of one key more, backward", wider(backward), set()),
    (check_gradients, "p times", times(1, 4), {"p times"}),
    (check_gradients, "dq p times", times(4, 1), {"p times"}),
    (check_gradients, "dq of the first shard", of_one_shard, {"gradients of one shard"}),
    (check_gradients, "a query's own key lost", own_key_lost, TILES),
    (check_attention, "hidden scores less 10,000", hidden_added(-1e4), LOW),
    (
        check_attention,
        "a maximum from 0 on",
        changed(kernel, ("m = s.max(axis=3)", "m = s.max(axis=3, initial=0)")),
        LOW,
    ),
    (
        check_attention,
        "a window of one key more",
        wider(attend),
        {"another first key of the window"},
    ),
]


def dlse_of_128_keys(q, k, v, dout, dlse=None):
    dq, dk, dv = backward(q, k, v, dout, dlse=dlse)
    stopped = backward(q, k, v, dout)
    return dq, np.concatenate([dk[:, :128], stopped[1][:, 128:]], axis=1), dv


def causal_without_dlse(q, k, v, dout, dlse=None, causal=False):
    return backward(q, k, v, dout, dlse=None if causal else dlse, causal=causal)


def from_the_last_key(q, k, v, dout, causal=False):
    """Its causal mask ends at the last key, that of forward at the first."""
    l, n = q.shape[1], k.shape[1]
    if not causal or l == n:
        return backward(q, k, v, dout, causal=causal)
    padded = [np.concatenate([np.zeros((len(x), n - l, *x.shape[2:])), x], 1) for x in (q, dout)]
    dq, dk, dv = backward(padded[0], k, v, padded[1], causal=True)
    return dq[:, n - l :], dk, dv


BACKWARD = {
    "dlse of 128 keys": dlse_of_128_keys,
    "causal without dlse": causal_without_dlse,
    "causal from the last key": from_the_last_key,
}
TO_RETURN = "    return {"
LONG_TREES = {
    "a mask in 32 bits": changed(
        build, (TO_RETURN, f"    mask[:, :, 32:] = mask[:, :, : max(n - 32, 0)]\n{TO_RETURN}")
    ),
    "positions in 8 bits": changed(
        build, (TO_RETURN, f"    positions = positions.astype(np.uint8)\n{TO_RETURN}")
    ),
}
LONG_COMMITS = {
    "sixteen nodes at most": lambda cache, lengths, accepted: commit(
        cache, lengths, accepted[:, :16]
    )
}
PLANTED = [
    (ask, fault, function, names)
    for ask, faults in (
        (check_merge, MERGES),
        (check_attention, KERNELS),
        (check_tree, TREES),
        (check_commit, COMMITS),
    )
    for fault, (function, names) in faults.items()
]
WITHOUT_NAMES = [
    (ask, fault, f, set())
    for ask, faults in (
        (check_attention, TOGETHER),
        (check_gradients, BACKWARD),
        (check_tree, LONG_TREES),
        (check_commit, LONG_COMMITS),
    )
    for fault, f in faults.items()
]
ALL = PLANTED + WITHOUT_NAMES + BEHIND


@pytest.mark.parametrize(
    ("ask", "f", "names"),
    [(ask, f, names) for ask, _, f, names in ALL],
    ids=[fault for _, fault, _, _ in ALL],
)
def test_a_fault_is_seen_and_has_no_wrong_name(ask, f, names):
    report = ask(f)
    assert report.names("failed"), str(report)
    assert report.fingerprints == names, str(report)


@pytest.mark.parametrize("block", [16, 128])
def test_a_hidden_block_that_is_skipped_is_no_fault(block):
    right = by_tiles(lambda some: some.any(axis=1), block)
    assert not check_attention(right(attend)).names("failed")
    assert not check_gradients(right(backward)).names("failed")


def test_causal_blocks_without_a_fault():
    right = causal_by_blocks(16, 16, lambda at, keys: keys[0] > at[-1])
    assert not check_attention(right).names("failed")
