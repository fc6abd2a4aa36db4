"""Trees of candidate tokens: what is right, the batches, and what known mistakes give.

A tree is the index of each node's parent, which comes before it, and −1 at a root. Everything here
is plain loops over nodes: it is what a builder in any framework is compared with.
"""

from collections.abc import Callable

import numpy as np


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


def tree_batches() -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, parents (b, n), lengths (b,)) of batches of trees, the same at every call."""
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
    long = np.concatenate([np.arange(-1, 69)[None], random_trees(1, 70)])
    cases["70 nodes, long texts"] = (long, [300, 260])
    return [(name, x, np.array(lengths)) for name, (x, lengths) in cases.items()]


def _renumbered(parent: np.ndarray, order) -> np.ndarray:
    """The same tree with node order[i] as node i."""
    new = np.empty_like(parent)
    new[list(order)] = np.arange(len(parent))
    return np.array([-1 if parent[i] < 0 else new[parent[i]] for i in order])


def accepted_paths(parents: np.ndarray) -> np.ndarray:
    """A path of each row from a root down, −1 after its last node: (b, most) int.

    Row r's ends at the node that is r-th to last.
    """
    paths = []
    for r, parent in enumerate(parents):
        node = len(parent) - 1 - r % len(parent)
        path = []
        while node >= 0:
            path.append(node)
            node = parent[node]
        paths.append(path[::-1])
    most = max(map(len, paths))
    return np.array([path + [-1] * (most - len(path)) for path in paths])


def cache_with_tree(parents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A cache (b, room, 2) float32: each row's prefix, its nodes after it, and free room."""
    room = lengths.max() + parents.shape[1] + 3
    rng = np.random.default_rng(1)
    return rng.normal(size=(len(lengths), room, 2)).astype(np.float32)


# What known mistakes give, of parents (b, n) and lengths (b,)


def masks() -> dict[str, list[Callable]]:
    def of_levels(compare):
        def mask(parents, lengths):
            depths = tree_depths(parents)
            return compare(depths[:, None, :], depths[..., None]) | np.eye(
                parents.shape[1], dtype=bool
            )

        return mask

    def first_sees(parents, lengths):
        mask = tree_mask(parents)
        mask[:, 0] = True
        return mask

    def parent_alone(parents, lengths):
        n = parents.shape[1]
        return (np.arange(n) == parents[..., None]) | np.eye(n, dtype=bool)

    def causal(parents, lengths):
        n = parents.shape[1]
        return np.broadcast_to(np.tri(n, dtype=bool), (len(parents), n, n))

    return {
        "one row's tree for all": [
            lambda parents, _: tree_mask(np.repeat(parents[:1], len(parents), 0))
        ],
        "causal mask": [causal],
        "whole levels seen": [of_levels(np.less), of_levels(np.less_equal)],
        "only the parent seen": [parent_alone],
        "a node does not see itself": [
            lambda parents, _: tree_mask(parents) & ~np.eye(parents.shape[1], dtype=bool)
        ],
        "mask transposed": [lambda parents, _: tree_mask(parents).swapaxes(1, 2)],
        "True means hidden": [lambda parents, _: ~tree_mask(parents)],
        "root sees drafts": [first_sees],
    }


def positions() -> dict[str, list[Callable]]:
    def after(prefix):
        return lambda parents, lengths: prefix(lengths[:, None]) + tree_depths(parents)

    def by_index(parents, lengths):
        return lengths[:, None] + np.broadcast_to(np.arange(parents.shape[1]), parents.shape)

    def of_first(parents, lengths):
        return lengths[:, None] + tree_depths(parents[:1])

    return {
        "one row's tree for all": [of_first],
        "positions by index": [by_index],
        "positions without the prefix": [after(lambda lengths: 0)],
        "one prefix length for all": [after(lambda lengths: lengths[0]), after(np.max)],
        "positions off by one": [after(lambda x: x + 1), after(lambda x: x - 1)],
    }


def walks() -> dict[str, list[Callable]]:
    def levels(parents, lengths):
        """The next node of the same depth."""
        depths, (first, _) = tree_depths(parents), tree_walk(parents)
        links = np.full_like(parents, -1)
        for r, i in np.ndindex(parents.shape):
            later = np.flatnonzero(depths[r, i + 1 :] == depths[r, i])
            links[r, i] = i + 1 + later[0] if len(later) else -1
        return np.stack([first, links])

    def last_first(parents, lengths):
        last = np.full_like(parents, -1)
        for r, i in np.ndindex(parents.shape):
            if parents[r, i] >= 0:
                last[r, parents[r, i]] = i
        return np.stack([last, tree_walk(parents)[1]])

    def by_index(parents, lengths):
        links = np.append(np.arange(1, parents.shape[1]), -1)
        return np.stack([np.broadcast_to(links, parents.shape), tree_walk(parents)[1]])

    def changed(change):
        return lambda parents, lengths: np.stack(change(*tree_walk(parents)))

    return {
        "one row's tree for all": [
            lambda parents, _: np.stack(tree_walk(np.repeat(parents[:1], len(parents), 0)))
        ],
        "next sibling by level": [levels],
        "only first children": [changed(lambda child, sibling: (child, np.full_like(sibling, -1)))],
        "next token by index": [by_index],
        "last child first": [last_first],
        "0 for none": [changed(lambda *links: np.maximum(links, 0))],
    }


def commits() -> dict[str, list[Callable]]:
    """Of a cache, lengths and accepted paths."""

    def dense(cache, lengths, paths):
        return kept_path(cache, lengths, np.where(paths >= 0, np.arange(paths.shape[1]), -1))

    def of_row(r):
        return lambda cache, lengths, paths: kept_path(cache, lengths, paths[[r] * len(paths)])

    def count(of_all):
        """Behind a path that is shorter lies what the cache held there."""

        def commit(cache, lengths, paths):
            rows = zip(cache, kept_path(cache, lengths, paths), lengths, strict=True)
            n = of_all((paths >= 0).sum(1))
            return [np.concatenate([x[: m + n], row[len(x) : m + n]]) for row, x, m in rows]

        return commit

    def without_root(cache, lengths, paths):
        return kept_path(cache, lengths, paths[:, 1:])

    return {
        "path kept as a dense prefix": [dense],
        "one row's path for all": [of_row(0), of_row(-1)],
        "one row's count for all": [count(np.max), count(lambda counts: counts[0]), count(np.min)],
        "root not kept": [without_root],
    }
