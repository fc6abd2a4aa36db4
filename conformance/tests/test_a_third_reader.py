"""Faults that a third reader planted, who knew the page of this suite and none of its code.

A fault has a name that is its own or none, where the report says what is off.
"""

import numpy as np
import pytest
from public_bugs import changed
from right_ones import build, commit, kernel, merge_at_once, merge_two

from treeattn_conformance import check_attention, check_merge, check_tree

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


# Merges


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
    """The share of a is that of b."""
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
    "out of the heaviest shard alone": (heaviest, set()),
    "the running lse forgotten": (lse_of_the_first, set()),
    "the sign of the sigmoid": (sign_of_the_sigmoid, {"weights of other shards"}),
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


SCORES = "s = np.where(seen, s, -np.inf)"


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
TREES = {
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


PLANTED = [
    *((check_merge, f"merge: {name}", *fault) for name, fault in MERGES.items()),
    *((check_attention, f"kernel: {name}", *fault) for name, fault in KERNELS.items()),
    *((check_tree, f"tree: {name}", *fault) for name, fault in TREES.items()),
    *(
        (lambda f: check_tree(commit=f), f"commit: {name}", *fault)
        for name, fault in COMMITS.items()
    ),
]


@pytest.mark.parametrize(
    ("ask", "f", "names"),
    [(ask, f, names) for ask, _, f, names in PLANTED],
    ids=[x for _, x, _, _ in PLANTED],
)
def test_a_third_readers_fault(ask, f, names):
    report = ask(f)
    assert report.names("failed"), str(report)
    assert report.fingerprints == names, str(report)
