"""Kernels of attention: what they should give, the questions, and what known mistakes give."""

from collections.abc import Callable, Iterator

import numpy as np

from .judging import Case, check
from .merging import merge
from .report import Report
from .rounding import rounded


def attend(
    q,
    k,
    v,
    *,
    mask=None,
    kv_lengths=None,
    scale=None,
    sinks=None,
    query_positions=None,
    key_positions=None,
):
    """(out, lse) in float64, key by key. The options are those that kernels are asked for.

    mask (b, 1, l, n): True where a query may see a key. kv_lengths (b,): only so many keys count.
    sinks (h,): the score of one more key for every query, whose value is 0.
    query_positions (l,), key_positions (n,): queries see the keys up to their own position.
    """
    q = np.asarray(q, np.float64)
    k = _for_each_query_head(np.asarray(k, np.float64), q)
    v = _for_each_query_head(np.asarray(v, np.float64), q)
    b, l, h, d = q.shape
    n = k.shape[1]
    seen = np.ones((b, 1, l, n), bool) if mask is None else np.asarray(mask)
    if kv_lengths is not None:
        lengths = np.asarray(kv_lengths)[:, None, None, None]
        seen = seen & (np.arange(n) < lengths)
    if query_positions is not None:
        seen = seen & (np.asarray(key_positions) <= np.asarray(query_positions)[:, None])
    if scale is None:
        scale = d**-0.5
    s = np.einsum("blhd,bnhd->bhln", q, k) * scale
    s = np.where(seen, s, -np.inf).transpose(3, 0, 2, 1)  # (n, b, l, h)
    shape = (b, l, h, v.shape[-1])
    parts = [(np.broadcast_to(v[:, None, i], shape), s[i]) for i in range(n)]
    if sinks is not None:
        parts.append((np.zeros(shape), np.broadcast_to(sinks, (b, l, h))))
    return merge(parts)


def _for_each_query_head(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keys or values (b, n, h_kv, d) as (b, n, h, d): each head as often as q's heads read it."""
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def kernel_cases(dtype: str = "float32") -> list[Case]:
    """The questions to a kernel: attention with d = 16, over 40 keys."""
    rng = np.random.default_rng(1)

    def qkv(b=2, l=3, h=4, h_kv=4, n=40, size=1.0):
        q = rng.normal(size=(b, l, h, 16))
        k = rng.normal(size=(b, n, h_kv, 16))
        v = rng.normal(size=(b, n, h_kv, 16))
        return [rounded(x, dtype) for x in (q * size, k, v)]

    stale = qkv()
    for keys_or_values in stale[1:]:
        keys_or_values[1, 7:] = np.nan
    mask = rng.random((2, 1, 3, 40)) < 0.5
    mask[1, 0, 2] = False
    causal = {"query_positions": np.arange(37, 40), "key_positions": np.arange(40)}
    cases = {
        "plain": (qkv(), {}, None),
        "grouped heads": (qkv(h_kv=2), {"scale": 0.5}, None),
        "batch = queries = heads": (qkv(4, 4, 4), {}, None),
        "large scores": (qkv(size=400.0), {}, "exp overflows"),
        "a row without keys": (qkv(), {"kv_lengths": np.array([40, 0])}, "NaN for no keys"),
        "a masked query": (qkv(), {"mask": mask}, "NaN for no keys"),
        "stale NaN": (stale, {"kv_lengths": np.array([40, 7])}, "stale NaN"),
        "causal step": (qkv(), causal, None),
        "one stripe of four": (qkv(n=10), causal | {"key_positions": np.arange(1, 40, 4)}, None),
        "sinks": (qkv(), {"sinks": np.array([0.0, 2.0, 4.0, 5.0])}, None),
    }
    found = []
    for name, ((q, k, v), options, infinite) in cases.items():
        out, lse = attend(q, k, v, **options)
        uniform = _for_each_query_head(v, q).mean(1, keepdims=True)
        found.append(Case(name, (q, k, v), options, out, lse, uniform, infinite))
    return found


def wrong_kernels(q, k, v, *, sinks=None, **options) -> Iterator:
    """As `wrong_merges`, for attention over these keys."""
    out, lse = attend(q, k, v, sinks=sinks, **options)
    yield "log base 2", (out, lse / np.log(2))
    yield "axes of lse", (out, lse.swapaxes(1, 2))
    if sinks is not None:
        without = attend(q, k, v, **options)
        yield "sinks ignored", without
        yield "sinks ignored", (out, without[1])
        for p in range(2, 65):  # shards
            p_sinks = (0 * out, lse * 0 + sinks + np.log(p))
            yield "sinks once a shard", merge([without, p_sinks])
    if "query_positions" in options:
        position = options["query_positions"][:, None]
        l = q.shape[1]
        n = k.shape[1]
        i = np.arange(l)[:, None]
        key = np.arange(n)
        seen = [key <= i]  # as if the first query stood at the first key
        for p in range(1, 17):  # keys dealt in stripes: number key // p of `kept` on a device
            kept = (n - key % p + p - 1) // p
            seen += [key // p <= kept - l + i, key // p <= position]
        for mask in seen:
            yield "local positions", attend(q, k, v, mask=mask[None, None])


def check_kernel(kernel: Callable, *, dtype: str = "float32", tolerance=None) -> Report:
    """Ask `kernel` all `kernel_cases`, whose options are those of `attend`; as `check_merge`."""
    return check(kernel, kernel_cases(dtype), wrong_kernels, dtype, tolerance)
