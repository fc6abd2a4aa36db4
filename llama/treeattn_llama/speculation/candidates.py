"""What a draft is, and what it proposes: candidates as a beam, or as a tree, with their scores.

A draft never decides what the text says; it decides how much of it one model call confirms.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from treeattn.idea.arrays import Array, check_floating, check_integers, check_rank, integer
from treeattn.trees.beam import PackedBeam, pack, unpack
from treeattn.trees.token_tree import TokenTree, beam_from_tree

Texts = Sequence[Sequence[int]]


class Seen(NamedTuple):
    """What the model has just said about the tokens of one call.

    tokens: (B, L) the tokens; real: (B, L) which of them are no padding
    likely: (B, L, k) the likeliest tokens after each, best first; k is what the draft asks for
    state:  (B, d) the last layer's output at the token that each text's last one was read off, if
            the draft asks for it
    """

    tokens: Int[np.ndarray, "b l"]
    real: Bool[np.ndarray, "b l"]
    likely: Int[np.ndarray, "b l k"]
    state: Float[np.ndarray, "b d"] | None = None


class Shape(NamedTuple):
    """One of the trees that a draft can propose, told before it is paid for.

    work:  the time it takes, in any unit: in proportion to the draft's other shapes
    nodes: of the tree
    gain:  the tokens of it that were accepted a step, where the draft was tried
    """

    work: float
    nodes: int
    gain: float


class Drawn(NamedTuple):
    """Candidates that were drawn at random, and from what: for acceptance by rejection.

    beam, scores:  (B, M, C) as everywhere; no more nodes than were asked for, since leaving some
                   out would change how the others are distributed
    distributions: (B, M, C, V) the probabilities that beam[b, m, c] was drawn from
    replacement:   whether the candidates are M independent draws; else a node's distinct children
                   were drawn one after the other, each from what the ones before have left
    tokens:        (n,) the tokens that the distributions, then (B, M, C, n), are of; None: all
    """

    beam: Integer[np.ndarray, "b m c"]
    scores: Float[np.ndarray, "b m c"]
    distributions: Float[np.ndarray, "b m c vocabulary"]
    replacement: bool = False
    tokens: Int[np.ndarray, " n"] | None = None


@runtime_checkable
class Draft(Protocol):
    """Anything that proposes and observes. It may also have these attributes:

    likely:     how many of the model's likeliest tokens after each token it wants to see
    states:     whether it wants the state that each text's last token was read off
    vocabulary: the number of tokens that it knows, which must be the model's
    shapes:     of the trees that it can propose, a `Shape` for each: the budget says which is worth
                its time, and calls propose(budget, shape) with its number

    and this method, which it must have if it proposes what is `Drawn`:

    begin(key): called before new texts, with a key that was made of `generate`'s own: all chance
                comes from it, so that over keys the text is distributed as the model's

    or this one:

    foresee(chance): called before what is new of texts is observed, with how it is drawn
                (`Chance`), or None where the likeliest tokens are taken. Who guesses with the same
                noise guesses better, and the text is the same whatever is guessed
    """

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        """The texts so far, every token of them certain; what the model said in its last call."""

    def propose(self, budget: int) -> Any:
        """Candidate tokens after each text that was observed last, of which the most probable
        `budget` nodes will be kept.

        (TokenTree, scores (B, L)), or (beam, scores), both (B, M, C), or `Drawn`, which must not
        have more of them. A score is the natural log-probability that the draft gives a token
        after those before it. In a beam, −∞ stands where a candidate has ended.
        """


def draft_candidate_tokens(
    draft: Draft,
    *,
    budget: int = 15,
    certain: Integer[Array, " b"] | None = None,
    vocabulary: int | None = None,
) -> tuple[Integer[Array, "b m c"], Float[Array, "b m c"]]:
    """(beam, scores), both (B, M, C): what the draft thinks may follow the texts it observed.

    budget:     the most probable `budget` tokens of all candidates' prefixes are kept, the
                certain token not counted
    certain:    (B,) each text's last token, where the model has not seen it yet: it becomes the
                first column (score 0), and every text has a candidate, if only this token
    vocabulary: the model's, to check the draft's tokens against

    Scores are log-probabilities of each token after those before it, −∞ beyond a candidate's end,
    which is how candidates of different lengths lie in one array: `candidate_lengths`.

    Raises TypeError for what is no proposal, and ValueError for tokens outside the vocabulary,
    scores whose shape does not fit or that are NaN or above 0, and a `Drawn` beyond the budget. The
    errors name the draft.
    """
    beam, scores, drawn = ask(draft, integer("budget", budget, 0), vocabulary)
    if drawn is None:
        scores = np.where(ranked(beam, scores)[0] < budget, scores, -np.inf)
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
    beam = np.asarray(beam)
    wrong = real & ((beam < 0) | (beam >= (np.inf if vocabulary is None else vocabulary)))
    if wrong.any():
        limit = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise ValueError(f"beam: expected tokens from 0{limit}, got {beam[wrong][0]}")
    return beam, scores


def ask(
    draft: Draft,
    budget: int,
    vocabulary: int | None = None,
    batch: int | None = None,
    **shape: int,
) -> tuple[np.ndarray, np.ndarray, Drawn | None]:
    """(beam, scores, the `Drawn` if it is one) of what the draft proposes for `batch` texts.

    shape: which of its `shapes`, if it has some

    Raises the errors of `draft_candidate_tokens`.
    """
    found = draft.propose(budget, **shape)
    name = type(draft).__name__
    try:
        beam, scores = _as_beam(found, vocabulary)
        if batch not in (None, len(beam)):
            raise ValueError(f"expected candidates for {batch} texts, got {len(beam)}")
        if not isinstance(found, Drawn):
            return beam, scores, None
        _check_drawn(found, beam, scores, budget, vocabulary)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"draft: {name} proposed: {error}") from error
    return beam, scores, found


def _as_beam(found, vocabulary: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(beam, scores), both (B, M, C), of what `Draft.propose` returned, checked."""
    pair = isinstance(found, tuple | list) and len(found) == 2
    if not pair and not isinstance(found, Drawn):
        raise TypeError(
            f"expected (TokenTree, scores), (beam, scores) or Drawn, got {type(found).__name__} "
            f"{found!s:.40}"
        )
    beam, scores = found[:2]
    if isinstance(beam, TokenTree):  # a candidate for each leaf
        tree = beam
        node_scores = checked_scores("scores", scores, beam.tokens.shape)
        number = np.broadcast_to(np.arange(tree.tokens.shape[-1]), tree.tokens.shape)
        nodes, lengths = beam_from_tree(tree._replace(tokens=number))
        real = np.arange(nodes.shape[2]) < lengths[..., None]
        beam = np.where(real, unpack(np.asarray(tree.tokens), nodes), 0)
        scores = np.where(real, unpack(node_scores, nodes), -np.inf)
        scores = np.where(np.cumsum(scores, axis=2) > -np.inf, scores, -np.inf)
    return checked_beam(beam, scores, vocabulary)


