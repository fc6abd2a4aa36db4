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
    v = _for_each_query_head(np.asarray(v, np.float64), q)
    s = scores(
        q,
        k,
        mask=mask,
        kv_lengths=kv_lengths,
        scale=scale,
        query_positions=query_positions,
        key_positions=key_positions,
    )
    shape = (*s.shape[1:], v.shape[-1])
    no_keys = (np.zeros(shape), np.full(s.shape[1:], -np.inf))
    keys = [(np.broadcast_to(v[:, None, i], shape), s[i]) for i in range(len(s))]
    parts = [no_keys, *keys]
    if sinks is not None:
        parts.append((np.zeros(shape), np.broadcast_to(sinks, s.shape[1:])))
    return merge(parts)


def scores(
    q,
    k,
    *,
    mask=None,
    kv_lengths=None,
    scale=None,
    query_positions=None,
    key_positions=None,
) -> np.ndarray:
    """The scores of each key, −∞ where a query does not see it: (n, b, l, h), float64."""
    q = np.asarray(q, np.float64)
    k = _for_each_query_head(np.asarray(k, np.float64), q)
    b, l, _, d = q.shape
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
    return np.where(seen, s, -np.inf).transpose(3, 0, 2, 1)


def _for_each_query_head(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keys or values (b, n, h_kv, d) as (b, n, h, d): each head as often as q's heads read it."""
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def attention_cases(dtype: str = "float32") -> list[Case]:
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
    stripe = {"key_positions": np.arange(1, 40, 4)}
    at = np.arange(80)
    stripes = {"query_positions": np.arange(73, 80), "key_positions": at[at // 4 % 2 == 1]}
    cases = {
        "plain": (qkv(), {}, None),
        "grouped heads": (qkv(h_kv=2), {"scale": 0.5}, None),
        "batch = queries = heads": (qkv(4, 4, 4), {}, None),
        "large scores": (qkv(size=400.0), {}, "exp overflows"),
        "a row without keys": (qkv(), {"kv_lengths": np.array([40, 0])}, "NaN for no keys"),
        "a masked query": (qkv(), {"mask": mask}, "NaN for no keys"),
        "stale NaN": (stale, {"kv_lengths": np.array([40, 7])}, "stale NaN"),
        "causal step": (qkv(), causal, None),
        "one stripe of four": (qkv(n=10), causal | stripe, None),
        "stripes of four keys": (qkv(l=7), stripes, None),
        "sinks": (qkv(), {"sinks": np.array([0.0, 2.0, 4.0, 5.0])}, None),
    }
    found = []
    for name, ((q, k, v), options, infinite) in cases.items():
        out, lse = attend(q, k, v, **options)
        uniform = _for_each_query_head(v, q).mean(1, keepdims=True)
        found.append(Case(name, (q, k, v), options, out, lse, uniform, infinite))
    return found


def wrong_attentions(q, k, v, *, sinks=None, **options) -> Iterator:
    """As `wrong_merges`, for attention over these keys."""
    out, lse = attend(q, k, v, sinks=sinks, **options)
    yield "log base 2", (out, lse / np.log(2))
    yield "axes of lse", (out, lse.swapaxes(1, 2))
    yield "axes of lse", (out, lse.swapaxes(1, 2).reshape(lse.shape))
    yield "no keys as lse 0", (out, np.where(np.isneginf(lse), 0, lse))
    for regrouped in _regrouped(q.shape[2]):
        yield "heads regrouped", (out[:, :, regrouped], lse)
        yield "heads regrouped", (out[:, :, regrouped], lse[:, :, regrouped])
    if sinks is None:
        rise = _rise_of_maximum(q, k, **options)
        smaller = out * np.exp(-rise)[..., None]
        yield "maximum of other keys", (out, lse + rise)
        yield "maximum of other keys", (smaller, lse)
        yield "maximum of other keys", (smaller, lse + rise)
    if sinks is not None:
        without = attend(q, k, v, **options)
        yield "sinks ignored", without
        yield "sinks ignored", (out, without[1])
        for p in range(2, 65):  # shards
            p_sinks = (0 * out, lse * 0 + sinks + np.log(p))
            yield "sinks once a shard", merge([without, p_sinks])
    if "query_positions" in options:
        for mask in _bounded_by_local_positions(k.shape[1], options["query_positions"]):
            yield "local positions", attend(q, k, v, mask=mask[None, None])


def local_lengths(lengths, devices: int, rank: int, interleave: int) -> np.ndarray:
    """How many of the first `lengths` keys (any shape) device `rank` of `devices` has.

    Keys are dealt in stripes of `interleave`, key t to device (t // interleave) mod devices:

        ⌊L / (D·I)⌋ · I + clamp(L mod (D·I) − r·I, 0, I)
    """
    lengths = np.asarray(lengths)
    full, rest = np.divmod(lengths, devices * interleave)
    return full * interleave + np.clip(rest - rank * interleave, 0, interleave)


def _bounded_by_local_positions(n: int, positions: np.ndarray) -> Iterator[np.ndarray]:
    """Which of a device's n keys the queries see (l, n) where their positions are misread."""
    l = len(positions)
    position = positions[:, None]
    i = np.arange(l)[:, None]
    key = np.arange(n)
    yield key <= i  # as if the first query stood at the first key
    for p in range(1, 17):  # keys dealt in stripes: number key // p of `kept` on a device
        kept = (n - key % p + p - 1) // p
        yield key // p <= kept - l + i
        yield key // p <= position
    for devices in range(2, 9):  # stripes of several keys, bounded as if they were of one
        for rank in range(devices):
            yield key < local_lengths(position + 1, devices, rank, 1)


def _regrouped(h: int) -> Iterator[np.ndarray]:
    """Orders in which the heads stand after they were dealt one way and gathered another."""
    heads = np.arange(h)
    for groups in range(2, h):
        if h % groups == 0:
            yield heads.reshape(groups, -1).T.ravel()
    for by in range(1, h):
        yield np.roll(heads, by)


def _rise_of_maximum(q, k, **options) -> np.ndarray:
    """How far the largest score of all keys lies above that of the seen ones: (b, l, h)."""
    seen = scores(q, k, **options).max(0)
    largest = scores(q, k, scale=options.get("scale")).max(0)
    return np.where(np.isneginf(seen), 0, largest - seen)


def check_attention(kernel: Callable, *, dtype: str = "float32", tolerance=None) -> Report:
    """Ask `kernel` all `attention_cases`, whose options are those of `attend`; as `check_merge`."""
    return check(kernel, attention_cases(dtype), wrong_attentions, dtype, tolerance)
