"""check_merge and its questions to merges of (out, lse)."""

import functools
from collections.abc import Callable

import numpy as np

from .judge import Question, judge, parameters, questions_of
from .merge_mistakes import MERGE_CURES, merge_mistakes
from .pairs import pairs
from .reference import merge, rounded
from .report import Report


def merge_questions(dtype: str = "float32") -> list[Question]:
    """The questions to a merge. out is in `dtype`; lse is in float32, or float64 with `dtype`."""
    rng = np.random.default_rng(0)
    lse_dtype = "float64" if dtype == "float64" else "float32"

    def shards(p, shape=(2, 3, 4), mean=8.0, empty=(), below=-np.inf, stale=0.0, d=4):
        """p pairs (out, lse), without keys in the shards `empty` and where lse is below `below`."""
        outs = 1 + rng.normal(size=(p, *shape, d)) / 2
        lses = (mean + rng.normal(0, 2, (p, *shape))).astype(lse_dtype)
        is_empty = np.isin(np.arange(p), empty)[:, None, None, None]
        none = is_empty | (lses < below)
        outs = np.where(none[..., None], stale, outs)
        lses = np.where(none, -np.inf, lses)
        return list(zip(rounded(outs, dtype), lses, strict=True))

    def far_apart(axis):
        """lse near −1000, 0 and 1000 along an axis of (shards, b, l, h)."""
        means = np.array([0.0, 1000.0, -1000.0])
        where = means.reshape([3 if i == axis else 1 for i in range(4)])
        return shards(3, (3, 3, 3), mean=where)

    # Together the small shards count. Exponents cut off at −10 would give them too much weight.
    many_small = np.where(np.arange(256) == 0, 0.0, -14.0)[:, None, None, None]
    infinite = shards(4, empty=[0, 2])
    large = 1000.0 if dtype == "float64" else 120.0
    left_over = np.array([0.5, 1.0, 3.0]).reshape(3, 1, 1, 1, 1)  # none is a mean of the others
    asked = {
        "one shard": shards(1),
        "two shards": shards(2),
        "seven shards": shards(7),
        "batch = queries = heads": shards(3, (4, 4, 4)),
        "one query": shards(3, (3, 1, 3)),
        "256 shards": shards(256, (1, 2, 3)),
        "large lse": shards(3, mean=large),
        "very negative lse": shards(3, mean=-large),
        "shards far apart": far_apart(0),
        "rows far apart": far_apart(1),
        "queries far apart": far_apart(2),
        "heads far apart": far_apart(3),
        "empty shards": shards(4, empty=[0, 1, 3]),
        "ragged": shards(4, below=9.0),
        "no keys anywhere": shards(3, empty=[0, 1, 2], stale=left_over),
        "lse +inf for no keys": [(out, np.abs(lse)) for out, lse in infinite],
        "stale NaN": shards(4, empty=[0, 2], stale=np.nan),
        "a NaN that counts": shards(3),
        "many small shards": shards(256, (1, 2, 3), mean=many_small),
    }
    asked["a NaN that counts"][1][0][0, 0, 0] = np.nan  # of keys that are seen
    (_, first), (_, second) = asked["two shards"]
    second[0] = first[0]  # in one row neither is the larger
    of_size = {
        "32 heads of 128": shards(3, (1, 5, 32), d=128),
        "133 queries": shards(2, (2, 133, 3), d=8),
        "d = 192, 9 rows": shards(2, (9, 2, 2), d=192),
        "300 shards": shards(300, (1, 1, 2)),
    }
    both = ({name: ({"parts": x}, {}) for name, x in some.items()} for some in (asked, of_size))
    apart = [name for name in asked if name.endswith("far apart")]
    return questions_of(*both, merge, dict.fromkeys(apart, 1000.0))


def check_merge(
    merge: Callable, *, dtype: str = "float32", tolerance=None, only=None, expect=()
) -> Report:
    """Check merge([(out, lse), …]) -> (out, lse), a merge of shards.

    Check a merge of two as `check_merge(folded(merge))`. An lse of −∞ means no keys. +∞, which some
    kernels write, means no keys, too. If your kernels never write +∞, pass
    expect=["lse +inf for no keys"].

    dtype: of the outs: "float64", "float32", "float16" or "bfloat16". bfloat16 numbers come in
           float32 arrays, which convert to bfloat16 without loss.
    tolerance: of out, absolute and relative; 1e-10, 2e-5, 3e-3 or 1.6e-2 when None. The tolerance
           of lse is 2e-5, because lse is float32 for every dtype but float64, where it is 1e-10.
    only:  the names of the questions to ask; None for all.
    expect: names of questions, or of mistakes, whose failures are known. A mapping gives a reason
           for each. These failures are reported as "expected", and leave the report true.

    A question is skipped if the function raises NotImplementedError. A function that writes into
    its arguments, which are copies, fails "arguments". Raises ValueError for an unknown name.
    """
    if callable(merge) and _needs(merge) in (2, 4):
        raise TypeError("this merge takes two pairs: ask check_merge(folded(merge))")
    questions, mistakes = _questions(dtype)
    subject = pairs(mistakes, MERGE_CURES, dtype, tolerance)
    return judge(merge, questions, subject, only=only, expect=expect)


@functools.cache
def _questions(dtype: str) -> tuple:
    return merge_questions(dtype), tuple(merge_mistakes())


def _needs(f: Callable) -> int:
    """The number of positional arguments without a default; 0 if f has no signature."""
    return sum(
        x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) and x.default is x.empty
        for x in parameters(f).values()
    )


def folded(merge_two: Callable) -> Callable:
    """The merge of a list, from left to right, by a merge of two.

    merge_two: of (out, lse, other_out, other_lse), or of ((out, lse), (other_out, other_lse))
    """
    flat = _needs(merge_two) == 4

    def merge_all(parts):
        found = tuple(parts[0])
        for other in parts[1:]:
            found = merge_two(*found, *other) if flat else merge_two(found, tuple(other))
        return found

    return merge_all
