"""Mistakes that are known of packed losses, each as a pass of the tiny model that makes it.

What a mistake does is a change of the pass: another position, another mask, another target, a
gradient that is stopped.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from .packing import (
    REDUCTIONS,
    Packing,
    Weighted,
    ancestors,
    packings,
    reduced,
    right_pass,
    share_prefixes,
    weighted,
)
from .tiny_model import Pass

# What known mistakes are, and their cures.
PACKING_FINGERPRINTS = {
    "one child's target": "a branch point has a target for each child: read a row's token at its "
    "own parent, not a label a node",
    "first tokens of branches left out": "the token after a branch point counts, too: its "
    "log-probability is read at the branch point",
    "targets by order": "a node is predicted by its parent, not by the node before it",
    "a node counted once": "rows that share a node add up their weights there: read the nodes' "
    "log-probabilities row by row, and gradients add by themselves",
    "mean over nodes": "the mean is over rows, or over their tokens, one by one: divide by what "
    "separate rows would divide by",
    "another mean": "a sum, a mean over tokens and a mean over rows are different losses",
    "positions not by depth": "a node stands where it stands in its rows: as deep as it is",
    "prefix detached": "keys and values of a shared prefix need the gradient of all that see them",
    "prefix of older weights": "a shared prefix that is kept belongs to the weights it was "
    "computed with: compute it anew after each update",
    "one node for two prefixes": "a node is a prefix: the same token at the same depth behind "
    "another prefix is another node",
    "equal rows counted once": "rows that are equal share their nodes, and each has its weights",
    "row that ends within another": "a row may end at a node with children: keep every row's own "
    "end and weights",
    "mask by order": "a node sees its ancestors only, not all nodes before it",
    "weights off by one": "a token's weight is for its own log-probability, which is read one "
    "token before",
    "sign": "the loss is minus the weighted log-probabilities",
}


def wrong_passes(rows, weights, reduction: str) -> Iterator[tuple[str, Pass]]:
    """(fingerprint, pass) of known mistakes; several for one that has several forms."""
    of_loss = reduced(weights, reduction)
    for packing in packings(rows):
        asked = weighted(packing, of_loss)
        right = right_pass(packing, asked)
        yield "sign", right._replace(weights=-asked.weights)
        yield from _wrong_targets(packing, asked, right)
        for once in _counted_once(asked):
            yield "a node counted once", right_pass(packing, once)
        yield from _wrong_means(packing, weights, reduction)
        yield from _wrong_places(packing, right)
        yield from _wrong_gradients(packing, right)
    yield from _wrong_rows(rows, weights, reduction)
    numbers = range(len(rows))
    orders = (numbers, sorted(numbers, key=lambda r: rows[r]))
    for order, last in itertools.product(orders, (1, 2, 3)):
        merged = share_prefixes(rows, order, last)
        yield "one node for two prefixes", right_pass(merged, weighted(merged, of_loss))


def _wrong_targets(packing: Packing, asked: Weighted, right: Pass) -> Iterator[tuple[str, Pass]]:
    """Of branch points, and of shifted rows."""
    for choose in (min, max):
        child = {}
        for node, parent in enumerate(packing.parents):
            child[parent] = choose(node, child.get(parent, node))
        kept = [child[packing.parents[node]] == node for node in asked.nodes]
        yield "one child's target", right_pass(packing, Weighted(*(x[kept] for x in asked)))
        # That child's log-probability, wherever another's would be read.
        instead = np.array([child[packing.parents[node]] for node in asked.nodes], int)
        yield "one child's target", right_pass(packing, asked._replace(nodes=instead))
    children = np.bincount(packing.parents + 1, minlength=len(packing.parents) + 1)[1:]
    within = children[packing.parents[asked.nodes]] == 1
    yield (
        "first tokens of branches left out",
        right_pass(packing, Weighted(*(x[within] for x in asked))),
    )
    yield "targets by order", right._replace(sources=np.maximum(asked.nodes - 1, 0))
    starts = np.cumsum([0] + [len(path) - 1 for path in packing.paths])
    for moved in (-1, 1):
        parts = [asked.weights[a:b] for a, b in itertools.pairwise(starts)]
        shifted = [np.append(0, x)[: len(x)] if moved > 0 else np.append(x[1:], 0) for x in parts]
        yield "weights off by one", right._replace(weights=np.concatenate(shifted))


def _counted_once(asked: Weighted) -> Iterator[Weighted]:
    """Of nodes that rows share one row's weight, or the mean of all."""
    nodes, first = np.unique(asked.nodes, return_index=True)
    _, last = np.unique(asked.nodes[::-1], return_index=True)
    sums = np.bincount(asked.nodes, asked.weights)[nodes]
    rows = np.bincount(asked.nodes)[nodes]
    for of_nodes in (asked.weights[first], asked.weights[::-1][last], sums / rows):
        yield Weighted(nodes, of_nodes)


