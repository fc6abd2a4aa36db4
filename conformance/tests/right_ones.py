"""Right merges, kernels and builders, as different people would write them."""

import functools

import numpy as np


def merge_at_once(parts):
    out = np.stack([np.asarray(o, np.float64) for o, _ in parts])
    lse = np.stack([np.asarray(s, np.float64) for _, s in parts])
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    m = lse.max(axis=0)
    pivot = np.where(np.isneginf(m), 0, m)
    w = np.exp(lse - pivot)
    d = w.sum(axis=0)
    n = (np.where(w[..., None] > 0, out, 0) * w[..., None]).sum(axis=0)
    return n / np.where(d > 0, d, 1)[..., None], pivot + np.log(d)


def merge_two(a, b):
    lse_a, lse_b = (np.where(np.isposinf(s), -np.inf, s) for _, s in (a, b))
    m = np.maximum(lse_a, lse_b)
    m = np.where(np.isneginf(m), 0, m)
    x = np.exp(lse_a - m)
    y = np.exp(lse_b - m)
    d = x + y
    n_a = np.where(x[..., None] > 0, a[0], 0) * x[..., None]
    n_b = np.where(y[..., None] > 0, b[0], 0) * y[..., None]
    return (n_a + n_b) / np.where(d > 0, d, 1)[..., None], m + np.log(d)


def merge_in_turn(parts):
    return functools.reduce(
        merge_two, [merge_two(parts[0], (0 * parts[0][0], -np.inf)), *parts[1:]]
    )


def visible(q, k, mask=None, kv_lengths=None, query_positions=None, key_positions=None):
    """(b, 1, l, n): which keys a query sees, from whichever options there are."""
    n = k.shape[1]
    seen = np.ones((q.shape[0], 1, q.shape[1], n), bool)
    if mask is not None:
        seen = seen & mask
    if kv_lengths is not None:
        seen = seen & (np.arange(n) < kv_lengths[:, None, None, None])
    if query_positions is not None:
        seen = seen & (key_positions <= query_positions[:, None])
    return seen


def kernel(
    q,
    k,
    v,
    *,
    scale=None,
    mask=None,
    kv_lengths=None,
    query_positions=None,
    key_positions=None,
    sinks=None,
):
    """All keys at once."""
    g = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, g, axis=2), np.repeat(v, g, axis=2)
    scale = 1 / np.sqrt(q.shape[3]) if scale is None else scale
    seen = visible(q, k, mask, kv_lengths, query_positions, key_positions)
    s = np.einsum("blhd,bnhd->bhln", np.float64(q), k) * scale
    s = np.where(seen, s, -np.inf)
    m = s.max(axis=3)
    if sinks is not None:
        m = np.maximum(m, sinks[:, None])
    m = np.where(np.isneginf(m), 0, m)
    p = np.where(seen, np.exp(s - m[..., None]), 0)
    d = p.sum(axis=3)
    if sinks is not None:
        d = d + np.exp(sinks[:, None] - m)
    v = np.where(seen.any(axis=(1, 2))[:, :, None, None], v, 0)
    out = np.einsum("bhln,bnhd->blhd", p, v)
    divisor = np.where(d > 0, d, 1).transpose(0, 2, 1)
    return out / divisor[..., None], (m + np.log(d)).transpose(0, 2, 1)


def kernel_by_blocks(q, k, v, *, kv_lengths=None, mask=None):
    """An online softmax, in blocks of 16 keys."""
    b, l, h, size = q.shape
    g = h // k.shape[2]
    m = np.full((b, l, h), -np.inf)
    d = np.zeros((b, l, h))
    n = np.zeros((b, l, h, v.shape[3]))
    for start in range(0, k.shape[1], 16):
        keys = np.repeat(k[:, start : start + 16], g, axis=2)
        values = np.repeat(v[:, start : start + 16], g, axis=2)
        at = np.arange(start, start + keys.shape[1])
        s = np.einsum("blhd,bnhd->blhn", np.float64(q), keys) / np.sqrt(size)
        seen = np.ones((b, 1, 1, len(at)), bool)
        if kv_lengths is not None:
            seen = seen & (at < kv_lengths[:, None, None, None])
        if mask is not None:
            seen = seen & mask[..., at].swapaxes(1, 2)
        s = np.where(seen, s, -np.inf)
        new = np.maximum(m, s.max(axis=3))
        pivot = np.where(np.isneginf(new), 0, new)
        old = np.exp(m - pivot)
        p = np.where(seen, np.exp(s - pivot[..., None]), 0)
        values = np.where(seen.any(axis=(1, 2))[:, :, None, None], values, 0)
        d = d * old + p.sum(axis=3)
        n = n * old[..., None] + np.einsum("blhn,bnhd->blhd", p, values)
        m = new
    lse = np.where(np.isneginf(m), 0, m) + np.log(d)
    return n / np.where(d > 0, d, 1)[..., None], lse


def build(parents, lengths):
    """A tree's mask, positions and links."""
    b, n = parents.shape
    mask = np.zeros((b, n, n), bool)
    positions = np.zeros((b, n), int)
    next_token = np.full((b, n), -1)
    next_sibling = np.full((b, n), -1)
    for r in range(b):
        last = {}
        for i in range(n):
            p = parents[r, i]
            if p >= 0:
                mask[r, i] = mask[r, p]
                positions[r, i] = positions[r, p] + 1
            else:
                positions[r, i] = lengths[r]
            mask[r, i, i] = True
            if p in last:
                next_sibling[r, last[p]] = i
            elif p >= 0:
                next_token[r, p] = i
            last[p] = i
    return {
        "mask": mask,
        "positions": positions,
        "next_token": next_token,
        "next_sibling": next_sibling,
    }


def commit(cache, lengths, accepted):
    """What a cache keeps of an accepted path."""
    cache = cache.copy()
    counts = (accepted >= 0).sum(axis=1)
    for r in range(len(cache)):
        for i in range(counts[r]):
            cache[r, lengths[r] + i] = cache[r, lengths[r] + accepted[r, i]]
    return cache, lengths + counts
