"""Accepting candidates that were drawn at random, so that over keys the text is the model's."""

import jax
import numpy as np
from jaxtyping import Float, Integer, Key

from treeattn.idea.arrays import Array
from treeattn_llama.sampling import Sampling
from treeattn_llama.speculation.accept import Judge
from treeattn_llama.speculation.candidates import Drawn
from treeattn_llama.speculation.verify import probabilities_after


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


def rejection_judge(
    beam, distributions, model, dice, replacement: bool, tokens: np.ndarray | None = None
) -> Judge:
    """The judge that accepts drawn candidates with the right chances.

    distributions: (M, C, V) what each token was drawn from; or (M, C, n) of the n `tokens` only
    model:         (m, c) -> (V,) the model's probabilities after candidate m's token c
    dice:          has happens(probability) -> bool and pick(probabilities) -> index
    """

    def judge(m, c, further):
        p = np.asarray(model(m, c), np.float64)
        if not len(further):
            return dice.pick(p / p.sum())
        draws = beam[further, c + 1]
        q = np.asarray(distributions[further[0], c + 1], np.float64)
        if tokens is not None:
            of_tokens = q
            q = np.zeros(len(p))
            q[tokens] = of_tokens
        draws = draws if replacement else draws[np.sort(np.unique(draws, return_index=True)[1])]
        chances, rest = rejection(p, q, draws, replacement)
        for token, chance in zip(draws, chances, strict=True):
            if dice.happens(chance):
                return int(token)
        return dice.pick(rest)

    return judge


def judge_of_drawn(
    sampling: Sampling, logits, b: int, index: int, beam, drawn: Drawn, path: np.ndarray
) -> Judge:
    """The judge of text b's candidates that were drawn.

    logits: (b, l, vocabulary) what the model says after each node
    index:  the number of the text's next new token
    beam:   (m, c) the candidates, the certain token first, which are the nodes `path` (m, c)
    """

    def model(m, c):
        cut = sampling.top_p < 1
        settings = sampling.temperature, sampling.top_p
        p = probabilities_after(logits, b, path[m, c + 1], *settings, cut=cut)
        return np.asarray(p, np.float64)

    dice = KeyDice(jax.random.fold_in(sampling.for_token(index), b))
    # Before the drawn tokens comes the certain one, which nothing was drawn from.
    of_drawn = beam[:, 1:], drawn.distributions[b], model, dice, drawn.replacement, drawn.tokens
    judge = rejection_judge(*of_drawn)
    return lambda m, c, further: judge(m, c - 1, further)
