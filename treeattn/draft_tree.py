"""Trees of draft tokens that are not beams, for `treeattn.token_tree.pack_tree`.

- `choice_tree`: a fixed shape whose nodes are filled anew at every step with the top
  tokens of several prediction heads (Medusa, https://arxiv.org/abs/2401.10774);
- `expand_tree`: the shape that a draft's own probabilities suggest, the most probable
  paths under a budget of tokens (EAGLE-2, https://arxiv.org/abs/2406.16858).
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Integer

from treeattn.arrays import Array, check_integers, check_rank, namespace
from treeattn.token_tree import TokenTree


def choice_tree(
    choices: Sequence[Sequence[int]],
    candidates: Integer[Array, "batch heads top"],
    root: Integer[Array, " batch"] | None = None,
) -> TokenTree:
    """The tree of a fixed list of choices, filled with the heads' top tokens.

    choices:    each node as its path: (r₁, …, r_d) is the r_d-th best token of head d, below
                the node (r₁, …, r_{d−1}), which must be in the list too
    candidates: (B, heads, k) the tokens of each head, best first
    root:       (B,) a token above all of them, usually the one that the model itself has just
                produced; None for a forest

    The nodes come shortest path first, equally long ones in lexicographic order, whatever
    the order of the list. Only tokens may be traced, so the shape is compiled once.

    Raises ValueError when a choice is empty, repeated, lacks its parent, or asks for a head or
    a rank that candidates does not have.
    """
    check_integers(candidates=candidates)
    check_rank(3, "(batch, heads, k)", candidates=candidates)
    batch, heads, top = candidates.shape
    paths = sorted((tuple(int(r) for r in path) for path in choices), key=lambda p: (len(p), p))
    number = {path: i for i, path in enumerate(paths)}
    if len(number) < len(paths):
        raise ValueError("choices: expected each path once, got one twice")
    for path in paths:
        if not 1 <= len(path) <= heads or not all(0 <= r < top for r in path):
            raise ValueError(
                f"choices: expected paths of 1 to {heads} ranks below {top}, as candidates has "
                f"heads and tokens, got {path}"
            )
        if len(path) > 1 and path[:-1] not in number:
            raise ValueError(f"choices: {path} has no parent, since {path[:-1]} is missing")
    xp = namespace(candidates, *([] if root is None else [root]))
    head = np.array([len(path) - 1 for path in paths], int)
    rank = np.array([path[-1] for path in paths], int)
    tokens = xp.asarray(candidates)[:, head, rank]
    parents = np.array([number.get(path[:-1], -1) for path in paths], np.int32)
    if root is not None:
        check_integers(root=root)
        if root.shape != (batch,):
            raise ValueError(f"root: expected shape (batch,) = ({batch},), got {root.shape}")
        tokens = xp.concatenate([root[:, None].astype(tokens.dtype), tokens], axis=1)
        parents = np.concatenate([[-1], parents + 1]).astype(np.int32)
    sizes = np.full(batch, len(parents), np.int32)
    return TokenTree(tokens, np.tile(parents, (batch, 1)), sizes)


def expand_tree(
    log_probs: Callable[[np.ndarray], Array],
    *,
    depth: int,
    width: int,
    budget: int,
    batch: int = 1,
) -> tuple[TokenTree, Float[np.ndarray, "batch nodes"]]:
    """(tree, scores): the draft's most probable continuations, at most `budget` tokens.

    log_probs: called with (B, n, d) int32, n partial paths of d tokens; returns (B, n, V), the
               natural log-probabilities of the token after each. First with the empty path,
               (B, 1, 0), then with the paths to expand, up to d = depth − 1
    depth:     the longest path
    width:     of each depth's nodes, the `width` most probable are expanded, into the `width`
               most probable tokens each
    budget:    of all nodes, the `budget` most probable are kept

    A node's score is its path's log-probability, the sum along it. It cannot exceed its
    parent's, so the kept nodes form a tree, and numbering them from most to least probable
    puts parents first. Paths of probability 0 are left out. From width = budget on, these are
    the `budget` most probable of all paths up to `depth`.

    Raises ValueError when a number is below 1, or log_probs returns another shape, a NaN, or
    a logarithm above 0.
    """
    for name, value in {"depth": depth, "width": width, "budget": budget, "batch": batch}.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    paths, frontier, score = np.zeros((batch, 1, 0), np.int32), None, np.zeros((batch, 1))
    tokens, parents, scores, count = [], [], [], 0
    for _ in range(depth):
        total = score[..., None] + _checked_log_probs(log_probs(paths), paths)  # (B, n, V)
        best = np.argsort(-total, axis=-1, kind="stable")[..., :width]  # (B, n, k)
        children = best.reshape(batch, -1)
        score = np.take_along_axis(total, best, axis=-1).reshape(batch, -1)
        parent = np.repeat(np.arange(paths.shape[1]), best.shape[-1])[None]  # within the frontier
        tokens.append(children)
        scores.append(score)
        parents.append(np.full_like(children, -1) if frontier is None else frontier[:, parent[0]])
        keep = np.argsort(-score, axis=-1, kind="stable")[:, :width]
        frontier, count = count + keep, count + children.shape[1]
        score = np.take_along_axis(score, keep, axis=1)
        before = np.take_along_axis(paths, parent[0][keep][..., None], axis=1)
        after = np.take_along_axis(children, keep, axis=1)[..., None]
        paths = np.concatenate([before, after], axis=-1).astype(np.int32)

    tokens, parents, scores = (np.concatenate(x, axis=1) for x in (tokens, parents, scores))
    keep = np.argsort(-scores, axis=1, kind="stable")[:, :budget]
    number = np.zeros_like(parents)
    np.put_along_axis(number, keep, np.arange(keep.shape[1])[None], axis=1)
    tokens, parents, scores = (np.take_along_axis(x, keep, 1) for x in (tokens, parents, scores))
    real = scores > -np.inf
    up = np.take_along_axis(number, np.maximum(parents, 0), axis=1)
    parents = np.where((parents >= 0) & real, up, -1)
    sizes = real.sum(axis=1)
    return TokenTree(*(x.astype(np.int32) for x in (tokens, parents, sizes))), scores


def _checked_log_probs(found: Array, paths: np.ndarray) -> np.ndarray:
    found = np.asarray(found, np.float64)
    if found.ndim != 3 or found.shape[:2] != paths.shape[:2]:
        raise ValueError(
            f"log_probs: expected (batch, n, vocabulary) with batch and n = {paths.shape[:2]}, "
            f"got shape {found.shape}"
        )
    if not (found <= 1e-5).all():  # NaN too
        raise ValueError("log_probs: expected logarithms of probabilities, got NaN or one above 0")
    return np.minimum(found, 0)
