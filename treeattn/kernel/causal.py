"""Causal attention on one device: a text is halved, so that little is computed and then hidden."""

import jax
import jax.numpy as jnp

from treeattn.idea.arrays import pad_axis
from treeattn.idea.state import AttentionState, merge
from treeattn.kernel.blockwise import attend_blockwise
from treeattn.kernel.inputs import Inputs

CAUSAL_BLOCK = 128  # queries under one mask, at most: half of the scores under it are hidden


def attend_causal(inputs: Inputs) -> AttentionState:
    """The state of queries that each see the keys up to their own, without mask and lengths.

    The text is halved until its parts are short: 1,000 tokens become 8 parts of 125. Each part
    sees itself under a mask. On the way back up, the second of two neighbours sees all of the
    first, and the states merge: a tree over the text, which computes few of the scores that
    causality hides.
    """
    b, length = inputs.q.shape[:2]
    parts = 1
    while parts * CAUSAL_BLOCK < length:
        parts *= 2
    size = -(-length // parts)
    # Padded keys come last: nobody sees them.
    q, k, v = (pad_axis(x, 1, parts * size) for x in (inputs.q, inputs.k, inputs.v))

    def state_of_keys(q, k, v, mask=None):
        return attend_blockwise(inputs.replace(q=q, k=k, v=v, mask=mask, causal=False))

    below = jnp.tri(size, dtype=bool)[None, None]
    state = state_of_keys(*_split((q, k, v), b * parts, size), below)
    while parts > 1:
        parts //= 2
        size *= 2
        state, q, k, v = _split((state, q, k, v), b * parts, size)
        before = state_of_keys(_half(q, 1), _half(k, 0), _half(v, 0))
        second = merge(before, _half(state, 1))
        state = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), _half(state, 0), second)
    return jax.tree.map(lambda x: x[:, :length], state)


def _split(tree, rows: int, size: int):
    """Rows of a text as more, or fewer, of `size` tokens: (b, l, …) -> (rows, size, …)."""
    return jax.tree.map(lambda x: x.reshape(rows, size, *x.shape[2:]), tree)


def _half(tree, which: int):
    """The first (0) or the second (1) half of each row: (rows, size, …) -> (rows, size / 2, …)."""
    return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[which], tree)
