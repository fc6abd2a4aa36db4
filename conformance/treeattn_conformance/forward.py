"""check_merge and check_attention, and their questions to merges of (out, lse) and to kernels."""

from collections.abc import Callable

import numpy as np

from .judge import TOGETHER, Question, judge, parameters, prepared, questions_of, together
from .kernel_mistakes import KERNEL_CURES, kernel_mistakes
from .merge_mistakes import MERGE_CURES, merge_mistakes
from .pairs import pairs
from .reference import attend, holes, merge, rounded
from .report import Report


def check_merge(
    merge: Callable, *, dtype: str = "float32", tolerance=None, only=None, expect=()
) -> Report:
    """Check merge([(out, lse), …]) -> (out, lse), a merge of shards.

    Check a merge of two as `check_merge(folded(merge))`. An lse of −∞ means no keys. +∞, which some
    kernels write, means no keys, too. If your kernels never write +∞, pass
    expect=["lse +inf for no keys"].

    If the merge returns out without lse, only out is judged.

    dtype: of the outs: "float64", "float32", "float16" or "bfloat16". bfloat16 numbers come in
           float32 arrays, which convert to bfloat16 without loss.
    tolerance: of out, absolute and relative; 1e-10, 2e-5, 3e-3 or 1.6e-2 when None. The tolerance
           of lse is 2e-5, because lse is float32 for every dtype but float64, where it is 1e-10, or
           `tolerance` if that is more, as for scores in TF32.
    only:  the names of the questions to ask; None for all. A mistake gets a name only if all small
           questions are asked.
    expect: names of questions, or of mistakes, whose failures are known. A mapping gives a reason
           for each. These failures are reported as "expected", and leave the report true.

    A question is skipped if the function raises NotImplementedError. A function that writes into
    its arguments, which are copies, fails "arguments". Raises ValueError for an unknown name.
    """
    if callable(merge) and _needs(merge) in (2, 4):
        raise TypeError(
            "merge: expected one argument, a list of pairs; for a merge of two pairs ask "
            "check_merge(folded(merge))"
        )
    questions, mistakes = prepared(merge_questions, merge_mistakes, dtype)
    subject = pairs(mistakes, MERGE_CURES, dtype, tolerance)
    return judge(merge, questions, subject, only=only, expect=expect)


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
    asked["lse near -61,000"] = shards(3, mean=-61_000, empty=[1])
    (_, first), (_, second) = asked["two shards"]
    second[0] = first[0]  # in one row neither is the larger
    many = shards(301, (1, 1, 2), mean=-8.0)
    rising = np.sort([lse for _, lse in many], axis=0)
    rising[-1, ..., 1] += 100  # of one head, beside which the others' exponentials are 0
    of_size = {
        "32 heads of 192, 9 rows": shards(3, (9, 2, 32), d=192),
        "1,025 queries, 64 heads": shards(2, (1, 1025, 64), d=2),
        "301 shards, lse rising": [(out, x) for (out, _), x in zip(many, rising, strict=True)],
    }
    both = ({name: ({"parts": x}, {}) for name, x in some.items()} for some in (asked, of_size))
    apart = [name for name in asked if name.endswith("far apart")]
    return questions_of(*both, merge, dict.fromkeys(apart, 1000.0) | {"lse near -61,000": 61_000.0})


def check_attention(
    kernel: Callable, *, dtype: str = "float32", tolerance=None, only=None, expect=()
) -> Report:
    """Check kernel(q, k, v, **options) -> (out, lse), an attention of queries over keys.

    q (b, l, h, d), k (b, n, h_kv, d), v (b, n, h_kv, d_v): query head i reads key head
    i // (h // h_kv). A query without keys has out 0 and lse −∞, or its sink as lse. If the kernel
    returns out without lse, only out is judged.

    A kernel is asked about the options that it has, one at a time, and then all at once: a query
    sees the keys that all of them show it.

    scale: a number; 1/√d where it is left out
    mask (b, 1, l, n): True where a query may see a key
    kv_lengths (b,): row i has kv_lengths[i] keys; the memory behind them may hold NaN
    query_positions (l,), key_positions (n,): both or none; ascending, with gaps, up to some 66,000;
            a query sees the keys up to its position
    window: a query sees the keys that are less than `window` positions before its own, and itself;
            without positions, the queries are the last l of the n keys, whatever kv_lengths says
    sinks (h,): the score of one more key, whose value is 0

    dtype, tolerance, only, expect: as in `check_merge`. A question is skipped if the kernel raises
    NotImplementedError.
    """
    questions, mistakes = prepared(attention_questions, kernel_mistakes, dtype)
    subject = pairs(mistakes, KERNEL_CURES, dtype, tolerance)
    questions = together(kernel, questions, attend)
    return judge(kernel, questions, subject, only=only, expect=expect)


