"""Trees of candidate tokens: what is right, the questions, and what known mistakes give.

A tree is the index of each node's parent, which comes before it, and −1 at a root. Everything here
is plain loops over nodes: it is what a builder in any framework is compared with.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class TreeCase(NamedTuple):
    """One batch of trees, after texts of these lengths."""

    name: str
    parents: np.ndarray  # (b, n) int
    lengths: np.ndarray  # (b,) int


# What is right


def tree_depths(parents: np.ndarray) -> np.ndarray:
    """How many ancestors each node of a batch has: (b, n)."""
    depths = np.zeros_like(parents)
    for row, parent in zip(depths, parents, strict=True):
        for i, p in enumerate(parent):
            row[i] = 0 if p < 0 else row[p] + 1
    return depths


def tree_mask(parents: np.ndarray) -> np.ndarray:
    """mask[r, i, j]: whether node i of row r sees node j, itself or an ancestor: (b, n, n)."""
    b, n = parents.shape
    mask = np.zeros((b, n, n), bool)
    for row, parent in zip(mask, parents, strict=True):
        for i, p in enumerate(parent):
            if p >= 0:
                row[i] = row[p]
            row[i, i] = True
    return mask


def tree_walk(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(next_token, next_sibling), (b, n) each: a node's first child, its parent's next one, or −1.

    Roots are each other's siblings.
    """
    next_token = np.full_like(parents, -1)
    next_sibling = np.full_like(parents, -1)
    for r, parent in enumerate(parents):
        for p in range(-1, len(parent)):
            children = np.flatnonzero(parent == p)
            if p >= 0 and len(children):
                next_token[r, p] = children[0]
            next_sibling[r, children[:-1]] = children[1:]
    return next_token, next_sibling


def kept_path(cache, lengths, accepted) -> list[np.ndarray]:
    """Of each row, what a cache holds once a path is accepted: the prefix, then the path's nodes.

    Arguments are those of `check_tree`'s commit.
    """
    rows = []
    for row, length, path in zip(cache, lengths, accepted, strict=True):
        rows.append(np.concatenate([row[:length], row[length + path[path >= 0]]]))
    return rows


# The questions


def tree_cases() -> list[TreeCase]:
    """Batches of trees, the same at every call."""
    rng = np.random.default_rng(0)

    def random_trees(b: int, n: int) -> np.ndarray:
        parents = [[-1, *(rng.integers(0, i) for i in range(1, n))] for _ in range(b)]
        return np.array(parents)

    def depth_first(parent: np.ndarray) -> np.ndarray:
        order = []
        rest = [0]
        while rest:
            i = rest.pop()
            order.append(i)
            rest += list(np.flatnonzero(parent == i)[::-1])
        return _renumbered(parent, order)

    def breadth_first(parent: np.ndarray) -> np.ndarray:
        return _renumbered(parent, np.argsort(tree_depths(parent[None])[0], kind="stable"))

    trees = random_trees(3, 9)
    roots = np.array([[-1, 0, -1, 2, 0, 2], [-1, -1, -1, 0, 1, 0]])
    cases = {
        "one node": (np.array([[-1]]), [3]),
        "chain": (np.array([[-1, 0, 1, 2, 3]]), [4]),
        "star": (np.array([[-1, 0, 0, 0, 0]]), [4]),
        "any order": (trees, [5, 2, 9]),
        "depth first": (np.stack([depth_first(x) for x in trees]), [5, 2, 9]),
        "breadth first": (np.stack([breadth_first(x) for x in trees]), [5, 2, 9]),
        "no prefix": (trees[:2], [0, 0]),
        "several roots": (roots, [4, 1]),
    }
    for number in range(40):
        b = int(rng.integers(1, 5))
        n = int(rng.integers(2, 17))
        cases[f"random trees {number}"] = (random_trees(b, n), rng.integers(0, 20, b))
    return [TreeCase(name, x, np.array(lengths)) for name, (x, lengths) in cases.items()]


def _renumbered(parent: np.ndarray, order) -> np.ndarray:
    """The same tree with node order[i] as node i."""
    new = np.empty_like(parent)
    new[list(order)] = np.arange(len(parent))
    return np.array([-1 if parent[i] < 0 else new[parent[i]] for i in order])


