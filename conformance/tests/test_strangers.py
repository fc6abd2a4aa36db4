"""Faults that a reader planted who did not know the table of names; each in a few lines.

What they are called was not known to him: what matters is that none gets another's name.
"""

import numpy as np
import pytest
from public_bugs import changed
from right_ones import build, kernel, merge_at_once

from treeattn_conformance import check_attention, check_merge, check_tree

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
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


MERGES = {
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


KERNELS = {
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
        set(),
    ),
    "half of the head's dimensions": (lambda q, k, v: kernel(q[..., :8], k[..., :8], v), set()),
}


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


TREES = {
    "siblings seen": "mask[r, i] |= parents[r] == p",
    "the parent alone": "mask[r, i] = False; mask[r, i, max(p, 0)] = p >= 0",
    "the first ancestor left out": "mask[r, i, 0] = False",
}


@pytest.mark.parametrize("fault", TREES)
def test_a_strangers_tree(fault):
    right = "            mask[r, i, i] = True"
    wrong = changed(build, (right, f"            {TREES[fault]}\n{right}"))
    report = check_tree(wrong)
    assert report.names("failed") == ["mask"]
    expected = {"only the parent seen"} if fault == "the parent alone" else set()
    assert report.fingerprints == expected, str(report)
