"""Token trees of any shape, given by each node's parent: the attention mask and the depths.

A beam (`treeattn.beam`) is one way to write down a tree of candidate tokens, and a list of parents
is another. A model needs the mask and the depths to verify a tree in one pass.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer

from treeattn.checks import Array, Numbers, as_integers, bounded, namespace


def ancestor_mask(
    parents: Integer[Array, "*batch nodes"] | Numbers,
) -> Bool[Array, "*batch nodes nodes"]:
    """(..., L, L) bool: True where node j is node i itself or one of its ancestors.

    parents: (..., L) each node's parent, an earlier node, or −1 at a root

    Takes ⌈log₂ L⌉ rounds. After k rounds, a node's row marks those of its ancestors that are fewer
    than 2ᵏ steps above it. The next round adds the row of the ancestor exactly 2ᵏ steps above, and
    so reaches twice as far.

    Raises TypeError if `parents` is not an array of signed integers, and ValueError if a parent is
    neither −1 nor an earlier node, which excludes cycles. Inside jit, parents are clipped instead.

    >>> print(ancestor_mask([-1, 0, 0, 2]).astype(int)[3])  # node 3 below 2, node 2 below 0
    [1 0 1 1]
    """
    xp, parents = _checked_parents(parents)
    size = parents.shape[-1]
    mask = xp.broadcast_to(xp.eye(size, dtype=bool), (*parents.shape, size))
    for up in _ever_higher(xp, parents):
        above = xp.take_along_axis(mask, xp.maximum(up, 0)[..., None], axis=-2)
        mask = mask | (above & (up >= 0)[..., None])
    return mask


def depths(parents: Integer[Array, "*batch nodes"] | Numbers) -> Int[Array, "*batch nodes"]:
    """(..., L) int32: the number of each node's ancestors, which is its position offset.

    Takes and raises what `ancestor_mask` does.

    >>> print(depths([-1, 0, 0, 2]))
    [0 1 1 2]
    """
    xp, parents = _checked_parents(parents)
    depth = (parents >= 0).astype(xp.int32)
    for up in _ever_higher(xp, parents):
        depth = depth + xp.where(up >= 0, _at(xp, depth, up), 0)
    return depth


def _ever_higher(xp, parents):
    """Each node's 1st, 2nd, 4th, 8th … ancestor, up to the deepest possible; −1 above a root."""
    up = parents
    for _ in range(max(parents.shape[-1] - 1, 0).bit_length()):
        yield up
        up = xp.where(up >= 0, _at(xp, up, up), -1)


def _at(xp, x, node):
    """The entries of x at these nodes, (..., L); the entry of node 0 where the node is −1."""
    return xp.take_along_axis(x, xp.maximum(node, 0), axis=-1)


def _checked_parents(parents) -> tuple[Any, Array]:
    """(numpy or jax.numpy, parents in int32). Raises as `ancestor_mask` does."""
    parents = as_integers("parents", parents)
    if jnp.issubdtype(parents.dtype, jnp.unsignedinteger):
        raise TypeError(f"parents: expected a signed dtype, for −1 at a root, got {parents.dtype}")
    if parents.ndim == 0:
        raise ValueError("parents: expected axes (..., L), got a scalar")
    expected = "−1 (a root) or an earlier node, so that there is no cycle"
    before = np.broadcast_to(np.arange(parents.shape[-1]) - 1, parents.shape)
    return namespace(parents), bounded("parents", parents, -1, before, expected)