def _check_drawn(drawn: Drawn, beam, scores, budget: int, vocabulary: int | None) -> None:
    """Raise a ValueError unless the distributions fit the beam, and it fits the budget."""
    lengths = candidate_lengths(scores)
    nodes = pack(beam, lengths).packed_beam.shape[1]
    if nodes > budget:
        raise ValueError(
            f"expected at most {budget} nodes, got {nodes}, and what was drawn at random cannot "
            f"be cut: what is left would not be distributed as it says"
        )
    check_floating(distributions=drawn.distributions)
    shape = drawn.distributions.shape
    size = vocabulary or "vocabulary"
    if drawn.tokens is not None:
        check_integers(tokens=drawn.tokens)
        check_rank(1, "(n,)", tokens=drawn.tokens)
        size = len(drawn.tokens)
        known = np.arange(drawn.tokens.max(initial=0) + 1 if vocabulary is None else vocabulary)
        if len(np.unique(drawn.tokens)) < size or not np.isin(drawn.tokens, known).all():
            raise ValueError(f"tokens: expected {size} different ones of {len(known)}")
    expected = (*beam.shape, size)
    if shape[:3] != beam.shape or len(shape) != 4 or size not in ("vocabulary", shape[3]):
        raise ValueError(f"distributions: expected shape {expected}, got {shape}")
    real = np.asarray(drawn.distributions)[np.arange(beam.shape[2]) < lengths[..., None]]
    if not (np.isfinite(real).all() and (real >= 0).all() and (real.sum(axis=-1) > 0).all()):
        raise ValueError("distributions: expected probabilities, got none, negative ones or NaN")


