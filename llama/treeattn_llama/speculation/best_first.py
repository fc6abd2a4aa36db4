"""The most probable paths after a text, found best first."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from treeattn.trees.token_tree import TokenTree

Continue = Callable[[Any], Iterable[tuple[int, float, Any]]]
"""What may follow a state: (token, its probability, the state after it)."""


def best_first_tree(
    states: Sequence[Any], continuations: Continue, budget: int, depth: int
) -> tuple[TokenTree, Float[np.ndarray, "b l"]]:
    """(tree, scores): after each text the `budget` nodes whose paths, of up to `depth` tokens, are
    the most probable, and each node's log-probability after its parent.

    states: one a text, from which `continuations` goes on; None where nothing is known to follow
    """
    rows = [_nodes_best_first(state, continuations, budget, depth) for state in states]
    size = max((len(row) for row in rows), default=0)
    tokens = np.zeros((len(rows), size), np.int32)
    parents = np.full((len(rows), size), -1, np.int32)
    scores = np.zeros((len(rows), size))
    for b, row in enumerate(rows):
        for i, (token, parent, score) in enumerate(row):
            tokens[b, i] = token
            parents[b, i] = parent
            scores[b, i] = score
    sizes = np.array([len(row) for row in rows], np.int32)
    return TokenTree(tokens, parents, sizes), scores


def _nodes_best_first(state, continuations, budget, depth) -> list[tuple[int, int, float]]:
    """[(token, parent, score)] of one text: parents come before their children."""
    nodes = []
    heap = []
    count = 0

    def push(parent, path, steps, state):
        nonlocal count
        for token, probability, after in continuations(state):
            score = math.log(min(probability, 1.0))
            count += 1  # so that of equals the first found comes first, and no state is compared
            heapq.heappush(heap, (-path - score, count, token, parent, score, steps, after))

    if state is not None:
        push(-1, 0.0, 1, state)
    while heap and len(nodes) < budget:
        cost, _, token, parent, score, steps, after = heapq.heappop(heap)
        nodes.append((token, parent, score))
        if steps < depth:
            push(len(nodes) - 1, -cost, steps + 1, after)
    return nodes
