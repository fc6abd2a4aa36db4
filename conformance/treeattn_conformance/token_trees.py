"""Trees of candidate tokens: the right answers, the batches, and the answers of known mistakes.

A tree holds the index of each node's parent, which is lower than the node's, and −1 at a root. The
right answers are plain loops over nodes; builders in any framework are compared with them.
"""

from collections.abc import Callable

import numpy as np


def tree_mask(parents: np.ndarray, lengths=None) -> np.ndarray:
    """(b, n, n): whether node i of row r sees node j, which is i itself or an ancestor of i."""
    b, n = parents.shape
    mask = np.zeros((b, n, n), bool)
    for row, parent in zip(mask, parents, strict=True):
        for i, p in enumerate(parent):
            if p >= 0:
                row[i] = row[p]
            row[i, i] = True
    return mask


def tree_depths(parents: np.ndarray) -> np.ndarray:
    """(b, n): the number of ancestors of each node."""
    return tree_mask(parents).sum(axis=-1) - 1


def tree_positions(parents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return lengths[:, None] + tree_depths(parents)


def tree_walk(parents: np.ndarray, lengths=None) -> np.ndarray:
    """(2, b, n): each node's first child (next_token) and next sibling, or −1 for none.

    Roots are siblings of each other.
    """
    walk = np.full((2, *parents.shape), -1)
    for r, parent in enumerate(parents):
        for p in range(-1, len(parent)):
            children = np.flatnonzero(parent == p)
            if p >= 0 and len(children):
                walk[0, r, p] = children[0]
            walk[1, r, children[:-1]] = children[1:]
    return walk


def kept_path(cache, lengths, accepted) -> list[np.ndarray]:
    """The entries that each row keeps after a path is accepted: the prefix, then the path's nodes.

    The arguments are those of `check_tree`'s commit.
    """
    rows = []
    for row, length, path in zip(cache, lengths, accepted, strict=True):
        rows.append(np.concatenate([row[:length], row[length + path[path >= 0]]]))
    return rows


def tree_batches() -> list[tuple[str, np.ndarray, np.ndarray]]:
    """[(name, parents (b, n), lengths (b,))], the same batches of trees at every call."""
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
    """The same tree, in which node order[i] has become node i."""
    new = np.empty_like(parent)
    new[list(order)] = np.arange(len(parent))
    return np.array([-1 if parent[i] < 0 else new[parent[i]] for i in order])


def accepted_paths(parents: np.ndarray) -> np.ndarray:
    """(b, most) int: a path of each row, from a root down, and −1 after its last node.

    The path of row r ends at node n − 1 − r, counted around.
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
    """A cache (b, room, 2) float32. Each row holds a prefix, its nodes, and free room."""
    room = lengths.max() + parents.shape[1] + 3
    rng = np.random.default_rng(1)
    return rng.normal(size=(len(lengths), room, 2)).astype(np.float32)


# Known mistakes, as functions of parents (b, n) and lengths (b,)


def of_masks(change: Callable) -> Callable:
    """change(mask, gap): gap (b, n, n) is the number of levels from node j down to node i."""

    def mask(parents, lengths):
        depths = tree_depths(parents)
        return change(tree_mask(parents), depths[:, :, None] - depths[:, None])

    return mask


def of_positions(change: Callable) -> Callable:
    """change(depths (b, n), lengths (b, 1))"""
    return lambda parents, lengths: change(tree_depths(parents), lengths[:, None])


def of_walks(change: Callable) -> Callable:
    """change(parents, next_token, next_sibling) writes into the links of one row."""

    def walk(parents, lengths):
        found = tree_walk(parents)
        for r, parent in enumerate(parents):
            change(parent, *found[:, r])
        return found

    return walk


def of_first_tree(right: Callable) -> Callable:
    return lambda parents, lengths: right(np.repeat(parents[:1], len(parents), 0), lengths)


def by_level(parent, child, sibling):
    """The next sibling is the next node of the same depth."""
    depths = tree_depths(parent[None])[0]
    for i in range(len(parent)):
        sibling[i] = next((j for j in range(i + 1, len(parent)) if depths[j] == depths[i]), -1)


def last_first(parent, child, sibling):
    for i, p in enumerate(parent):
        child[p if p >= 0 else i] = i if p >= 0 else child[i]


def by_index(parent, child, sibling):
    child[:] = [*range(1, len(parent)), -1]


MASKS = {
    "causal mask": [lambda m, gap: np.broadcast_to(np.tri(m.shape[1], dtype=bool), m.shape)],
    "whole levels seen": [lambda m, gap: m | (gap > 0), lambda m, gap: gap >= 0],
    "only the parent seen": [lambda m, gap: m & (gap <= 1)],
    "a node does not see itself": [lambda m, gap: m & (gap > 0)],
    "mask transposed": [lambda m, gap: m.swapaxes(1, 2)],
    "True means hidden": [lambda m, gap: ~m],
    "root sees drafts": [lambda m, gap: m | (np.arange(m.shape[1]) == 0)[:, None]],
}
POSITIONS = {
    "positions by index": [lambda depths, n: n + np.arange(depths.shape[1])],
    "positions without the prefix": [lambda depths, n: depths],
    "one prefix length for all": [lambda depths, n: n[0] + depths, lambda d, n: n.max() + d],
    "positions off by one": [lambda depths, n: n + depths + 1, lambda d, n: n + d - 1],
}
WALKS = {
    "next sibling by level": [by_level],
    "only first children": [lambda parent, child, sibling: sibling.fill(-1)],
    "next token by index": [by_index],
    "last child first": [last_first],
    "0 for none": [lambda parent, *links: [np.maximum(x, 0, out=x) for x in links]],
}


def commits() -> dict[str, list[Callable]]:
    """{name: forms}, each a function of a cache, lengths and accepted paths."""

    def dense(cache, lengths, paths):
        return kept_path(cache, lengths, np.where(paths >= 0, np.arange(paths.shape[1]), -1))

    def of_row(r):
        return lambda cache, lengths, paths: kept_path(cache, lengths, paths[[r] * len(paths)])

    def count(of_all):
        """All rows keep as many nodes; a row with a shorter path keeps the cache's old entries."""

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


def wrong_parts() -> dict[str, list[tuple[str, Callable]]]:
    """{part: [(name, a function that makes the mistake)]}"""
    found: dict = {"commit": [(x, form) for x, forms in commits().items() for form in forms]}
    for part, wrap, right, known in (
        ("mask", of_masks, tree_mask, MASKS),
        ("positions", of_positions, tree_positions, POSITIONS),
        ("walk", of_walks, tree_walk, WALKS),
    ):
        found[part] = [(x, wrap(form)) for x, forms in known.items() for form in forms]
        found[part].append(("one row's tree for all", of_first_tree(right)))
    return found
