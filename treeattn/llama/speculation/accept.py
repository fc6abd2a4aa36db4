"""Which of the candidate tokens the model accepts: the text is the one it would write alone.

At each token, starting from the one that is certain, a judge says what comes next: the model's
likeliest token, a token drawn from the model, or one that rejection sampling arrives at. Where a
candidate goes on with it, so does the walk, and the model's call has already computed what follows.
Where none does, that token is the last to be had from this call.
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float, Int, Integer, Key

from treeattn.idea.arrays import Array, check_integers, integer
from treeattn.llama.speculation.candidates import (
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
        self.candidates, self.counts = candidates, counts

    def nodes(
        self, unpack_map: Int[Array, "b m c"], width: int | None = None
    ) -> Int[np.ndarray, "b width"]:
        """The packed nodes of what was accepted, in order, 0 after the first `counts` of a row.

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
    lengths, verified = candidate_lengths(scores), np.asarray(verified_beam)
    if next_token is not None:  # a column of its own, which is certain
        check_integers(next_token=next_token)
        if next_token.shape != beam.shape[:1]:
            raise ValueError(f"next_token: expected shape {beam.shape[:1]}, got {next_token.shape}")
        rows = max(beam.shape[1], 1)
        first = np.broadcast_to(np.asarray(next_token)[:, None, None], (len(beam), rows, 1))
        grown = [(0, 0), (0, rows - beam.shape[1]), (1, 0)]
        beam, verified = np.pad(beam, grown), np.pad(verified, grown)
        verified[..., :1], lengths = first, np.pad(lengths, grown[:2]) + 1
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
    are the judge's, one more than the candidates' that were accepted. (0, 0, []) if all are empty.
    """
    alive, c, tokens = np.flatnonzero(lengths > 0), 0, []
    if not len(alive):
        return 0, 0, []
    while True:
        further = alive[lengths[alive] > c + 1]
        tokens.append(int(judge(int(alive[0]), c, further)))
        follow = further[beam[further, c + 1] == tokens[-1]] if len(further) else further
        if not len(follow):
            return int(alive[0]), c + 1, tokens
        alive, c = follow, c + 1


def generator(key: Key[Array, ""]) -> np.random.Generator:
    """NumPy's generator with a JAX key as its seed."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())


class KeyDice:
    """Where chance comes from: as many throws from a key as anybody asks for."""

    def __init__(self, key: Key[Array, ""]):
        self._random = generator(key)

    def happens(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

    def pick(self, probabilities: Float[np.ndarray, " vocabulary"]) -> int:
        up_to = np.cumsum(probabilities)
        # Less than the sum even where that rounds: never a token of probability 0.
        found = np.searchsorted(up_to, self._random.random() * up_to[-1], side="right")
        return int(min(found, np.flatnonzero(probabilities)[-1]))


def rejection_judge(beam, distributions, model, dice, replacement: bool) -> Judge:
    """The judge that accepts drawn candidates with the right chances.

    distributions: (M, C, V) what each token was drawn from
    model:         (m, c) -> (V,) the model's probabilities after candidate m's token c
    dice:          has happens(probability) -> bool and pick(probabilities) -> index
    """

    def judge(m, c, further):
        p = np.asarray(model(m, c), np.float64)
        if not len(further):
            return dice.pick(p / p.sum())
        draws = beam[further, c + 1]
        q = np.asarray(distributions[further[0], c + 1], np.float64)
        draws = draws if replacement else draws[np.sort(np.unique(draws, return_index=True)[1])]
        chances, rest = rejection(p, q, draws, replacement)
        for token, chance in zip(draws, chances, strict=True):
            if dice.happens(chance):
                return int(token)
        return dice.pick(rest)

    return judge


def rejection(
    p: Float[np.ndarray, " vocabulary"],
    q: Float[np.ndarray, " vocabulary"],
    draws: Integer[np.ndarray, " k"],
    replacement: bool = False,
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " vocabulary"]]:
    """(chances, rest): recursive rejection sampling at one node (https://arxiv.org/abs/2402.14160).

    p, q:  (V,) the model's probabilities, and those that the first of `draws` was drawn from.
           Without replacement, the others were drawn from q without the ones before, normalized
    Draw j, if none before was, is accepted with chances[j]; if none is, the token comes from rest.
    That token, over all draws and throws, is distributed as p.

    Where draw x is rejected, what p still lacks is max(p − q, 0). A token of probability 0 cannot
    have been drawn from q: it is never accepted, and nothing follows from that.
    """
    p, q, chances = p / p.sum(), q / q.sum(), np.zeros(len(draws))
    for j, x in enumerate(draws):
        if not q[x] > 0:
            continue
        chances[j] = min(1.0, p[x] / q[x])
        rest = np.maximum(p - q, 0)
        if rest.sum() > 0:  # else p is q, and the draw is accepted
            p = rest / rest.sum()
        if not replacement:
            q = np.where(np.arange(len(q)) == x, 0, q)
            q = q / q.sum() if q.sum() > 0 else q
    return chances, p
