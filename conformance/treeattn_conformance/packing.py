"""Rows packed into one pass of the tiny model: a token tree, and a path for each row."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .tiny_model import Pass

REDUCTIONS = ("sum", "tokens", "rows")


class Packing(NamedTuple):
    """tokens (n,) and parents (n,) of the nodes, −1 at a root; of each row its nodes in order."""

    tokens: np.ndarray
    parents: np.ndarray
    paths: list[list[int]]


class Weighted(NamedTuple):
    """What the loss asks for: of a row's token the node it is, and its weight. (m,) each."""

    nodes: np.ndarray
    weights: np.ndarray


def share_prefixes(rows: Sequence[Sequence[int]], order: Sequence[int], last: int = 0) -> Packing:
    """Every distinct prefix once: nodes are made row by row, in this order of the rows.

    last: prefixes of one length are the same if so many of their last tokens are, which is a
          mistake; 0: all tokens
    """
    made: dict[tuple, int] = {}
    tokens = []
    parents = []
    paths = [[] for _ in rows]
    for r in order:
        for depth, token in enumerate(rows[r]):
            key = (depth, *rows[r][: depth + 1][-last:])
            if key not in made:
                made[key] = len(tokens)
                tokens.append(token)
                parents.append(paths[r][-1] if depth else -1)
            paths[r].append(made[key])
    return Packing(np.array(tokens), np.array(parents), paths)


def share_one_prompt(rows: Sequence[Sequence[int]]) -> Packing:
    """What all rows begin with once, and then each row's own rest."""
    common = 0
    while all(len(row) > common + 1 and row[common] == rows[0][common] for row in rows):
        common += 1
    prompt = list(range(common))
    tokens = list(rows[0][:common])
    parents = list(range(-1, common - 1))
    paths = []
    for row in rows:
        path = list(prompt)
        for token in row[common:]:
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(token)
        paths.append(path)
    return Packing(np.array(tokens), np.array(parents), paths)


def packings(rows: Sequence[Sequence[int]]) -> Iterator[Packing]:
    """The usual ones: rows sorted, those that begin alike together, as they came, one prompt."""
    numbers = range(len(rows))
    yield share_prefixes(rows, sorted(numbers, key=lambda r: rows[r]))
    first = {}
    for row in rows:  # where each prefix was met first: depth first in the order of the rows
        for length in range(1, len(row) + 1):
            first.setdefault(tuple(row[:length]), len(first))
    by_first = [[first[tuple(row[:i])] for i in range(1, len(row) + 1)] for row in rows]
    yield share_prefixes(rows, sorted(numbers, key=lambda r: by_first[r]))
    yield share_prefixes(rows, numbers)
    yield share_one_prompt(rows)


def ancestors(parents: np.ndarray) -> np.ndarray:
    """(n, n) bool: whether node j is i or above it."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def weighted(packing: Packing, weights: Sequence[np.ndarray]) -> Weighted:
    """Of all rows' tokens but their first."""
    nodes = [path[1:] for path in packing.paths]
    return Weighted(np.concatenate(nodes).astype(int), np.concatenate([w[1:] for w in weights]))


def right_pass(packing: Packing, asked: Weighted) -> Pass:
    """What separate rows give: ancestors are seen, positions are depths, parents predict."""
    seen = ancestors(packing.parents)
    nothing = np.zeros_like(seen)
    return Pass(
        packing.tokens,
        seen.sum(axis=1) - 1,
        seen,
        packing.parents[asked.nodes],
        packing.tokens[asked.nodes],
        asked.weights,
        nothing,
        nothing[0],
        nothing,
    )


def reduced(weights: Sequence[np.ndarray], reduction: str) -> list[np.ndarray]:
    """Each token's weight in the loss, after the mean that is asked for.

    "sum": as they are; "tokens": divided by how many of all tokens count; "rows": by how many of
    the row's do, and by the number of rows. What counts is a weight other than 0; a row's first
    token has no log-probability, and never does.
    """
    weights = [np.append(0, np.asarray(w, np.float64)[1:]) for w in weights]
    counts = [np.count_nonzero(w) for w in weights]
    if reduction == "tokens":
        return [w / max(sum(counts), 1) for w in weights]
    if reduction == "rows":
        return [w / max(n, 1) / len(weights) for w, n in zip(weights, counts, strict=True)]
    return weights
