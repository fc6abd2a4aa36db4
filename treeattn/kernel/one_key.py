"""A single key: its state is (s, 1, v), which takes no kernel.

So a token that a model has just made attends to itself; XLA computes it where its neighbours are.
"""

import jax.numpy as jnp

from treeattn.idea.state import AttentionState, finite
from treeattn.kernel.inputs import Inputs
from treeattn.kernel.masks import mask_and_clip, shown_by

SMALLER = 2.0**-70  # times this, products of any two float32 numbers add up within its range


def attend_one_key(inputs: Inputs) -> AttentionState:
    """The state of queries (b, l, h, d) after the one key that they have, if they see it.

    Of inputs in float16, bfloat16 or float32, of which only the first query is causal's concern:
    with one key there is no other.
    """
    q, k, v = (x.astype(jnp.float32) for x in (inputs.q, inputs.k, inputs.v))
    b, l, h, d = q.shape
    h_kv, dv = v.shape[2:]
    grouped = q.reshape(b, l, h_kv, -1, d)
    s = _dot(grouped, k[:, :, :, None], inputs.scale, inputs.factor).reshape(b, l, h)
    visible, bias = jnp.ones(s.shape, bool), None
    if inputs.lengths is not None:
        visible &= inputs.lengths[:, None, None] > 0
    if inputs.mask is not None:
        visible &= _of_queries(inputs.mask)
    if inputs.bias is not None:
        bias = _of_queries(inputs.bias).astype(jnp.float32)
        visible &= shown_by(bias)
    s = mask_and_clip(s, visible, bias)
    values = jnp.broadcast_to(v[:, :, :, None], (b, l, h_kv, h // h_kv, dv)).reshape(b, l, h, dv)
    denominator = jnp.where(visible, jnp.where(jnp.isnan(s), s, 1), 0)
    numerator = finite(values * denominator[..., None])
    return AttentionState(s, denominator, jnp.where(visible[..., None], numerator, 0))


def _dot(q, k, scale: float, factor):
    """scale · factor · Σ q k over the last axis; ±∞, and no NaN, where that is out of range."""
    scale = scale if factor is None else scale * factor.astype(jnp.float32)
    plain = jnp.sum(q * k, axis=-1)
    # Where a part of the sum was infinite: the same in smaller numbers.
    small = jnp.sum(q * SMALLER * (k * SMALLER), axis=-1) * scale
    # Twice the factor that brings it back, the second not as a constant: XLA would make one
    # infinite factor of the two, and 0 · ∞ is NaN.
    larger = jnp.where(jnp.isnan(small), small, 1 / SMALLER)
    return jnp.where(jnp.isfinite(plain), plain * scale, small / SMALLER * larger)


def _of_queries(x):
    """A mask or bias (b, h, l, 1) by queries: (b, l, h), an axis being 1 where all share it."""
    return x[..., 0].swapaxes(1, 2)
