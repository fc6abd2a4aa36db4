"""Independent oracles: attention and its gradients by the textbook's formulas, in float64 NumPy."""

import numpy as np


def dense_weights(q, k, *, mask=None, bias=None, kv_lengths=None, scale=None):
    """(P, lse): softmax weights (b, h, l, n), 0 for a query without keys, and lse (b, l, h).

    Layouts as in `treeattn.attend`; k's heads are repeated for grouped queries.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    n = k.shape[1]
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    s = np.einsum("blhd,bnhd->bhln", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    if kv_lengths is not None:
        seen = np.arange(n) < np.asarray(kv_lengths)[:, None]
        s = np.where(seen[:, None, None], s, -np.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isneginf(m), 0, m)
    p = np.exp(s - m)
    d = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = m + np.log(d)
    return p / np.where(d == 0, 1, d), lse[..., 0].transpose(0, 2, 1)


def dense_attention(q, k, v, **options):
    """softmax(scale · q kᵀ + bias) v, (b, l, h, dv); `options` as in `dense_weights`."""
    weights, _ = dense_weights(q, k, **options)
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bhln,bnhd->blhd", weights, v)


def dense_gradients(q, k, v, w, u=0.0, **options):
    """The gradients of Σ w·out + Σ u·lse with respect to (q, k, v), and to the bias, if there is
    one: the chain rule by hand.

    w (b, l, h, dv); u (b, l, h), or 0. A query without keys has lse −∞ and contributes nothing.
    """
    weights, _ = dense_weights(q, k, **options)
    q, k, v, w = (np.asarray(x, np.float64) for x in (q, k, v, w))
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scale = options.get("scale") or q.shape[-1] ** -0.5
    u = np.broadcast_to(u, q.shape[:3]).transpose(0, 2, 1)[..., None]  # (b, h, l, 1)
    d_weights = np.einsum("blhd,bnhd->bhln", w, wide_v)
    mean = (d_weights * weights).sum(axis=-1, keepdims=True)
    d_bias = weights * (d_weights - mean + u)
    d_scores = d_bias * scale

    def narrow(x):  # sum over the query heads that share a key head
        return x.reshape(*x.shape[:2], k.shape[2], groups, -1).sum(axis=3)

    gradients = [
        np.einsum("bhln,bnhd->blhd", d_scores, wide_k),
        narrow(np.einsum("bhln,blhd->bnhd", d_scores, q)),
        narrow(np.einsum("bhln,blhd->bnhd", weights, w)),
    ]
    if "bias" in options:  # summed over what shares an entry
        shared = tuple(i for i, size in enumerate(options["bias"].shape) if size == 1)
        gradients.append(d_bias.sum(axis=shared, keepdims=True))
    return gradients


def attention_of_scores(s, v, c, e):
    """(out, lse, dL/ds, dL/dv) of scores s (n,) and values v (n, dv), for L = Σ c·out + e·lse."""
    s, v, c = (np.asarray(x, np.float64) for x in (s, v, c))
    weights, lse = dense_weights(np.ones((1, 1, 1, 1)), s.reshape(1, -1, 1, 1), scale=1.0)
    p = weights.ravel()
    out = p @ v
    return out, lse.item(), p * (v @ c - out @ c + e), np.outer(p, c)
