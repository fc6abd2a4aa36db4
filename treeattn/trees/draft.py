"""Where candidates come from: beam search, and two trees that are no beams.

- `beam_search`: candidates of one length, for `treeattn.trees.beam.pack`;
- `choice_tree`: a fixed shape whose nodes are filled anew at every step with the top
  tokens of several prediction heads (Medusa, https://arxiv.org/abs/2401.10774);
- `expand_tree`: the shape that a draft's own probabilities suggest, the most probable
  paths under a budget of tokens (EAGLE-2, https://arxiv.org/abs/2406.16858).

The trees are for `treeattn.trees.token_tree.pack_tree`.
"""

import operator
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int, Integer

from treeattn.idea.arrays import Array, as_array, check_integers, check_rank, integer, namespace
from treeattn.trees.token_tree import TokenTree


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
                produced; None for a forest. The tokens' dtype is the wider of the two

    The nodes come shortest path first, equally long ones in lexicographic order, whatever
    the order of the list. Only tokens may be traced, so the shape is compiled once.

    Raises TypeError where integers are missing, ValueError when a choice is empty, repeated,
    lacks its parent, or asks for a head or a rank that candidates does not have.
    """
    candidates = as_array("candidates", candidates)
    check_integers(candidates=candidates)
    check_rank(3, "(batch, heads, k)", candidates=candidates)
    batch, heads, top = candidates.shape
    paths = _checked_choices(choices, heads, top)
    number = {path: i for i, path in enumerate(paths)}
    head = np.array([len(path) - 1 for path in paths], int)
    rank = np.array([path[-1] for path in paths], int)
    tokens = candidates[:, head, rank]
    parents = np.array([number.get(path[:-1], -1) for path in paths], np.int32)
    if root is not None:
        root = as_array("root", root)
        check_integers(root=root)
        if root.shape != (batch,):
            raise ValueError(f"root: expected shape (batch,) = ({batch},), got {root.shape}")
        tokens = namespace(root, tokens).concatenate([root[:, None], tokens], axis=1)
        parents = np.concatenate([[-1], parents + 1]).astype(np.int32)
    sizes = np.full(batch, len(parents), np.int32)
    return TokenTree(tokens, np.tile(parents, (batch, 1)), sizes)


def _checked_choices(
    choices: Sequence[Sequence[int]], heads: int, top: int
) -> list[tuple[int, ...]]:
    """The choices, shortest first and then in order, or the error that says what is wrong."""
    try:
        paths = [tuple(map(operator.index, path)) for path in choices]
    except TypeError as error:
        raise TypeError(f"choices: expected paths of integers, as (0, 1): {error}") from None
    paths.sort(key=lambda path: (len(path), path))
    known = set(paths)
    if len(known) < len(paths):
        raise ValueError("choices: expected each path once, got one twice")
    for path in paths:
        if not 1 <= len(path) <= heads or not all(0 <= r < top for r in path):
            raise ValueError(
                f"choices: expected paths of 1 to {heads} ranks below {top}, as candidates has "
                f"heads and tokens, got {path}"
            )
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"choices: {path} has no parent, since {path[:-1]} is missing")
    return paths


LogProbs = Callable[[np.ndarray], Array]
"""A draft: called with (B, n, d) int32, n partial paths of d tokens, it returns (B, n, V), the
natural log-probabilities of the token after each. First with the empty path, (B, 1, 0)."""


def beam_search(
    log_probs: LogProbs, *, width: int, length: int, batch: int = 1
) -> tuple[Int[np.ndarray, "batch rows width"], Float[np.ndarray, "batch rows"]]:
    """(beam, scores): `width` candidates of `length` tokens, most probable first.

    At each step the `width` most probable continuations of the candidates so far are kept;
    scores are natural log-probabilities. There are fewer candidates while a vocabulary of V
    tokens has fewer, V, V², …; an impossible one has score −∞.

    Raises as `expand_tree` does.
    """
    width = integer("width", width, 1)
    length = integer("length", length, 1)
    batch = integer("batch", batch, 1)
    _, paths, scores = search(_likeliest_of(log_probs, width), length, width, batch)
    return paths, scores


def expand_tree(
    log_probs: LogProbs, *, depth: int, width: int, budget: int, batch: int = 1
) -> tuple[TokenTree, Float[np.ndarray, "batch nodes"]]:
    """(tree, scores): the draft's most probable continuations, at most `budget` tokens.

    depth:  the longest path
    width:  of each depth's nodes, the `width` most probable are expanded, into the `width` most
            probable tokens each
    budget: of all nodes, the `budget` most probable are kept

    A node's score is its path's log-probability, the sum along it. It cannot exceed its
    parent's, so the kept nodes form a tree, and numbering them from most to least probable
    puts parents first. Paths of probability 0 are left out. From width = budget on, these are
    the `budget` most probable of all paths up to `depth`.

    Raises TypeError when a number is no integer, ValueError when it is below 1, or log_probs
    returns another shape, a NaN, or a logarithm above 0.
    """
    depth = integer("depth", depth, 1)
    width = integer("width", width, 1)
    budget = integer("budget", budget, 1)
    batch = integer("batch", batch, 1)
    looked_at, _, _ = search(_likeliest_of(log_probs, width), depth, width, batch)
    tokens, parents, _, scores = looked_at
    tree, order = most_probable(tokens, parents, scores, budget)
    return tree, np.take_along_axis(scores, order, axis=1)


def most_probable(tokens, parents, scores, budget: int) -> tuple[TokenTree, np.ndarray]:
    """(tree, order): the `budget` most probable nodes, and which (B, L') they were, best first.

    tokens, parents, scores: (B, L); scores are those of the paths to the nodes, −∞ at what is left
    out. With scores [−1, −3, −2], parents [−1, 0, 0] and a budget of 2, the order is [0, 2], and
    the tree's parents are [−1, 0].
    """
    order = np.argsort(-scores, axis=1, kind="stable")[:, :budget]
    number = np.zeros_like(parents)  # a kept node's number in the new tree
    new = np.arange(order.shape[1], dtype=number.dtype)
    np.put_along_axis(number, order, new[None], axis=1)

    tokens = np.take_along_axis(tokens, order, axis=1)
    parents = np.take_along_axis(parents, order, axis=1)
    real = np.take_along_axis(scores, order, axis=1) > -np.inf
    up = np.take_along_axis(number, np.maximum(parents, 0), axis=1)
    parents = np.where((parents >= 0) & real, up, -1)
    sizes = real.sum(axis=1)
    tree = TokenTree(*(x.astype(np.int32) for x in (tokens, parents, sizes)))
    return tree, order


def search(likeliest: Callable, length: int, width: int, batch: int):
    """(looked_at, paths, path_scores) of a beam search.

    likeliest: called with (B, n, d) paths, as `LogProbs` is, it returns each path's k likeliest
               next tokens (B, n, k), and their log-probabilities (B, n, k)

    looked_at, the tree of all that was looked at, is (tokens, parents, log, scores), (B, L) each: a
    node's own log-probability, and its path's. The paths (B, n, length) are the `width` best,
    path_scores (B, n) theirs.

    With width 2 and k = 2: the first step looks at 2 tokens and keeps both, each later one looks at
    4 and keeps 2, so that after three steps L = 2 + 4 + 4.
    """
    nodes = []  # of each step, (B, n·k): tokens, parents, log, scores
    frontier = np.full((batch, 1), -1)  # the nodes that the paths end in
    count = 0  # nodes so far
    paths = np.zeros((batch, 1, 0), np.int32)
    path_scores = np.zeros((batch, 1))
    for _ in range(length):
        tokens, log = likeliest(paths)
        parents = np.repeat(frontier, tokens.shape[2], axis=1)
        scores = path_scores[..., None] + log
        step = [x.reshape(batch, -1) for x in (tokens, parents, log, scores)]
        nodes.append(step)
        tokens, _, _, scores = step

        kept = np.argsort(-scores, axis=1, kind="stable")[:, :width]  # (B, n') of the n·k
        before = np.take_along_axis(paths, kept[..., None] // log.shape[2], axis=1)
        last = np.take_along_axis(tokens, kept, axis=1)[..., None]
        paths = np.concatenate([before, last], axis=-1).astype(np.int32)
        path_scores = np.take_along_axis(scores, kept, axis=1)
        frontier = count + kept
        count += scores.shape[1]
    looked_at = [np.concatenate(x, axis=1) for x in zip(*nodes, strict=True)]
    return looked_at, paths, path_scores


def _likeliest_of(log_probs: LogProbs, width: int) -> Callable:
    """What `search` calls, of a draft that gives the log-probabilities of all tokens."""

    if not callable(log_probs):
        raise TypeError(f"log_probs: expected a function of partial paths, got {log_probs!r:.40}")

    def likeliest(paths):
        log = _checked_log_probs(log_probs(paths), paths)
        best = np.argsort(-log, axis=-1, kind="stable")[..., :width]
        return best, np.take_along_axis(log, best, axis=-1)

    return likeliest


def _checked_log_probs(found: Array, paths: np.ndarray) -> np.ndarray:
    """What a draft gave for paths (B, n, d), in float64: (B, n, V), nothing above 0."""
    found = np.asarray(found, np.float64)
    if found.ndim != 3 or found.shape[:2] != paths.shape[:2]:
        raise ValueError(
            f"log_probs: expected (batch, n, vocabulary) with batch and n = {paths.shape[:2]}, "
            f"got shape {found.shape}"
        )
    if not (found <= 1e-5).all():  # NaN too
        raise ValueError("log_probs: expected logarithms of probabilities, got NaN or one above 0")
    return np.minimum(found, 0)
