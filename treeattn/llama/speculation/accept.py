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

from treeattn.idea.arrays import Array, check_integers
from treeattn.llama.speculation.candidates import candidate_lengths, checked_beam, checked_scores

Judge = Callable[[int, int, np.ndarray], int]
"""(m, c, further) -> the token after candidate m's tokens up to and including c. `further`: the
candidates that begin like this and go on."""


def accept_candidate_tokens(
    beam: Integer[Array, "b m c"],
    scores: Float[Array, "b m c"],
    verified_beam: Integer[Array, "b m c"],
    verified_scores: Float[Array, "b m c"],
    *,
    next_token: Integer[Array, " b"] | None = None,
) -> list[list[int]]:
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
    text without candidates gets [next_token], or [] where nothing was certain either.

    Scores decide nothing here, since a text must not depend on who drafted it. They say where
    candidates end, and a NaN among them that something else went wrong.

    Raises ValueError when shapes do not fit, a score is NaN or above 0, a finite one follows −∞, or
    a verified one is not finite.
    """
    beam, lengths, verified = _checked(beam, scores, verified_beam, verified_scores)
    if next_token is not None:  # a column of its own, which is certain
        check_integers(next_token=next_token)
        if next_token.shape != beam.shape[:1]:
            raise ValueError(f"next_token: expected shape {beam.shape[:1]}, got {next_token.shape}")
        rows = max(beam.shape[1], 1)
        first = np.broadcast_to(np.asarray(next_token)[:, None, None], (len(beam), rows, 1))
        grown = [(0, 0), (0, rows - beam.shape[1]), (1, 0)]
        beam, verified = np.pad(beam, grown), np.pad(verified, grown)
        verified[..., :1], lengths = first, np.pad(lengths, grown[:2]) + 1
    texts = zip(beam, lengths, verified, strict=True)
    return [descend(x, n, lambda m, c, _, own=own: own[m, c])[2] for x, n, own in texts]


def _checked(beam, scores, verified_beam, verified_scores):
    beam, scores = checked_beam(beam, scores)
    check_integers(verified_beam=verified_beam)
    if verified_beam.shape != beam.shape:
        expected = f"expected beam's shape (batch, M, C) = {beam.shape}"
        raise ValueError(f"verified_beam: {expected}, got {verified_beam.shape}")
    verified_scores = checked_scores("verified_scores", verified_scores, beam.shape)
    lengths = candidate_lengths(scores)
    real = np.arange(beam.shape[2]) < lengths[..., None]
    if not np.isfinite(verified_scores[real]).all():
        raise ValueError("verified_scores: expected finite ones, got −∞ at a candidate's token")
    return beam, lengths, np.asarray(verified_beam)


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


class KeyDice:
    """Where chance comes from: as many throws from a key as anybody asks for."""

    def __init__(self, key: Key[Array, ""]):
        self._random = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())

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
