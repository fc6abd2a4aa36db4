"""Kernels of attention: the questions to them."""

import functools
from collections.abc import Callable

import numpy as np

from .judging import Case, Questions, check
from .kernel_mistakes import KERNEL_CURES, kernel_mistakes
from .reference import attend
from .report import Report
from .rounding import rounded


def attention_cases(dtype: str = "float32") -> list[Case]:
    """The questions to a kernel: attention with d = 16, over 40 keys."""
    rng = np.random.default_rng(1)

    def qkv(b=2, l=3, h=4, h_kv=4, n=40, size=1.0):
        q = rng.normal(size=(b, l, h, 16))
        k = rng.normal(size=(b, n, h_kv, 16))
        v = 0.5 + rng.normal(size=(b, n, h_kv, 16))
        return [rounded(x, dtype) for x in (q * size, k, v)]

    def rows_apart():
        """One row's scores lie near 0, and those of the others far above and far below."""
        q, k, v = qkv(b=3)
        q[..., 0] = 8
        k[..., 0] = rounded(np.array([0, 500, -500])[:, None, None], dtype)
        return [rounded(x, dtype) for x in (q, k, v)]

    stale = qkv()
    for keys_or_values in stale[1:]:
        keys_or_values[1, 7:] = np.nan
    mask = rng.random((2, 1, 3, 40)) < 0.5
    hidden = mask.copy()
    hidden[1, 0, 2] = False
    at = np.arange(80)
    step = {"query_positions": np.arange(37, 40), "key_positions": np.arange(40)}
    stripe = {"query_positions": step["query_positions"], "key_positions": np.arange(1, 40, 4)}
    stripes = {"query_positions": np.arange(73, 80), "key_positions": at[at // 4 % 2 == 1]}
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
        "causal step": (qkv(), step),
        "one stripe of four": (qkv(n=10), stripe),
        "stripes of four keys": (qkv(l=7), stripes),
        "sinks": (qkv(), {"sinks": np.array([0.0, 2.0, 4.0, 5.0])}),
        "large sinks": (qkv(h_kv=2), {"sinks": np.array([-1000.0, 0.0, 100.0, 1000.0])}),
        "causal prompt": (qkv(l=40), {"query_positions": at[:40], "key_positions": at[:40]}),
        "causal chunk": (qkv(l=24), {"query_positions": at[13:37], "key_positions": at[:40]}),
    }
    largest = {"large scores": 6000.0, "rows far apart": 1000.0}
    return [
        Case(
            name,
            dict(zip("qkv", arrays, strict=True)),
            options,
            *attend(*arrays, **options),
            largest.get(name, 0.0),
        )
        for name, (arrays, options) in asked.items()
    ]


def check_attention(kernel: Callable, *, dtype: str = "float32", tolerance=None) -> Report:
    """Ask kernel(q, k, v, **options) -> (out, lse) what it makes of queries, keys and values.

    Options are asked of a kernel that has them: scale, a number, 1/√d where it is left out;
    mask (b, 1, l, n), True where a query may see a key; kv_lengths (b,), so many keys count, and
    what lies beyond may be NaN; query_positions (l,) and key_positions (n,), a query sees the keys
    up to its own position; sinks (h,), the score of one more key, whose value is 0.

    dtype, tolerance: as in `check_merge`. What raises NotImplementedError is "skipped".
    """
    return check(kernel, _questions(dtype), dtype, tolerance)


@functools.cache
def _questions(dtype: str) -> Questions:
    return Questions(attention_cases(dtype), kernel_mistakes(), KERNEL_CURES)
