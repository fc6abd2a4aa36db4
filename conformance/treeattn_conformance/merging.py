"""Merges of (out, lse): what they should give, the questions, and what known mistakes give."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from .judging import Case, check
from .report import Report
from .rounding import rounded


@np.errstate(all="ignore")
def merge(parts) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all keys from those of disjoint sets of them, in float64.

    parts: pairs of out (b, l, h, d) and lse (b, l, h), of any dtype
    """
    out = np.stack([np.asarray(part[0], np.float64) for part in parts])
    lse = np.stack([np.asarray(part[1], np.float64) for part in parts])
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    no_keys = np.isneginf(lse)
    out = np.where(no_keys[..., None], 0, out)
    m = lse.max(axis=0)
    w = np.exp(lse - np.where(np.isneginf(m), 0, m))
    d = w.sum(axis=0)
    n = (out * w[..., None]).sum(axis=0)
    divisor = np.where(d == 0, 1, d)
    return n / divisor[..., None], m + np.log(divisor)


def merge_cases(dtype: str = "float32") -> list[Case]:
    """The questions to a merge; `out` in `dtype`, lse in float32 (float64 if `dtype` is)."""
    rng = np.random.default_rng(0)

    def shards(p, shape=(2, 3, 4), mean=8.0, empty=(), below=-np.inf, stale=0.0):
        """p pairs (out, lse); no keys in the shards `empty`, and wherever lse is below `below`."""
        outs = 1 + rng.normal(size=(p, *shape, 4)) / 2
        lses = rng.normal(mean, 2, (p, *shape))
        lses = lses.astype("float64" if dtype == "float64" else "float32")
        is_empty = np.isin(np.arange(p), empty)[:, None, None, None]
        none = is_empty | (lses < below)
        outs = np.where(none[..., None], stale, outs)
        lses = np.where(none, -np.inf, lses)
        return list(zip(rounded(outs, dtype), lses, strict=True))

    infinite = shards(3, empty=[1])
    large = 1000.0 if dtype == "float64" else 120.0
    cases = {
        "two shards": (shards(2), None),
        "seven shards": (shards(7), None),
        "batch = queries = heads": (shards(3, (4, 4, 4)), None),
        "one query": (shards(3, (3, 1, 3)), None),
        "256 shards": (shards(256, (1, 2, 3)), None),
        "large lse": (shards(3, mean=large), "exp overflows"),
        "very negative lse": (shards(3, mean=-large), "exp overflows"),
        "empty shards": (shards(4, empty=[0, 1, 3]), "NaN for no keys"),
        "ragged": (shards(4, below=9.0), "NaN for no keys"),
        "no keys anywhere": (shards(3, empty=[0, 1, 2], stale=0.5), "NaN for no keys"),
        "lse +inf for no keys": ([(o, np.abs(l)) for o, l in infinite], "lse +inf for no keys"),
        "stale NaN": (shards(3, empty=[1], stale=np.nan), "stale NaN"),
    }
    return [
        Case(name, (parts,), {}, *merge(parts), np.array(0.5), infinite)
        for name, (parts, infinite) in cases.items()
    ]


def wrong_merges(parts) -> Iterator:
    """What known mistakes make of the parts: (fingerprint, (out, lse)) of each."""
    out, lse = merge(parts)
    total = sum(x[1] for x in parts)
    yield "log base 2", (out, lse / np.log(2))
    off, off_lse = merge([(o, l * np.log(2)) for o, l in parts])
    yield "log base 2", (off, off_lse)
    yield "log base 2", (off, off_lse / np.log(2))
    yield "lse + block_lse", (out, total)
    yield "lse + block_lse", (sum(o * np.exp(l - total)[..., None] for o, l in parts), total)
    for dtype in ("bfloat16", "float16"):
        off, off_lse = merge([(o, rounded(l, dtype)) for o, l in parts])
        for answer in (off_lse, lse, rounded(off_lse, dtype)):
            yield f"lse in {dtype}", (off, answer)
    yield "stale pivot", _stale_pivot(parts)
    yield "stale pivot", functools.reduce(lambda a, b: _stale_pivot([a, b]), parts)
    yield "no keys as lse 0", merge([_zeros_for_no_keys(part) for part in parts])
    for epsilon in 10.0 ** np.arange(-16, -2):
        share = 1 / (1 + epsilon * np.exp(-lse))  # of d / (d + ε)
        with_epsilon = np.log(np.exp(lse) + epsilon)
        yield "epsilon in the sum", (out * share[..., None], lse)
        yield "epsilon in the sum", (out * share[..., None], with_epsilon)
    yield from _other_axes(parts, lse)


def _other_axes(parts, lse) -> Iterator:
    """Weights whose axes of queries and heads change places, or that are read as if they had."""
    finite_lse = np.where(np.isinf(lse), 0, lse)
    weights = [np.exp(part[1] - finite_lse) for part in parts]
    turned = [w.swapaxes(1, 2) for w in weights]
    reshaped = [w.swapaxes(1, 2).reshape(w.shape)[..., None] for w in weights]
    for wrong in ([w[..., None] for w in turned], weights, turned, reshaped):
        try:
            off = sum(part[0] * w for part, w in zip(parts, wrong, strict=True))
        except ValueError:  # these shapes do not even broadcast
            continue
        for answer in (lse, lse.swapaxes(1, 2)):
            yield "axes of lse", (off, answer)


def _zeros_for_no_keys(part):
    """Memory that a shard without keys never wrote: zeros, in both."""
    out, lse = part
    empty = np.isinf(lse)
    return np.where(empty[..., None], 0, out), np.where(empty, 0, lse)


def _stale_pivot(parts):
    """Sums relative to the maximum so far, which are not rescaled when it rises."""
    m = np.full(parts[0][1].shape, -np.inf)
    d = 0
    n = 0
    for out, lse in parts:
        m = np.maximum(m, lse)
        w = np.where(np.isneginf(lse), 0, np.exp(lse - m))
        d = d + w
        n = n + w[..., None] * np.where(np.isneginf(lse)[..., None], 0, out)
    return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)


def check_merge(merge: Callable, *, dtype: str = "float32", tolerance=None) -> Report:
    """Ask `merge` all `merge_cases`.

    dtype: of the outs: "float64", "float32", "float16", or "bfloat16", whose numbers come in
           float32 arrays, to be converted without loss.
    tolerance: of out, absolute and relative; `TOLERANCES[dtype]` when None. That of lse is 2e-5
               (1e-10 in float64): it is a float32 number whatever the dtype of out.

    A function that raises NotImplementedError is not asked that case: "skipped".
    """
    return check(merge, merge_cases(dtype), wrong_merges, dtype, tolerance)
