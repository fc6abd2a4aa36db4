"""Attention on one device, written plainly: scores, weights, and the state (m, d, n) of their sums.

This is what everything else is tested against. blocks.py computes the same block by block, in less
memory and time. It also handles sums of products beyond the dtype's range. Without a loop over
keys, XLA can split this program over devices that share the keys. It then generates Algorithm 3: an
Allreduce for the largest score, and one for each of the sums.

Queries are (b, l, h, d), keys and values (b, n, h_kv, ·). Scores, masks and biases are
(b, h_kv, group, l, n) with group = h / h_kv: query head i is entry (i // group, i % group).
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeattn.inputs import Inputs
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
        s = finite(s + by_key_head(inputs.bias, h_kv).astype(s.dtype))
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    m = lax.stop_gradient(s.max(axis=-1, initial=-jnp.inf))
    p = jnp.exp(s - finite(m)[..., None])
    d = p.sum(axis=-1)
    m = jnp.where(jnp.isnan(d), lax.stop_gradient(d), m)  # XLA's maximum may ignore a NaN
    n = jnp.einsum("bkgln,bnkd->bkgld", p, v, precision="highest")
    n = jnp.where((m == -jnp.inf)[..., None], 0, finite(n))
    return by_query(AttentionState(m, d, n))


def visible_keys(inputs: Inputs, position):
    """True where a query sees a key; broadcasts to (b, h_kv, group, l, n). None: everywhere.

    position: (n,) the keys' numbers, to be compared with lengths
    """
    conditions = []
    if inputs.mask is not None:
        conditions.append(by_key_head(inputs.mask, inputs.k.shape[2]))
    if inputs.bias is not None:
        conditions.append(by_key_head(inputs.bias, inputs.k.shape[2]) != -jnp.inf)
    if inputs.lengths is not None:
        lengths = inputs.lengths[:, None, None, None, None]
        conditions.append(position[None, None, None, None] < lengths)
    if inputs.causal:  # there are as many queries as keys
        query = jnp.arange(inputs.k.shape[1], dtype=jnp.int32)[:, None]
        conditions.append((position[None] <= query)[None, None, None])
    visible = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    return visible


def unused_keys(visible):
    """True for keys that no query of their head sees: (b, n, h_kv, 1), in the layout of the keys.

    An axis is 1 if all share its entries.
    """
    return jnp.moveaxis(~visible.any(axis=(2, 3)), 1, 2)[..., None]


def by_query(state: AttentionState) -> AttentionState:
    """The state with fields (b, l, h, …) in place of (b, h_kv, group, l, …)."""

    def ungroup(x):
        b, h_kv, group, l, *rest = x.shape
        return jnp.moveaxis(x, 3, 1).reshape(b, l, h_kv * group, *rest)

    return jax.tree.map(ungroup, state)


def by_key_head(x, h_kv: int):
    """`x` (b, h, l, n) as (b, h_kv, group, l, n); (b, 1, 1, l, n) if one entry is for all heads."""
    heads = (1, 1) if x.shape[1] == 1 else (h_kv, x.shape[1] // h_kv)
    return x.reshape(len(x), *heads, *x.shape[2:])
