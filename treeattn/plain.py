"""Attention on one device, written plainly: scores, weights, and the state (m, d, n) of their sums.

This is the form to read first. The tests compare it, and all others, with NumPy in float64.
blocks.py computes the same state, one block of keys at a time, in less memory and time. plain.py
has no loop over keys. So if the keys are sharded, XLA can split the program over the devices, and
the result is the papers' Algorithm 3: an Allreduce for the largest score, and one for each of the
sums.

In shapes, n is the number of keys and d is head_dim: queries are (b, l, h, d), keys and values
(b, n, h_kv, ·). Scores, masks and biases are (b, h_kv, group, l, n) with group = h / h_kv: query
head i is entry (i // group, i % group). As variables, m, d and n are the fields of the state:
pivot, denominator and numerator.
"""

import jax.numpy as jnp
from jax import lax

from treeattn.inputs import Inputs, by_key_head, by_query, unused_keys, visible_keys
from treeattn.state import AttentionState, finite


def attend_plain(inputs: Inputs) -> AttentionState:
    """The state of the queries after all keys that they see: fields (b, l, h) and (b, l, h, dv)."""
    b, l, h, head_dim = inputs.q.shape
    h_kv = inputs.k.shape[2]
    q = finite(inputs.q.astype(inputs.dtype) * inputs.total_scale)
    q = q.reshape(b, l, h_kv, h // h_kv, head_dim)
    k, v = inputs.k.astype(inputs.dtype), inputs.v.astype(inputs.dtype)
    visible = visible_keys(inputs, jnp.arange(k.shape[1], dtype=jnp.int32))
    if visible is not None:
        # An unused slot of a cache may hold anything, and 0 · NaN is NaN.
        unused = unused_keys(visible)
        k, v = jnp.where(unused, 0, k), jnp.where(unused, 0, v)

    s = finite(jnp.einsum("blkgd,bnkd->bkgln", q, k, precision="highest"))
    if inputs.bias is not None:
        s = finite(s + by_key_head(inputs.bias, h_kv))
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    m = lax.stop_gradient(s.max(axis=-1, initial=-jnp.inf))
    p = jnp.exp(s - finite(m)[..., None])
    d = p.sum(axis=-1)
    m = jnp.where(jnp.isnan(d), lax.stop_gradient(d), m)  # XLA's maximum may ignore a NaN
    n = jnp.einsum("bkgln,bnkd->bkgld", p, v, precision="highest")
    n = jnp.where((m == -jnp.inf)[..., None], 0, finite(n))
    return AttentionState(by_query(m), by_query(d), by_query(n))
