"""Faults that two readers planted who did not know the table of names; each in a few lines.

What they are called was not known to them: what matters is that none gets another's name.
"""

import functools
import itertools

import numpy as np
import pytest
from public_bugs import changed
from right_ones import build, kernel, merge_at_once

from treeattn_conformance import check_attention, check_merge, check_tree

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
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
    """What stands in the first out remains where nothing has keys."""
    out, lse = merge_at_once(parts)
    return np.where(np.isneginf(lse)[..., None], parts[0][0], out), lse


def equal_lse_lost(parts):
    """Neither of two is the larger, and only one counts."""

    def merge_two(a, b):
        hidden = np.where(a[1] == b[1], -np.inf, b[1])
        return merge_at_once([a, (b[0], hidden)])

    return functools.reduce(
        merge_two, parts, (0 * parts[0][0], np.full(parts[0][1].shape, -np.inf))
    )


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
        {"weights of other shards", "stale NaN"},  # an out without keys has another's weight
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
}


def swap(parts):
    return [parts[1], parts[0], *parts[2:]] if len(parts) > 1 else parts


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
        {"a partial block left out", "keys left out"},
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
        {"a cap on scores"},
    ),
    "softmax + 1": (
        changed(kernel, ("d = p.sum(axis=3)", "d = p.sum(axis=3) + np.exp(-m)")),
        {"one more in the sum"},
    ),
    "lse in base 10": (
        changed(kernel, ("(m + np.log(d))", "((m + np.log(d)) / np.log(10))")),
        {"log base 10"},
    ),
    "lse scaled": (
        changed(kernel, ("(m + np.log(d))", "((m + np.log(d)) * scale)")),
        {"lse of other scores"},
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
        {"counted twice"},
    ),
    "half of the head's dimensions": (lambda q, k, v: kernel(q[..., :8], k[..., :8], v), set()),
}


def test_causal_blocks_without_a_fault():
    right = causal_by_blocks(16, 16, lambda at, keys: keys[0] > at[-1])
    assert not check_attention(right).names("failed")


@pytest.mark.parametrize("fault", MERGES)
def test_a_strangers_merge(fault):
    check(check_merge, *MERGES[fault])


@pytest.mark.parametrize("fault", KERNELS)
def test_a_strangers_kernel(fault):
    check(check_attention, *KERNELS[fault])


def check(ask, f, names):
    report = ask(f)
    assert report.names("failed"), str(report)
    assert report.fingerprints == names, str(report)


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
}


@pytest.mark.parametrize("fault", TREES)
def test_a_strangers_tree(fault):
    check(check_tree, *TREES[fault])