def attention_questions(dtype: str = "float32") -> list[Question]:
    """The questions to a kernel: small ones, most with d = 16 and 40 keys, and large ones."""
    rng = np.random.default_rng(1)

    def qkv(b=2, l=3, h=4, h_kv=4, n=40, size=1.0, d=16, d_v=16):
        q = rng.normal(size=(b, l, h, d))
        k = rng.normal(size=(b, n, h_kv, d))
        v = 0.5 + rng.normal(size=(b, n, h_kv, d_v))
        return {name: rounded(x, dtype) for name, x in (("q", q * size), ("k", k), ("v", v))}

    def rising():
        """Scores that rise from 100 to 140, so that every block has the largest so far.

        The last query's scores are near 0.
        """
        found = qkv(1, 65, 2, 2, n=549)
        found["q"][..., 0] = 16
        found["q"][:, 64, :, 0] = 0
        found["k"][..., 0] = rounded(np.linspace(25, 35, 549)[:, None], dtype)
        return found

    def rows_apart():
        """Scores near 0 in one row of the batch, far above 0 in the next, far below in the last."""
        found = qkv(b=3)
        found["q"][..., 0] = 8
        found["k"][..., 0] = rounded(np.array([0, 500, -500])[:, None, None], dtype)
        return found

    def positions(queries, keys):
        return {"query_positions": queries, "key_positions": keys}

    stale = qkv()
    for name in "kv":
        stale[name][1, 7:] = np.nan
    # Queries 64 to 127 see nothing.
    mask = rng.random((2, 1, 131, 40)) < 0.5 - np.arange(131)[:, None] // 64 % 2
    one_row = mask[:, :, :3].copy()
    one_row[0] = True
    at = np.arange(80)
    asked = {
        "plain": (qkv(), {}),
        "one query, one key": (qkv(3, 1, 2, 2, n=1), {}),
        "keys in odd number": (qkv(n=37), {}),
        "batch = queries = heads": (qkv(4, 4, 4), {}),
        "grouped heads": (qkv(h=6, h_kv=2), {}),
        "large scores": (qkv(size=1000.0), {}),
        "rows far apart": (rows_apart(), {}),
        "scale": (qkv(), {"scale": 0.5}),
        "lengths": (qkv(b=3), {"kv_lengths": np.array([23, 31, 6])}),
        "a row without keys": (qkv(), {"kv_lengths": np.array([40, 0])}),
        "stale NaN": (stale, {"kv_lengths": np.array([40, 7])}),
        "mask": (qkv(l=131), {"mask": mask}),
        "one stripe of four": (qkv(n=10), positions(at[37:40], at[1:40:4])),
        "stripes of four keys": (qkv(l=7), positions(at[66::2], at[at // 4 % 2 == 1])),
        "sinks": (qkv(), {"sinks": np.array([0.0, 2.0, 4.0, 5.0])}),
        "large sinks": (qkv(h_kv=2), {"sinks": np.array([-1000.0, 0.0, 100.0, 1000.0])}),
        "causal chunk": (qkv(1, 24, 2, 2), positions(at[13:37], at[:40])),
        "hidden blocks": (qkv(4, 3, 2, 2, n=300), {"mask": holes(3, 300)}),
        "a window": (qkv(1, 150, 1, 1, n=513), {"window": 237}),
        "low scores": (qkv(), {"mask": one_row}),
    }
    low, _ = asked["low scores"]  # seen ones near -61,440, hidden ones near -28,672, and exact
    low["q"], low["k"] = np.rint(low["q"]), np.rint(low["k"])
    low["q"][..., 0], low["k"][..., 0] = -15_360, 16
    low["q"][..., 1:4] = 256 * np.eye(3)[:, None]
    low["k"][..., 1:4] = 512 * ~one_row.transpose(0, 3, 1, 2)
    of_blocks, _ = asked["hidden blocks"]
    of_blocks["q"][:, :, 1, 0], of_blocks["k"][..., 0] = -250, 16  # one head's are near -1000
    long = np.arange(513) + 32_500  # beyond int16; twice as many are beyond uint16
    of_size = {
        "512 keys, 128 queries": (qkv(1, 128, 1, 1, n=512, d=240, d_v=240), {}),
        "34 heads, 133 queries": (qkv(1, 133, 34, 2, n=70), {}),
        "549 keys of 192": (qkv(1, 2, 2, 2, n=549, d=192, d_v=128), {}),
        "scores that rise": (rising(), {}),
        "16 to 4,096 keys": (qkv(17, 1, 1, 1, n=4096), {"kv_lengths": 16 + 255 * np.arange(17)}),
        # Large questions have no names, so no `expect` could name what a query without keys gets.
        "a mask of 549 keys": (
            qkv(4, 133, 1, 1, n=549),
            {"mask": holes(133, 549) | (np.arange(549) == 548)},
        ),
        "a causal prompt of 513": (qkv(1, 513, 1, 1, n=513), positions(long, long)),
        TOGETHER: (
            qkv(3, 65, 9, 3, n=513),
            {
                "scale": 0.5,
                "mask": rng.random((3, 1, 65, 513)) < 0.9,
                "kv_lengths": np.array([500, 0, 40]),
                "query_positions": 2 * long[-130::2] - 41,
                "key_positions": 2 * long,
                "window": 900,
                "sinks": np.linspace(-1, 9, 9),
            },
        ),
    }
    largest = {
        "large scores": 6000.0,
        "rows far apart": 1000.0,
        "low scores": 61_500.0,
        "hidden blocks": 1000.0,
        "scores that rise": 560.0,
    }
    return questions_of(asked, of_size, attend, largest)