def accepted_paths(case: TreeCase) -> np.ndarray:
    """A path of each row from a root down, −1 after its last node: (b, most) int.

    Row r's ends at the node that is r-th to last.
    """
    paths = []
    for r, parent in enumerate(case.parents):
        node = len(parent) - 1 - r % len(parent)
        path = []
        while node >= 0:
            path.append(node)
            node = parent[node]
        paths.append(path[::-1])
    most = max(map(len, paths))
    return np.array([path + [-1] * (most - len(path)) for path in paths])


def cache_with_tree(case: TreeCase) -> np.ndarray:
    """A cache (b, room, 2) float32: each row's prefix, its nodes after it, and free room."""
    room = case.lengths.max() + case.parents.shape[1] + 3
    rng = np.random.default_rng(1)
    return rng.normal(size=(len(case.lengths), room, 2)).astype(np.float32)


# What known mistakes give


def wrong_masks(case: TreeCase) -> Iterator[tuple[str, np.ndarray]]:
    mask = tree_mask(case.parents)
    n = mask.shape[-1]
    index = np.arange(n)
    depths = tree_depths(case.parents)
    itself = np.eye(n, dtype=bool)
    first = np.broadcast_to(mask[:1], mask.shape)
    root = mask.copy()
    root[:, 0] = True
    yield "one row's tree for all", first
    yield "causal mask", np.broadcast_to(index <= index[:, None], mask.shape)
    yield "whole levels seen", (depths[:, None, :] < depths[..., None]) | itself
    yield "whole levels seen", depths[:, None, :] <= depths[..., None]
    yield "only the parent seen", (index == case.parents[..., None]) | itself
    yield "a node does not see itself", mask & ~itself
    yield "mask transposed", mask.swapaxes(1, 2)
    yield "True means hidden", ~mask
    yield "root sees drafts", root


def wrong_positions(case: TreeCase) -> Iterator[tuple[str, np.ndarray]]:
    depths = tree_depths(case.parents)
    lengths = case.lengths[:, None]
    yield "one row's tree for all", lengths + depths[:1]
    yield "positions by index", lengths + np.arange(depths.shape[1])
    yield "positions without the prefix", depths
    yield "one prefix length for all", case.lengths[0] + depths
    yield "one prefix length for all", case.lengths.max() + depths
    yield "positions off by one", lengths + depths + 1
    yield "positions off by one", lengths + depths - 1


def wrong_walks(case: TreeCase) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    next_token, next_sibling = tree_walk(case.parents)
    b, n = case.parents.shape
    depths = tree_depths(case.parents)
    levels = np.full_like(next_sibling, -1)
    last = np.full_like(next_token, -1)
    for r, i in np.ndindex(b, n):
        later = np.flatnonzero(depths[r, i + 1 :] == depths[r, i])
        levels[r, i] = i + 1 + later[0] if len(later) else -1
        children = np.flatnonzero(case.parents[r] == i)
        last[r, i] = children[-1] if len(children) else -1
    by_index = np.append(np.arange(1, n), -1)
    yield (
        "one row's tree for all",
        tuple(np.repeat(x[:1], b, 0) for x in (next_token, next_sibling)),
    )
    yield "next sibling by level", (next_token, levels)
    yield "only first children", (next_token, np.full_like(next_sibling, -1))
    yield "next token by index", (np.broadcast_to(by_index, (b, n)), next_sibling)
    yield "last child first", (last, next_sibling)
    yield "0 for none", (np.maximum(next_token, 0), np.maximum(next_sibling, 0))


def wrong_commits(case: TreeCase) -> Iterator[tuple[str, list[np.ndarray]]]:
    cache = cache_with_tree(case)
    paths = accepted_paths(case)
    counts = (paths >= 0).sum(1)
    b, most = paths.shape
    dense = np.where(paths >= 0, np.arange(most), -1)
    yield "path kept as a dense prefix", kept_path(cache, case.lengths, dense)
    for r in (0, -1):
        one = np.repeat(paths[r][None], b, 0)
        yield "one row's path for all", kept_path(cache, case.lengths, one)
    right = kept_path(cache, case.lengths, paths)
    for count in (most, counts[0], counts.min()):
        # Behind a path that is shorter lies what the cache held there.
        ends = (case.lengths + count).tolist()
        rows = zip(cache, right, ends, strict=True)
        yield "one row's count for all", [_with_length(*row) for row in rows]
    yield "root not kept", kept_path(cache, case.lengths, paths[:, 1:])


def _with_length(row: np.ndarray, kept: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([kept[:length], row[len(kept) : length]])
