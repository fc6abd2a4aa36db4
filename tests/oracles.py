"""Independent oracles: attention by the textbook's formula, in float64 NumPy."""

import numpy as np


def dense_attention(q, k, v, *, mask=None, bias=None, kv_lengths=None, scale=None, lse=False):
    """softmax(scale · q kᵀ + bias) v as `treeattn.attend` defines it; 0 where no key is seen.

    Layouts as in `attend`. With lse, (out, lse).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n, groups = k.shape[1], q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = np.einsum("blhd,bnhd->bhln", q, k) * scale
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    if kv_lengths is not None:
        seen = np.arange(n) < np.asarray(kv_lengths)[:, None]
        s = np.where(seen[:, None, None], s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m))
    d = p.sum(axis=-1, keepdims=True)
    out = np.einsum("bhln,bnhd->blhd", p / np.where(d == 0, 1, d), v)
    if not lse:
        return out
    with np.errstate(divide="ignore"):
        return out, (np.where(np.isneginf(m), 0, m) + np.log(d))[..., 0].transpose(0, 2, 1)
