"""Trees of candidate tokens: what is right, and the batches that are asked about.

A tree is the index of each node's parent, which comes before it, and −1 at a root. Everything here
is plain loops over nodes: it is what a builder in any framework is compared with.
"""

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
