"""Token trees of any shape, given by each node's parent: who sees whom, and how deep each stands.

A beam is one way to write down a tree of candidate tokens (`treeattn.beam`), a list of parents
another. The mask and the depths are what a model needs to verify either in one pass.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer

from treeattn.checks import Array, as_array, bounded, check_integers, namespace


def ancestor_mask(parents: Integer[Array, "*batch nodes"]) -> Bool[Array, "*batch nodes nodes"]:
    """(..., L, L) bool: True where node j is node i itself or one of its ancestors.

    parents: (..., L) each node's parent, an earlier node, or −1 at a root

    The ancestors fewer than 2ᵏ⁺¹ steps up are those fewer than 2ᵏ steps up, together with
    the same of the node 2ᵏ steps up: ⌈log₂ L⌉ rounds.

    Raises TypeError when parents is not an array of signed integers, ValueError when one is neither
    −1 nor an earlier node, so that there are no cycles (inside jit, they are clipped to that).

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


def depths(parents: Integer[Array, "*batch nodes"]) -> Int[Array, "*batch nodes"]:
    """(..., L) int32: the number of each node's ancestors, 0 at a root: its position offset.

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
    """Each node's 1st, 2nd, 4th, 8th … ancestor, until nothing is higher; −1 above a root."""
    up = parents
    for _ in range(max(parents.shape[-1] - 1, 0).bit_length()):
        yield up
        up = xp.where(up >= 0, _at(xp, up, up), -1)


def _at(xp, x, node):
    """x of those nodes, (..., L); of node 0 where the number is −1."""
    return xp.take_along_axis(x, xp.maximum(node, 0), axis=-1)


def _checked_parents(parents):
    """(numpy or jax.numpy, parents in int32), or the error that says what is wrong."""
    parents = as_array("parents", parents)
    check_integers(parents=parents)
    if jnp.issubdtype(parents.dtype, jnp.unsignedinteger):
        raise TypeError(f"parents: expected a signed dtype, for −1 at a root, got {parents.dtype}")
    if parents.ndim == 0:
        raise ValueError("parents: expected axes (..., L), got a scalar")
    expected = "−1 (a root) or an earlier node, so that there is no cycle"
    before = np.broadcast_to(np.arange(parents.shape[-1]) - 1, parents.shape)
    return namespace(parents), bounded("parents", parents, -1, before, expected)
