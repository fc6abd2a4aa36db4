"""What a draft is, and what it proposes: candidates as a beam, or as a tree, with their scores.

A draft never decides what the text says; it decides how much of it one model call confirms.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from treeattn.idea.arrays import Array, check_floating, check_integers
from treeattn.trees.beam import PackedBeam, packed_token_indices, unpack
from treeattn.trees.draft import most_probable
from treeattn.trees.token_tree import TokenTree, beam_from_tree, pack_tree, tree_from_beam

Texts = Sequence[Sequence[int]]


class Seen(NamedTuple):
    """What the model has just said about the tokens of one call.

    tokens: (B, L) the tokens; real: (B, L) which of them are no padding
    likely: (B, L, k) the likeliest tokens after each, best first; k is what the draft asks for
    """

    tokens: Int[np.ndarray, "b l"]
    real: Bool[np.ndarray, "b l"]
    likely: Int[np.ndarray, "b l k"]


class Drawn(NamedTuple):
    """Candidates that were drawn at random, and from what: for acceptance by rejection.

    beam, scores:  (B, M, C) as everywhere
    distributions: (B, M, C, V) the probabilities that beam[b, m, c] was drawn from
    replacement:   whether the candidates are M independent draws; else a node's distinct children
                   were drawn one after the other, each from what the ones before have left
    """

    beam: Integer[np.ndarray, "b m c"]
    scores: Float[np.ndarray, "b m c"]
    distributions: Float[np.ndarray, "b m c vocabulary"]
    replacement: bool = False


@runtime_checkable
class Draft(Protocol):
    """Anything that proposes and observes. It may also have these attributes:

    likely:     how many of the model's likeliest tokens after each token it wants to see
    vocabulary: the number of tokens that it knows, which must be the model's
    """

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        """The texts so far, every token of them certain; what the model said in its last call."""

    def propose(self, budget: int) -> Any:
        """At most `budget` candidate tokens after each text that was observed last.

        (TokenTree, scores (B, L)), or (beam, scores), both (B, M, C), or `Drawn`. A score is the
        natural log-probability that the draft gives a token after those before it. In a beam,
        −∞ stands where a candidate has ended.
        """


def draft_candidate_tokens(
    draft: Draft,
    *,
    budget: int = 15,
    certain: Integer[Array, " b"] | None = None,
    vocabulary: int | None = None,
) -> tuple[Integer[Array, "b m c"], Float[Array, "b m c"]]:
    """(beam, scores), both (B, M, C): what the draft thinks may follow the texts it observed.

    budget:     the most probable `budget` tokens of all candidates' prefixes are kept
    certain:    (B,) each text's last token, where the model has not seen it yet: it becomes the
                first column (score 0), and every text has a candidate, if only this token
    vocabulary: the model's, to check the draft's tokens against

    Scores are log-probabilities of each token after those before it, −∞ beyond a candidate's end,
    which is how candidates of different lengths lie in one array: `candidate_lengths`.

    Raises ValueError for tokens outside the vocabulary, scores whose shape does not fit, and
    scores that are NaN or above 0.
    """
    found = draft.propose(budget)
    if isinstance(found, Drawn):  # leaving out any of these would change how they are distributed
        beam, scores = checked_beam(found.beam, found.scores, vocabulary)
    else:
        beam, scores = beam_of(*best_nodes(found, budget, vocabulary))
    return (beam, scores) if certain is None else after_certain(beam, scores, certain)


def candidate_lengths(scores: Float[Array, "b m c"]) -> Int[np.ndarray, "b m"]:
    """(B, M) the tokens of each candidate: those before the first score of −∞."""
    real = np.asarray(scores) > -np.inf
    return np.cumprod(real, axis=2, dtype=np.int32).sum(axis=2, dtype=np.int32)


def checked_scores(name: str, scores, shape: tuple[int, ...]) -> np.ndarray:
    """The scores as float64, or the error that says what is wrong with them."""
    check_floating(**{name: scores})
    if scores.shape != shape:
        raise ValueError(f"{name}: expected a score for each token, {shape}, got {scores.shape}")
    scores = np.asarray(scores, np.float64)
    if not (scores <= 1e-5).all():  # NaN too
        raise ValueError(f"{name}: expected logarithms of probabilities, got NaN or one above 0")
    return np.minimum(scores, 0)


def checked_tokens(name: str, tokens, real, vocabulary: int | None) -> np.ndarray:
    """The tokens as NumPy's, or the error that says what is wrong with them."""
    check_integers(**{name: tokens})
    tokens = np.asarray(tokens)
    wrong = real & ((tokens < 0) | (tokens >= (np.inf if vocabulary is None else vocabulary)))
    if wrong.any():
        limit = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise ValueError(f"{name}: expected tokens from 0{limit}, got {tokens[wrong][0]}")
    return tokens


