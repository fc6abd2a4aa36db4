"""check_attention and its questions to kernels of attention."""

import functools
from collections.abc import Callable

import numpy as np

from .judge import TOGETHER, Question, judge, questions_of, together
from .kernel_mistakes import KERNEL_CURES, kernel_mistakes
from .pairs import pairs
from .reference import attend, rounded
from .report import Report


def attention_questions(dtype: str = "float32") -> list[Question]:
    """The questions to a kernel: small ones, most with d = 16 and 40 keys, and large ones."""
    rng = np.random.default_rng(1)

    def qkv(b=2, l=3, h=4, h_kv=4, n=40, size=1.0, d=16, d_v=16):
        q = rng.normal(size=(b, l, h, d))
        k = rng.normal(size=(b, n, h_kv, d))
        v = 0.5 + rng.normal(size=(b, n, h_kv, d_v))
        return {name: rounded(x, dtype) for name, x in (("q", q * size), ("k", k), ("v", v))}

    def rising():
        """Scores that rise from block to block, so that every block has the largest so far."""
        found = qkv(b=2, l=2, h=2, h_kv=2, n=549)
        found["q"][..., 0] = 4
        found["k"][..., 0] = rounded(np.linspace(-20, 20, 549)[:, None], dtype)
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
    mask = rng.random((2, 1, 3, 40)) < 0.5
    hidden = mask.copy()
    hidden[1, 0, 2] = False
    at = np.arange(80)
    asked = {
        "plain": (qkv(), {}),
        "one query, one key": (qkv(3, 1, 2, 2, n=1), {}),
        "keys in odd number": (qkv(n=37), {}),
        "batch = queries = heads": (qkv(4, 4, 4), {}),
        "grouped heads": (qkv(h=6, h_kv=2), {}),
        "large scores": (qkv(size=400.0), {}),
        "rows far apart": (rows_apart(), {}),
        "scale": (qkv(), {"scale": 0.5}),
        "lengths": (qkv(b=3), {"kv_lengths": np.array([23, 31, 6])}),
        "a row without keys": (qkv(), {"kv_lengths": np.array([40, 0])}),
        "stale NaN": (stale, {"kv_lengths": np.array([40, 7])}),
        "mask": (qkv(), {"mask": mask}),
        "a masked query": (qkv(), {"mask": hidden}),
        "causal step": (qkv(), positions(at[37:40], at[:40])),
        "one stripe of four": (qkv(n=10), positions(at[37:40], at[1:40:4])),
        "stripes of four keys": (qkv(l=7), positions(at[73:], at[at // 4 % 2 == 1])),
        "sinks": (qkv(), {"sinks": np.array([0.0, 2.0, 4.0, 5.0])}),
        "large sinks": (qkv(h_kv=2), {"sinks": np.array([-1000.0, 0.0, 100.0, 1000.0])}),
        "causal prompt": (qkv(1, 40, 2, 2), positions(at[:40], at[:40])),
        "causal chunk": (qkv(1, 24, 2, 2), positions(at[13:37], at[:40])),
    }
    long = np.arange(300)
    of_size = {
        "549 keys, d = 128": (qkv(1, 2, 4, 2, n=549, d=128, d_v=128), {}),
        "32 heads, 133 queries": (qkv(1, 133, 32, 8, n=70, d=64, d_v=64), {}),
        "d = 192, values of 128": (qkv(1, 2, 2, 2, n=130, d=192, d_v=128), {}),
        "d = 256": (qkv(1, 2, 2, 2, n=70, d=256, d_v=256), {}),
        "scores that rise": (rising(), {}),
        "lengths beyond 255": (qkv(n=549), {"kv_lengths": np.array([300, 513])}),
        "a mask of 300 keys": (
            qkv(2, 133, 2, 2, n=300),
            {"mask": rng.random((2, 1, 133, 300)) < 0.5},
        ),
        "a causal prompt of 300": (qkv(1, 300, 1, 1, n=300), positions(long, long)),
        TOGETHER: (
            qkv(3, 5, 12, 3, n=300),
            {
                "scale": 0.5,
                "mask": rng.random((3, 1, 5, 300)) < 0.9,
                "kv_lengths": np.array([270, 0, 40]),
                "query_positions": long[-5:] - 40,
                "key_positions": long,
                "sinks": np.linspace(-1, 9, 12),
            },
        ),
    }
    largest = {"large scores": 6000.0, "rows far apart": 1000.0, "scores that rise": 80.0}
    return questions_of(asked, of_size, attend, largest)


def check_attention(
    kernel: Callable, *, dtype: str = "float32", tolerance=None, only=None, expect=()
) -> Report:
    """Check kernel(q, k, v, **options) -> (out, lse), an attention of queries over keys.

    If the kernel returns out without lse, only out is judged.

    A kernel is asked about the options that it has, one at a time, and then all at once:

    scale: a number; 1/√d where it is left out
    mask (b, 1, l, n): True where a query may see a key
    kv_lengths (b,): row i has kv_lengths[i] keys; the memory behind them may hold NaN
    query_positions (l,), key_positions (n,): ascending; a query sees the keys up to its position
    sinks (h,): the score of one more key, whose value is 0

    dtype, tolerance, only, expect: as in `check_merge`. A question is skipped if the kernel raises
    NotImplementedError.
    """
    questions, mistakes = _questions(dtype)
    subject = pairs(mistakes, KERNEL_CURES, dtype, tolerance)
    questions = together(kernel, questions, attend)
    return judge(kernel, questions, subject, only=only, expect=expect)


@functools.cache
def _questions(dtype: str) -> tuple:
    return attention_questions(dtype), tuple(kernel_mistakes())
