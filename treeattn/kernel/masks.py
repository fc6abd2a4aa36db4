"""Who sees which key of a block: masks, biases of −∞, and the lengths of rows.

Here scores, mask and bias are (b, h_kv, group, l, size), as in treeattn/kernel/blockwise.py;
`visible` is such an array of booleans, or None where everybody sees everything.
"""

import jax.numpy as jnp
from jax import lax

from treeattn.kernel.inputs import Grouped
from treeattn.kernel.intervals import visible_keys


def block_visibility(inputs: Grouped, start, size: int):
    """(first, visible, bias): the block's first key, who sees which of its keys, its bias.

    The last block starts early enough to be whole, and hides what was seen before: of 10 keys
    in blocks of 4, the last is 6 … 9, of which 6 and 7 are hidden.
    """
    n = inputs.k.shape[1]
    first = jnp.minimum(start, n - size)
    position = (first + jnp.arange(size, dtype=jnp.int32))[None, None, None, None]
    visible = position >= start if n % size else None
    if inputs.lengths is not None:
        visible = and_visible(visible, position < inputs.lengths[:, None, None, None, None])

    def cut(x):
        return x if x.shape[-1] == 1 else lax.dynamic_slice_in_dim(x, first, size, axis=-1)

    if inputs.mask is not None:
        visible = and_visible(visible, cut(inputs.mask))
    if inputs.intervals is not None:
        visible = and_visible(visible, visible_keys(inputs.intervals, first, size))
    if inputs.bias is None:
        return first, visible, None
    bias = cut(inputs.bias)
    return first, and_visible(visible, shown_by(bias)), bias


def and_visible(visible, more):
    """What is visible by both."""
    return more if visible is None else visible & more


def shown_by(bias):
    """Whom a bias lets see: −∞ hides a key, and nothing else does, a NaN neither."""
    return bias != -jnp.inf


def mask_and_clip(s, visible, bias):
    """The scores with their bias, within the dtype's range (∞ − ∞ is NaN); −∞ where hidden."""
    largest = jnp.finfo(s.dtype).max
    s = jnp.clip(s, -largest, largest)
    if bias is not None:
        s = jnp.clip(s + bias, -largest, largest)
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def hidden_from_all(visible):
    """Whether no query that reads a key sees it: (b, size, h_kv, 1), as keys and values lie.

    An axis is 1 where all share its entries.
    """
    hidden = ~jnp.any(visible, axis=(2, 3))
    return jnp.moveaxis(hidden, -1, 1)[..., None]


def zero_hidden(x, hidden, first: int = 0):
    """Keys or values (b, count, h_kv, ·) of a block, from its key `first` on; 0 where hidden.

    There a cache may hold anything, and 0 · NaN would be NaN. `hidden` is `hidden_from_all`'s,
    for the whole block; None where nothing is.
    """
    if hidden is None:
        return x
    if hidden.shape[1] > 1:
        hidden = hidden[:, first : first + x.shape[1]]
    return jnp.where(hidden, 0, x)
