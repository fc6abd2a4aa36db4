"""Rows of tokens as prefix trees in depth-first order, so that shared prefixes are computed once.

Samples of one prompt, or the branches of a conversation, begin alike. `pack_rows` lists every
distinct prefix of the rows once, depth first: a node, then all of its first child's subtree, then
the next child's. In that order a subtree is an interval of node numbers, and so the attention mask
is one integer a token, the end of its interval:

    query i sees key j  ⟺  j is i or an ancestor of i  ⟺  j ≤ i < ends[j]

    The cat sat             number   0    1    2    3    4    5
    The cat ran      →      token    The  cat  ran  sat  dog  barks
    The dog barks           ends     6    4    3    4    6    6

Node i is in j's subtree exactly when j is i or above it, and the numbers of that subtree are
j … ends[j] − 1. In any other order some subtree is no interval. `treeattn.pack` numbers a beam
candidate by candidate, which is depth first only if candidates that begin alike are neighbours.
`pack` returns the whole mask, which is small for a beam, and works inside jit.

This module uses NumPy, because rows are ragged and decide the shapes of compiled programs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Shaped

Array = jax.Array | np.ndarray


class RowTree(NamedTuple):
    """The prefix tree of some rows, its n nodes in depth-first order.

    tokens:    (n,) int32 token ids
    positions: (n,) int32, each node's position in its rows: its depth, 0 at a root
    ends:      (n,) int32, one more than the last node of each node's subtree: node i sees node j
               exactly when j ≤ i < ends[j]
    row_map:   (rows, longest) int32: the node of each row's token; −1 after the row's end
    """

    tokens: Int[np.ndarray, " nodes"]
    positions: Int[np.ndarray, " nodes"]
    ends: Int[np.ndarray, " nodes"]
    row_map: Int[np.ndarray, "rows longest"]

    @property
    def row_tokens(self) -> int:
        """How many tokens the rows have in all, each shared token counted in every row."""
        return int((self.row_map >= 0).sum())

    @property
    def parents(self) -> Int[np.ndarray, " nodes"]:
        """(n,) int32: the node before each node in its rows; −1 at a root."""
        parents = np.full(len(self.tokens), -1, np.int32)
        before = self.row_map[:, :-1]
        after = self.row_map[:, 1:]
        parents[after[after >= 0]] = before[after >= 0]
        return parents

    def unpack(
        self, of_nodes: Shaped[Array, " nodes *features"]
    ) -> Shaped[Array, "rows longest *features"]:
        """The nodes' values, read by the rows; 0 after a row's end. Differentiable.

        of_nodes: (n, ...), NumPy's or JAX's. Raises ValueError for another number of nodes.
        """
        if of_nodes.shape[:1] != self.tokens.shape:
            raise ValueError(
                f"of_nodes: expected an entry for each of {len(self.tokens)} nodes, got shape "
                f"{of_nodes.shape}"
            )
        there = self.row_map >= 0
        there = there.reshape(*there.shape, *[1] * (of_nodes.ndim - 1))
        xp = jnp if isinstance(of_nodes, jax.Array) else np
        return xp.where(there, of_nodes[np.maximum(self.row_map, 0)], 0)


def pack_rows(rows: Sequence) -> RowTree:
    """The prefix tree of rows of token ids: every distinct prefix once, in depth-first order.

    rows: token ids, each row a list or an array (length,) of at least one integer

    The tree has several roots if rows begin differently. Children are in the order of their
    token ids, so the tree does not depend on the order of the rows. Equal rows, and a row that
    begins another, share their nodes and keep their own lines of `row_map`. Compare
    len(tree.tokens) with tree.row_tokens to see the saving.

    Memory and time are proportional to the number of tokens; there is no (n, n) mask.

    Raises TypeError for rows that are not integers, ValueError for rows that have no tokens, are
    not one-dimensional, or hold ids that are negative or beyond int32.
    """
    tokens = [_checked_row(number, row) for number, row in enumerate(rows)]
    # The bytes of big-endian numbers compare as the numbers do, and a prefix comes first.
    keys = [row.astype(">i4").tobytes() for row in tokens]
    order = sorted(range(len(tokens)), key=keys.__getitem__)
    in_order = [tokens[number] for number in order]  # rows that begin alike are neighbours
    shared = _shared_with_the_one_before(in_order)
    lengths = np.array([len(row) for row in in_order], int)
    firsts = np.concatenate([[0], np.cumsum(lengths - shared)]).astype(
        int
    )  # the first that a row adds
    longest = int(lengths.max(initial=0))
    nothing = np.zeros(0, np.int32)
    added = [row[common:] for row, common in zip(in_order, shared, strict=True)]
    positions = [np.arange(c, n, dtype=np.int32) for c, n in zip(shared, lengths, strict=True)]
    return RowTree(
        np.concatenate([nothing, *added]),
        np.concatenate([nothing, *positions]),
        _ends(shared, lengths, firsts, longest),
        _paths(shared, lengths, firsts, longest)[np.argsort(order)],
    )


def interval_mask(ends) -> Bool[np.ndarray, "nodes nodes"]:
    """(n, n) bool, of `ends` (n,): True where query i sees key j, so where j ≤ i < ends[j].

    It has n² entries, and is for small trees and for attention that takes a mask.
    """
    ends = check_ends(np.asarray(ends)[None])[0]
    node = np.arange(len(ends))
    return (node <= node[:, None]) & (node[:, None] < ends)


def check_ends(ends) -> Array:
    """`ends` (b, n) in int32: where the subtree of each node ends, of nodes in depth-first order.

    Raises TypeError if they are not integers, and ValueError unless every node's interval, the
    numbers j … ends[j] − 1, begins with the node and is within another interval or apart from it.
    Traced values cannot be inspected.
    """
    if not jnp.issubdtype(ends.dtype, jnp.integer):
        raise TypeError(f"ends: expected integers, got dtype {ends.dtype}")
    if ends.ndim != 2:
        raise ValueError(f"ends: expected axes (batch, nodes), got shape {ends.shape}")
    if isinstance(ends, jax.core.Tracer):
        return ends.astype(jnp.int32)
    for row, line in enumerate(np.asarray(ends).tolist()):
        open_ends = [len(line)]  # of the subtrees that the node is in, the innermost last
        for node, end in enumerate(line):
            while open_ends[-1] <= node:
                open_ends.pop()
            if not node < end <= open_ends[-1]:
                raise ValueError(
                    f"ends: expected depth-first order, where node {node}'s subtree ends at "
                    f"{node + 1} to {open_ends[-1]}, got {end} in row {row}"
                )
            open_ends.append(end)
    return ends.astype(np.int32)


def _checked_row(number: int, row) -> Int[np.ndarray, " length"]:
    """Row `number` in int32. Raises an error that says what is wrong with the row."""
    name = f"rows[{number}]"
    row = np.asarray(row)
    if row.ndim != 1:
        raise ValueError(f"{name}: expected one axis (length,), got shape {row.shape}")
    if row.size == 0:
        raise ValueError(f"{name}: expected at least one token, got none")
    if not np.issubdtype(row.dtype, np.integer):
        raise TypeError(f"{name}: expected integers, got dtype {row.dtype}")
    if row.min() < 0 or row.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: expected ids from 0 to {np.iinfo(np.int32).max}")
    return row.astype(np.int32)


def _shared_with_the_one_before(tokens) -> list[int]:
    """How many leading tokens each row shares with the row before; 0 for the first."""
    shared = [0] * len(tokens)
    for place in range(1, len(tokens)):
        before = tokens[place - 1]
        row = tokens[place]
        shorter = min(len(before), len(row))
        differ = before[:shorter] != row[:shorter]
        first = int(differ.argmax())
        shared[place] = first if differ[first] else shorter
    return shared


def _paths(shared, lengths, firsts, longest: int):
    """(rows, longest) int32: the nodes from the root to each row's last token, then −1."""
    paths = np.full((len(shared), longest), -1, np.int32)
    path = np.zeros(longest, np.int32)
    for place, (common, length) in enumerate(zip(shared, lengths, strict=True)):
        path[common:length] = np.arange(length - common) + firsts[place]
        paths[place, :length] = path[:length]
    return paths


def _ends(shared, lengths, firsts, longest: int):
    """(n,) int32: where each node's subtree ends.

    The subtree of a node at depth p ends with the next row that shares at most p tokens with the
    row before it, at that row's first new node. So the rows are read from the last to the first,
    and the end for each depth is kept.
    """
    size = firsts[-1]
    ends = np.empty(size, np.int32)
    end_at_depth = np.full(longest, size, np.int32)
    for place in reversed(range(len(shared))):
        common = shared[place]
        ends[firsts[place] : firsts[place + 1]] = end_at_depth[common : lengths[place]]
        end_at_depth[common:] = firsts[place]
    return ends