def _wrong_means(packing: Packing, weights, reduction: str) -> Iterator[tuple[str, Pass]]:
    """Over nodes, of which there are fewer; and over something else than was asked for."""
    asked = weighted(packing, reduced(weights, "sum"))
    count = max(len(np.unique(asked.nodes[asked.weights != 0])), 1)
    for found in (asked, *_counted_once(asked)):
        mean = found._replace(weights=found.weights / count)
        yield "mean over nodes", right_pass(packing, mean)
    for other in REDUCTIONS:
        if other != reduction:
            of_other = weighted(packing, reduced(weights, other))
            yield "another mean", right_pass(packing, of_other)


def _wrong_places(packing: Packing, right: Pass) -> Iterator[tuple[str, Pass]]:
    """Of positions and of masks."""
    n = len(packing.tokens)
    index = np.arange(n)
    yield "positions not by depth", right._replace(positions=index)
    segments = _segments(packing)
    restart = index - np.array([np.flatnonzero(segments == s)[0] for s in segments])
    yield "positions not by depth", right._replace(positions=restart)
    earlier = index <= index[:, None]
    root = ancestors(packing.parents).argmax(axis=1)
    yield "mask by order", right._replace(visible=earlier)
    yield "mask by order", right._replace(visible=earlier & (root == root[:, None]))


def _wrong_gradients(packing: Packing, right: Pass) -> Iterator[tuple[str, Pass]]:
    """Of a prefix that is computed first, and whose keys are kept."""
    seen = right.visible
    shared = np.bincount(np.concatenate(packing.paths), minlength=len(seen)) > 1
    segments = _segments(packing)
    trunk = shared & (segments == segments[seen.argmax(axis=1)])  # up to its root's first branch
    for prefix in (shared, trunk):
        kept = ~prefix[:, None] & prefix
        yield "prefix detached", right._replace(detached=kept)
        yield "prefix detached", right._replace(stopped=prefix)
        yield "prefix of older weights", right._replace(cached=kept)
    other = segments != segments[:, None]
    yield "prefix detached", right._replace(detached=other)
    yield "prefix of older weights", right._replace(cached=other)


def _segments(packing: Packing) -> np.ndarray:
    """(n,) the run of nodes that each belongs to: a new one after a branch, or a row's end."""
    children = np.bincount(packing.parents[packing.parents >= 0], minlength=len(packing.tokens))
    ends = {path[-1] for path in packing.paths}
    segments = np.arange(len(packing.tokens))
    for node, parent in enumerate(packing.parents):
        if parent >= 0 and children[parent] == 1 and parent not in ends:
            segments[node] = segments[parent]
    return segments


def _wrong_rows(rows, weights, reduction: str) -> Iterator[tuple[str, Pass]]:
    """Of rows that are equal, and of rows that begin others. (In any packing the same.)"""
    of_loss = reduced(weights, reduction)

    def of(numbers, weights):
        return _pass_of([rows[r] for r in numbers], [weights[r] for r in numbers])

    def without_others(name, numbers):
        yield name, of(numbers, of_loss)
        mean = dict(zip(numbers, reduced([weights[r] for r in numbers], reduction), strict=True))
        yield name, of(numbers, mean)

    for numbers in (range(len(rows)), range(len(rows) - 1, -1, -1)):
        kept = {tuple(rows[r]): r for r in numbers}
        yield from without_others("equal rows counted once", sorted(kept.values()))
    name = "row that ends within another"
    leaves = [r for r in range(len(rows)) if not _longer(rows, r)]
    yield from without_others(name, leaves)
    below = [sorted(set(_longer(rows, r)) & set(leaves)) for r in range(len(rows))]
    without_end = [
        np.append(w[:-1], 0) if over else w for w, over in zip(of_loss, below, strict=True)
    ]
    yield name, _pass_of(rows, without_end)
    for choose in (min, max):  # on to one of the leaves below, with the weight of its last token
        to = [rows[choose(over, default=r)] for r, over in enumerate(below)]
        on = [
            np.append(w, np.full(len(t) - len(w), w[-1])) for w, t in zip(of_loss, to, strict=True)
        ]
        yield name, _pass_of(to, on)


def _longer(rows, r: int) -> list[int]:
    """The rows that begin with row r, and go on."""
    n = len(rows[r])
    return [s for s, row in enumerate(rows) if len(row) > n and row[:n] == rows[r]]


def _pass_of(rows, weights) -> Pass:
    packing = share_prefixes(rows, range(len(rows)))
    return right_pass(packing, weighted(packing, weights))
