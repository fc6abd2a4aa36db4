"""Accepting candidates that were drawn at random, so that over keys the text is the model's.

`generate` has no need of it: it draws the model's own token at every node, with a key of the
token's place in the text, and accepts the candidates that are that token. This is the other way,
for drafts whose candidates are draws.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, Integer


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
    have been drawn from q: it is never accepted, and nothing follows from that. For p (0.5, 0.5),
    q (0.8, 0.2) and one draw, 0, the chance is 0.5 / 0.8, and rest is (0, 1).
    """
    p = p / p.sum()
    q = q / q.sum()
    chances = np.zeros(len(draws))
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


def accept_drawn(
    beam: Int[np.ndarray, "m c"],
    lengths: Int[np.ndarray, " m"],
    model: Callable[[int, int], np.ndarray],
    draft: Callable[[int, int], np.ndarray],
    dice,
    replacement: bool = False,
) -> list[int]:
    """The tokens that a text goes on with, by rejection at each node; at least one.

    beam, lengths: candidates whose first token is certain, the others drawn one after the other
    model, draft:  (m, c) -> (V,) the probabilities after candidate m's token c; those of the draft
                   are what beam[m, c + 1] was drawn from
    dice:          has happens(probability) -> bool and pick(probabilities) -> index
    """
    alive = np.flatnonzero(lengths > 0)
    tokens = []
    while True:
        m, c = int(alive[0]), len(tokens)
        further = alive[lengths[alive] > c + 1]
        rest = np.asarray(model(m, c), np.float64)
        chosen = None
        if len(further):
            draws = beam[further, c + 1]
            if not replacement:
                draws = draws[np.sort(np.unique(draws, return_index=True)[1])]
            chances, rest = rejection(rest, draft(int(further[0]), c), draws, replacement)
            pairs = zip(draws, chances, strict=True)
            chosen = next((int(x) for x, chance in pairs if dice.happens(chance)), None)
        if chosen is None:
            return [*tokens, dice.pick(rest / rest.sum())]
        tokens.append(chosen)
        alive = further[beam[further, c + 1] == chosen]
