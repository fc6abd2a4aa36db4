"""Which of the candidate tokens the model accepts: the text is the one it would write alone.

At each token, starting from the one that is certain, a judge says what comes next: the model's
likeliest token, a token drawn from the model, or one that rejection sampling arrives at. Where a
candidate goes on with it, so does the walk, and the model's call has already computed what follows.
Where none does, that token is the last to be had from this call.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, Integer

from treeattn.idea.arrays import Array, check_integers, integer
from treeattn_llama.speculation.candidates import (
    candidate_lengths,
    checked_beam,
    checked_scores,
)

Judge = Callable[[int, int, np.ndarray], int]
"""(m, c, further) -> the token after candidate m's tokens up to and including c. `further`: the
candidates that begin like this and go on."""


class Accepted(list):
    """The tokens that each text goes on with, a list for each; and which candidate has them.

    candidates: (B,) the one whose beginning was accepted, as a row of the beam
    counts:     (B,) how many of its tokens were, a certain first one included: those whose keys
                belong in the cache, 0 where a text has no candidates

        new = accept_candidate_tokens(beam, scores, verified_beam, verified_scores)
        cache = model.commit(cache, keys, select=new.nodes(unpack_map), counts=new.counts)
    """

    def __init__(self, tokens: list[list[int]], candidates: np.ndarray, counts: np.ndarray):
        super().__init__(tokens)
        self.candidates = candidates
        self.counts = counts

    def nodes(
        self, unpack_map: Int[Array, "b m c"], width: int | None = None
    ) -> Int[np.ndarray, "b width"]:
        """The packed nodes of what was accepted, in order, 0 after the first `counts` of a row:
        [[0, 1, 4, 0]] where counts is [3].

        unpack_map: as from `pack`; width: of the result, the beam's when None
        """
        batch = len(unpack_map)
        if batch != len(self):
            raise ValueError(f"unpack_map: expected {len(self)} texts, got {batch}")
        width = unpack_map.shape[2] if width is None else width
        width = integer("width", width, int(self.counts.max(initial=0)))
        found = np.zeros((batch, width), np.int32)
        for b, count in enumerate(self.counts.tolist()):
            if count:
                found[b, :count] = unpack_map[b, self.candidates[b], :count]
        return found


def accept_candidate_tokens(
    beam: Integer[Array, "b m c"],
    scores: Float[Array, "b m c"],
    verified_beam: Integer[Array, "b m c"],
    verified_scores: Float[Array, "b m c"],
    *,
    next_token: Integer[Array, " b"] | None = None,
) -> Accepted:
    """The tokens that each text goes on with: those accepted, and the model's own after them.

    beam, scores:    (B, M, C) as from `draft_candidate_tokens`; −∞ beyond a candidate's end
    verified_beam:   (B, M, C) the token that the model itself puts *after* beam[b, m, : c + 1],
                     likeliest or drawn: one for each prefix, whichever candidate it is read from
    verified_scores: (B, M, C) its log-probability
    next_token:      None: the first column is the token that is already certain. Else (B,) what the
                     model itself puts after the context, and the first column is a candidate like
                     the others

    The result is the longest path along which candidates are the model's own tokens: one token at
    least for each text, at most C + 1. A token that was certain before is not repeated in it; a
    text without candidates gets [next_token], or [] where nothing was certain either. It is a list
    of lists, which also says what to commit (`Accepted`): candidates of different lengths may hold
    the same tokens, so the tokens alone do not say which of them it was.

    Scores decide nothing here, since a text must not depend on who drafted it. They say where
    candidates end, and a NaN among them that something else went wrong.

    Raises ValueError when shapes do not fit, a score is NaN or above 0, a finite one follows −∞, or
    a verified one is not finite.
    """
    beam, scores = checked_beam(beam, scores)
    check_integers(verified_beam=verified_beam)
    if verified_beam.shape != beam.shape:
        raise ValueError(
            f"verified_beam: expected beam's shape {beam.shape}, got {verified_beam.shape}"
        )
    verified_scores = checked_scores("verified_scores", verified_scores, beam.shape)
    if not np.isfinite(verified_scores[scores > -np.inf]).all():
        raise ValueError("verified_scores: expected finite ones, got −∞ at a candidate's token")
    lengths = candidate_lengths(scores)
    verified = np.asarray(verified_beam)
    if next_token is not None:  # a column of its own, which is certain
        check_integers(next_token=next_token)
        if next_token.shape != beam.shape[:1]:
            raise ValueError(f"next_token: expected shape {beam.shape[:1]}, got {next_token.shape}")
        rows = max(beam.shape[1], 1)
        first = np.broadcast_to(np.asarray(next_token)[:, None, None], (len(beam), rows, 1))
        wider = [(0, 0), (0, rows - beam.shape[1]), (1, 0)]
        beam = np.pad(beam, wider)
        verified = np.pad(verified, wider)
        verified[..., :1] = first
        lengths = np.pad(lengths, wider[:2]) + 1
    walks = []
    for b in range(len(beam)):
        judge = lambda m, c, _, b=b: verified[b, m, c]  # noqa: E731
        walks.append(descend(beam[b], lengths[b], judge))
    candidates, counts, tokens = zip(*walks, strict=True) if walks else ((), (), ())
    counts = np.array(counts, np.int32)
    if next_token is not None:
        counts = np.maximum(counts - 1, 0)
    return Accepted(list(tokens), np.array(candidates, np.int32), counts)


def descend(
    beam: Integer[np.ndarray, "m c"], lengths: Int[np.ndarray, " m"], judge: Judge
) -> tuple[int, int, list[int]]:
    """(m, count, tokens) for one text: follow the judge's tokens from the first column on.

    The first `count` tokens of candidate m are accepted, its certain first one included; `tokens`
    are the judge's, as many: one for each accepted token, which says what comes after it. For
    candidates [7, 3, 5] and [7, 3, 6], and a judge who says 3, 6 and 9, that is (1, 3, [3, 6, 9]).
    (0, 0, []) where all candidates are empty.
    """
    alive = np.flatnonzero(lengths > 0)
    c = 0
    tokens = []
    if not len(alive):
        return 0, 0, []
    while True:
        further = alive[lengths[alive] > c + 1]
        tokens.append(int(judge(int(alive[0]), c, further)))
        follow = further[beam[further, c + 1] == tokens[-1]] if len(further) else further
        if not len(follow):
            return int(alive[0]), c + 1, tokens
        alive = follow
        c += 1
