"""Token trees of any shape, given by each node's parent: the mask, the depths, the four tensors.

A beam is one way to write down a tree of candidate tokens, a list of parents another;
`tree_from_beam` and `beam_from_tree` translate. `pack_tree` returns for any tree what
`pack` returns for a beam. `treeattn.trees.draft` has two ways to come by a tree.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int, Integer

from treeattn.idea.arrays import Array, as_array, bounded, check_integers, check_rank, namespace
from treeattn.trees.beam import PackedBeam, check_pad_token, pack, unpack


class TokenTree(NamedTuple):
    """A batch of token trees; with several roots, of forests.

    tokens:  (B, L) token ids; anything at pads
    parents: (B, L) each node's parent, an earlier node, or −1 at a root; −1 at pads
    sizes:   (B,)   the number of nodes of each tree; the entries from there on are pads
    """

    tokens: Integer[Array, "batch nodes"]
    parents: Integer[Array, "batch nodes"]
    sizes: Integer[Array, " batch"]


def ancestor_mask(parents: Integer[Array, "*batch nodes"]) -> Bool[Array, "*batch nodes nodes"]:
    """(..., L, L) bool: True where node j is node i itself or one of its ancestors.

    parents: (..., L) each node's parent, an earlier node, or −1 at a root

    The ancestors fewer than 2ᵏ⁺¹ steps up are those fewer than 2ᵏ steps up, together with
    the same of the node 2ᵏ steps up: ⌈log₂ L⌉ rounds.

    Raises TypeError when parents is not an array of integers, ValueError when one is neither −1
    nor an earlier node, so that there are no cycles (inside jit, they are clipped to that).
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
    """
    xp, parents = _checked_parents(parents)
    depth = (parents >= 0).astype(xp.int32)
    for up in _ever_higher(xp, parents):
        depth = depth + xp.where(up >= 0, _at(xp, depth, up), 0)
    return depth


def tree_from_beam(
    beam: Integer[Array, "batch rows width"], lengths: Integer[Array, "batch rows"] | None = None
) -> TokenTree:
    """The tree of a beam's prefixes, its nodes numbered as `pack` numbers them.

    Takes, raises, and sizes its result as `pack` does.
    """
    packed = pack(beam, lengths)
    xp = namespace(packed.packed_beam)
    # Paths run through ever larger numbers, so a node's parent is the last of its ancestors.
    node = xp.arange(packed.packed_beam.shape[1], dtype=xp.int32)
    above = packed.attention_mask & (node < node[:, None])
    parents = xp.max(xp.where(above, node, -1), axis=2, initial=-1)
    real = xp.diagonal(packed.attention_mask, axis1=1, axis2=2)  # a pad does not see itself
    sizes = xp.sum(real, axis=1, dtype=xp.int32)
    return TokenTree(packed.packed_beam, parents, sizes)


def leaf_paths(
    parents: Integer[np.ndarray, "batch nodes"], sizes: Integer[np.ndarray, " batch"]
) -> tuple[Int[np.ndarray, "batch leaves depth"], Int[np.ndarray, "batch leaves"]]:
    """(paths, lengths): the nodes from the root to each leaf, leaves in ascending order.

    paths (B, M, C) holds −1 after a path's end, lengths (B, M) its nodes. M is the largest
    number of leaves in the batch, C the longest path; the rows of a tree with fewer leaves
    have length 0. Parents and sizes decide these shapes, so neither may be traced.
    """
    batch, nodes = parents.shape
    real = np.arange(nodes) < sizes[:, None]
    depth = np.where(real, depths(parents), -1)
    inner = np.zeros((batch, nodes + 1), bool)  # the last column collects the roots' −1
    parent_or_last = np.where(real, parents, -1) % (nodes + 1)
    np.put_along_axis(inner, parent_or_last, True, axis=1)
    leaf = real & ~inner[:, :nodes]
    rows = int(leaf.sum(axis=1).max(initial=0))
    order = np.argsort(~leaf, axis=1, kind="stable")[:, :rows]
    node = np.where(np.take_along_axis(leaf, order, axis=1), order, -1)
    leaf_depth = np.take_along_axis(depth, order, axis=1)
    lengths = np.where(node >= 0, leaf_depth + 1, 0)
    longest = int(depth.max(initial=-1)) + 1
    paths = np.full((batch, rows, longest), -1)
    for column in reversed(range(longest)):
        here = lengths > column
        paths[..., column] = np.where(here, node, -1)
        node = np.where(here, _at(np, parents, node), node)
    return paths.astype(np.int32), lengths.astype(np.int32)


def beam_from_tree(
    tree: TokenTree,
) -> tuple[Integer[Array, "batch leaves depth"], Int[np.ndarray, "batch leaves"]]:
    """(beam, lengths): one candidate a leaf, its tokens from the root down; 0 beyond its end.

    The tree's parents and sizes must be concrete; the tokens may be traced.
    """
    tokens, parents, sizes = _checked_tree(tree)
    paths, lengths = leaf_paths(parents, sizes)
    beam = unpack(tokens, np.maximum(paths, 0))
    return namespace(tokens).where(paths >= 0, beam, 0), lengths


def pack_tree(tree: TokenTree, *, pad_token: int = 0) -> PackedBeam:
    """The four tensors of `pack` for any token tree, its nodes in the order they came in.

    `unpack_map` has a row for each leaf, as `beam_from_tree` has; its entries beyond a path's
    end, and its rows beyond a tree's last leaf, are 0.

    The tree's parents and sizes decide shapes and must be concrete; the tokens may be traced.
    Raises TypeError or ValueError where they are not integers, do not fit, or are no tree, and
    where pad_token does not fit the tokens' dtype.
    """
    tokens, parents, sizes = _checked_tree(tree)
    pad_token = check_pad_token(pad_token, tokens.dtype)
    paths, _ = leaf_paths(parents, sizes)
    xp = namespace(tokens)
    real = np.arange(parents.shape[1]) < sizes[:, None]
    mask = ancestor_mask(parents) & real[:, :, None] & real[:, None]
    offsets = np.where(real, depths(parents), 0)
    tokens = xp.where(real, tokens, xp.asarray(pad_token, dtype=tokens.dtype))
    unpack_map = np.maximum(paths, 0)
    return PackedBeam(tokens, xp.asarray(mask), xp.asarray(offsets), xp.asarray(unpack_map))


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
    if parents.ndim == 0:
        raise ValueError("parents: expected axes (..., L), got a scalar")
    expected = "−1 (a root) or an earlier node, so that there is no cycle"
    before = np.broadcast_to(np.arange(parents.shape[-1]) - 1, parents.shape)
    return namespace(parents), bounded("parents", parents, -1, before, expected)


def _checked_tree(tree):
    """(tokens, parents, sizes), the latter two NumPy's, or the error that says what is wrong."""
    if not isinstance(tree, tuple) or len(tree) != len(TokenTree._fields):
        expected = f"a TokenTree {TokenTree._fields}"
        raise TypeError(f"tree: expected {expected}, got {type(tree).__name__} {tree!r:.40}")
    tokens, parents, sizes = map(as_array, TokenTree._fields, tree)
    check_integers(tokens=tokens, parents=parents, sizes=sizes)
    for name, x in {"parents": parents, "sizes": sizes}.items():
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{name}: decide the result's shape and cannot be traced")
    check_rank(2, "(batch, L)", tokens=tokens, parents=parents)
    batch, nodes = parents.shape
    if tokens.shape != parents.shape:
        raise ValueError(f"tokens: expected parents' shape {parents.shape}, got {tokens.shape}")
    if sizes.shape != (batch,):
        raise ValueError(f"sizes: expected {batch} numbers, one a tree, got shape {sizes.shape}")
    sizes = bounded("sizes", sizes, 0, nodes, f"0 to {nodes} nodes")
    return tokens, np.asarray(_checked_parents(parents)[1]), np.asarray(sizes)