def node_chances(
    beam: np.ndarray, scores: np.ndarray, groups: Sequence[slice] = (slice(None),)
) -> tuple[np.ndarray, np.ndarray]:
    """(node (B, M, C), chances (G, B, L)): which node of the packed tree each token is, and the
    probability that each group of candidates gives the path to it; 0 where none of them goes there.

    groups: rows of the beam. Of two candidates that give a path different probabilities, the larger
    """
    lengths = candidate_lengths(scores)
    real = np.arange(beam.shape[2]) < lengths[..., None]
    node = pack(beam, lengths).unpack_map
    size = int(node.max(initial=-1)) + 1
    text = np.broadcast_to(np.arange(len(beam))[:, None, None], node.shape)
    paths = np.cumsum(np.where(real, scores, 0), axis=2)
    found = np.full((len(groups), len(beam), size), -np.inf)
    for of_group, rows in zip(found, groups, strict=True):
        mine = real[:, rows]
        at = text[:, rows][mine], node[:, rows][mine]
        np.maximum.at(of_group, at, paths[:, rows][mine])
    return node, np.exp(found)


def ranks_of(
    node: Int[np.ndarray, "b m c"], chances: Float[np.ndarray, "b l"]
) -> Int[np.ndarray, "b m c"]:
    """Each token's node's place among all, the most probable first.

    A path is no more probable than its beginning, so no node comes before its parent.
    """
    order = np.argsort(-chances, axis=1, kind="stable")
    return unpack(np.argsort(order, axis=1), node)


def ranked(beam: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ranks (B, M, C), chances (B, L)) of the tree's nodes, by the probability of their paths; the
    rank is L beyond a candidate's end, and chances fall along a row."""
    node, (chances,) = node_chances(beam, scores)
    real = np.arange(beam.shape[2]) < candidate_lengths(scores)[..., None]
    ranks = ranks_of(node, chances)
    return np.where(real, ranks, chances.shape[1]), -np.sort(-chances, axis=1)


def side_by_side(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(beam, scores) with the candidates of all these pairs, for the same texts."""
    width = max(beam.shape[2] for beam, _ in found)

    def wider(x, fill):
        more = [(0, 0), (0, 0), (0, width - x.shape[2])]
        return np.pad(x, more, constant_values=fill)

    beams = [wider(np.asarray(beam, np.int32), 0) for beam, _ in found]
    scores = [wider(log, -np.inf) for _, log in found]
    return np.concatenate(beams, axis=1), np.concatenate(scores, axis=1)


def after_certain(beam, scores, certain) -> tuple[np.ndarray, np.ndarray]:
    """The candidates with a certain token (B,) before each, and at least one for every text."""
    batch, rows, width = beam.shape
    if certain.shape != (batch,):
        raise ValueError(f"certain: expected shape ({batch},), one a text, got {certain.shape}")
    full = np.zeros((batch, max(rows, 1), width + 1), np.int32)
    log = np.full(full.shape, -np.inf)
    full[..., 0] = np.asarray(certain)[:, None]
    full[:, :rows, 1:] = beam
    log[:, :rows, 1:] = scores
    log[..., 0] = np.where((log[..., 1:] > -np.inf).any(axis=2), 0.0, -np.inf)
    log[:, 0, 0] = 0.0
    return full, log


def pad_packed(packed: PackedBeam, size: int) -> PackedBeam:
    """The same nodes, and padding up to `size`: a few sizes, so that few programs are compiled."""
    tokens, mask, offsets, unpack_map = packed
    more = (0, size - tokens.shape[1])
    tokens, offsets = (np.pad(x, [(0, 0), more]).astype(np.int32) for x in (tokens, offsets))
    return PackedBeam(tokens, np.pad(mask, [(0, 0), more, more]), offsets, unpack_map)