def checked_beam(beam, scores, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A beam's tokens and scores, or the error that says what is wrong with them."""
    check_integers(beam=beam)
    if beam.ndim != 3:
        raise ValueError(f"beam: expected axes (batch, M, C), got shape {beam.shape}")
    scores = checked_scores("scores", scores, beam.shape)
    lengths = candidate_lengths(scores)
    real = np.arange(beam.shape[2]) < lengths[..., None]
    if (scores > -np.inf)[~real].any():
        raise ValueError("scores: −∞ ends a candidate, but a finite score follows it")
    return checked_tokens("beam", beam, real, vocabulary), scores


def best_nodes(found, budget: int, vocabulary: int | None) -> tuple[TokenTree, np.ndarray]:
    """(tree, scores (B, L)) of a proposal: its `budget` most probable nodes, best first.

    A path's probability is the product along it, so no node comes before its parent.
    """
    tree, scores = found
    if not isinstance(tree, TokenTree):
        beam, scores = checked_beam(tree, scores, vocabulary)
        lengths = candidate_lengths(scores)
        tree, place = tree_from_beam(beam, lengths), packed_token_indices(beam, lengths)
        scores = np.take_along_axis(scores.reshape(len(beam), -1), place, axis=1)
    real = np.arange(tree.tokens.shape[1]) < np.asarray(tree.sizes)[:, None]
    tokens = checked_tokens("tree", tree.tokens, real, vocabulary)
    scores = np.where(real, checked_scores("scores", scores, tokens.shape), -np.inf)
    parents = np.where(real, tree.parents, -1)
    path = path_scores(parents, scores)
    best, order = most_probable(tokens, parents, path, max(budget, 0))
    return best, np.take_along_axis(scores, order, axis=1)


def path_scores(parents: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(B, L) the log-probability of the path to each node."""
    path = scores.copy()
    for i in range(path.shape[1]):
        up = parents[:, i]
        path[:, i] += np.where(up >= 0, path[np.arange(len(path)), up], 0)
    return path


def beam_of(tree: TokenTree, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(beam, scores), both (B, M, C), of a tree with scores: a candidate for each leaf."""
    beam, lengths = beam_from_tree(tree)
    scores = unpack(scores, pack_tree(tree).unpack_map)
    return beam, np.where(np.arange(beam.shape[2]) < lengths[..., None], scores, -np.inf)


def after_certain(beam, scores, certain) -> tuple[np.ndarray, np.ndarray]:
    """The candidates with a certain token (B,) before each, and at least one for every text."""
    batch, rows, width = beam.shape
    if certain.shape != (batch,):
        raise ValueError(f"certain: expected shape ({batch},), one a text, got {certain.shape}")
    full = np.zeros((batch, max(rows, 1), width + 1), np.int32)
    log = np.full(full.shape, -np.inf)
    full[..., 0] = np.asarray(certain)[:, None]
    full[:, :rows, 1:], log[:, :rows, 1:] = beam, scores
    log[..., 0] = np.where((log[..., 1:] > -np.inf).any(axis=2), 0.0, -np.inf)
    log[:, 0, 0] = 0.0
    return full, log


Continue = Callable[[Any], Iterable[tuple[int, float, Any]]]
"""What may follow a state: (token, its probability, the state after it)."""


def grow(states: Sequence[Any], continuations: Continue, budget: int, depth: int):
    """(TokenTree, scores): from each text's state, the `budget` most probable paths' nodes."""
    rows = [_grow_one(state, continuations, budget, depth) for state in states]
    size = max((len(row) for row in rows), default=0)
    tokens = np.zeros((len(rows), size), np.int32)
    parents, scores = np.full(tokens.shape, -1, np.int32), np.full(tokens.shape, -np.inf)
    for b, row in enumerate(rows):
        for i, (token, parent, score) in enumerate(row):
            tokens[b, i], parents[b, i], scores[b, i] = token, parent, score
    return TokenTree(tokens, parents, np.array([len(row) for row in rows], np.int32)), scores


def _grow_one(state, continuations, budget, depth):
    nodes, heap, count = [], [], 0

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


def padded(packed: PackedBeam, size: int) -> PackedBeam:
    """The same nodes, and padding up to `size`: a few sizes, so that few programs are compiled."""
    tokens, mask, offsets, unpack_map = packed
    more = (0, size - tokens.shape[1])
    tokens, offsets = (np.pad(x, [(0, 0), more]).astype(np.int32) for x in (tokens, offsets))
    return PackedBeam(tokens, np.pad(mask, [(0, 0), more, more]), offsets, unpack_map)
