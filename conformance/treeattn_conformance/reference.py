"""The right answers, in float64 and in few lines; and numbers rounded to a dtype."""

import numpy as np


def attend(q, k, v, *, sinks=None, **options) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of q (b, l, h, d) over k and v (b, n, h_kv, d). `scores` has the other options.

    sinks (h,): the score of one more key for every query, whose value is 0
    """
    return softmax(scores(q, k, **options), v, sinks)


def softmax(s, v, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of given scores (b, l, h, n). A score is −∞ where a query does not see a key."""
    seen = ~np.isneginf(s)
    v = np.asarray(v, np.float64)
    v = np.repeat(v, s.shape[2] // v.shape[2], axis=2)
    m = s.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        m = np.maximum(m, sinks)
    pivot = np.where(np.isneginf(m), 0, m)
    w = np.where(seen, np.exp(s - pivot[..., None]), 0)
    d = w.sum(axis=-1)
    if sinks is not None:
        d = d + np.exp(sinks - pivot)
    # A hidden value may be NaN, so a value is not read if no query of its batch row sees the key.
    read = seen.any(axis=(1, 2))[..., None, None]
    sums = np.einsum("blhn,bnhd->blhd", w, np.where(read, v, 0))
    with np.errstate(divide="ignore"):
        return sums / np.where(d == 0, 1, d)[..., None], pivot + np.log(d)


def scores(
    q,
    k,
    *,
    scale=None,
    mask=None,
    kv_lengths=None,
    query_positions=None,
    key_positions=None,
    window=None,
    causal=False,
) -> np.ndarray:
    """(b, l, h, n) in float64: scale · q·k, and −∞ where a query does not see a key.

    scale: a number; 1/√d when None. mask (b, 1, l, n): True where a query may see a key.
    kv_lengths (b,): row i has kv_lengths[i] keys.
    query_positions (l,), key_positions (n,): queries see the keys up to their own position.
    window: queries see the keys less than `window` positions before their own, and at it. Without
    positions the queries are the last of the text.
    causal: query i and key i are at position i.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    s = np.einsum("blhd,bnhd->blhn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = np.ones(s.shape, bool)
    if mask is not None:
        seen &= np.asarray(mask).swapaxes(1, 2)
    if kv_lengths is not None:
        seen &= np.arange(s.shape[-1]) < np.asarray(kv_lengths)[:, None, None, None]
    if causal:
        query_positions, key_positions = map(np.arange, s.shape[1::2])
    if window is not None and query_positions is None:
        key_positions = np.arange(s.shape[-1])
        query_positions = key_positions[-s.shape[1] :]
    if query_positions is not None:
        query = np.asarray(query_positions)[:, None]
        seen &= (np.asarray(key_positions) <= query)[:, None]
        if window is not None:
            seen &= (query - key_positions < window)[:, None]
    return np.where(seen, s, -np.inf)


def holes(l: int, n: int) -> np.ndarray:
    """(4, 1, l, n): masks that hide whole blocks, one for each row of a batch. Row 0 sees nothing,
    row 1 the last keys (queries 64 to 127 see nothing), row 2 all but a hole in the middle, row 3 a
    window. From query to query, rows 1 and 3 begin later. Query 0 sees nothing."""
    query, key = np.arange(l)[:, None], np.arange(n)
    first = n // 4 + query * n // 4 // (l // 3)
    found = np.zeros((4, 1, l, n), bool)
    found[1] = (key >= first) & (query // 64 != 1)
    found[2] = (key < n // 3) | (key >= 9 * n // 10)
    found[3] = (key >= first) & (key < first + n // 10)
    return found & (query > 0)


def merge(parts) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all keys, from pairs of out (b, l, h, d) and lse (b, l, h) of disjoint keys.

    An lse of +∞ is read as −∞, no keys. Where there are no keys, out is not read.
    """
    return merged(*(np.stack(x).astype(np.float64) for x in zip(*parts, strict=True)))


def merged(out, lse) -> tuple[np.ndarray, np.ndarray]:
    """The merge of stacked outs (p, …, d) and lses (p, …)."""
    out, lse = clean(out, lse)
    m = lse.max(axis=0)
    pivot = np.where(np.isneginf(m), 0, m)
    w = np.exp(lse - pivot)
    d = w.sum(axis=0)
    sums = (out * w[..., None]).sum(axis=0)
    with np.errstate(divide="ignore"):
        return sums / np.where(d == 0, 1, d)[..., None], pivot + np.log(d)


def clean(out, lse) -> tuple[np.ndarray, np.ndarray]:
    """The arrays as a right merge reads them: out 0 and lse −∞ where there are no keys."""
    none = np.isinf(lse)
    return np.where(none[..., None], 0, out), np.where(none, -np.inf, lse)


# How far a result of each dtype may be off, absolute and relative.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 3e-3, "bfloat16": 1.6e-2}


def bfloat16(x) -> np.ndarray:
    """`x` rounded to bfloat16, to nearest even, in a float32 array, as NumPy has no bfloat16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(x, dtype: str) -> np.ndarray:
    """`x` rounded to a dtype by its name, one of `TOLERANCES`."""
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {list(TOLERANCES)}")
    return bfloat16(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)
