"""How the next token is chosen from a model's logits: the likeliest, or a draw with a key."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Key

from treeattn.checks import Array, integer
from treeattn_llama.arguments import named, number

FEW = 1024  # the number of likeliest tokens that are tried first: a nucleus seldom has more


@dataclasses.dataclass
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), cut to the `top_k` likeliest, then
    to their `nucleus`. At temperature 0 the likeliest token is taken.

    key:  of a whole text. New token number i is drawn with a key made of this key and i, so the
          text does not depend on how many tokens a call of the model confirms. The first of several
          texts has the keys that it would have alone; every other has keys of its own.
    seed: makes the key, if there is none

    Raises ValueError for a temperature below 0, a top_k below 1, a top_p outside (0, 1], a
    temperature above 0 without key and seed, and for both; TypeError for values of another type.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    key: Key[Array, ""] | None = None
    seed: int | None = None

    def __post_init__(self):
        self.temperature = number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k is not None:
            self.top_k = integer("top_k", self.top_k, 1)
        if self.top_p is not None:
            self.top_p = number("top_p", self.top_p, 0, 1)
        if self.seed is not None:
            if self.key is not None:
                raise ValueError("seed: expected one of seed and key, got both")
            self.key = jax.random.key(integer("seed", self.seed, 0, 2**32 - 1))
        if self.key is not None:
            with named("key", "expected a jax.random.key, or seed=0"):
                jax.random.fold_in(self.key, 0)
        elif self.temperature > 0:
            raise ValueError(
                f"temperature: {self.temperature} draws at random: pass seed=0, or a key"
            )

    def next_tokens(
        self, logits: Float[Array, "b l n"], index: Int[np.ndarray, "b l"]
    ) -> Int[np.ndarray, "b l"]:
        """The token after each position, by the model's logits there: new token number index[b, i]
        of text b, counted from 0."""
        if self.temperature < 1e-37:  # a CPU takes numbers near it for 0
            return np.asarray(logits).argmax(axis=-1).astype(np.int32)  # without a copy on a CPU
        drawn = np.zeros(index.shape, np.int32)
        for b, i in np.ndindex(index.shape):
            options = self.temperature, self.top_p, self.top_k
            drawn[b, i] = _draw(logits[b, i], self.key, index[b, i], b, *options)
        return drawn


@functools.partial(jax.jit, static_argnames="top_k")
def _draw(logits, key, index, text, temperature, top_p, top_k):
    """New token number `index` of text number `text`, by its logits (n,): the argmax of the logits
    plus Gumbel noise, which is a draw from their softmax."""
    key = jax.random.fold_in(key, index)
    key = jnp.where(text == 0, key, jax.random.fold_in(key, text))
    # The barrier keeps XLA:CPU from joining noise and argmax in one loop, which is twice as slow.
    noise = jax.lax.optimization_barrier(jax.random.gumbel(key, logits.shape, logits.dtype))
    return jnp.argmax(settled(logits, temperature, top_k, top_p) + noise)


def settled(
    logits: Float[Array, " n"], temperature, top_k: int | None = None, top_p=None
) -> Float[Array, " n"]:
    """logits / temperature, with −∞ for the tokens that top_k and top_p leave out."""
    # The largest is subtracted first, so others may overflow to −∞, but none to ∞.
    logits = (logits - jnp.max(logits)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        values, tokens = jax.lax.top_k(logits, top_k)  # the first of equal ones
        logits = jnp.full_like(logits, -jnp.inf).at[tokens].set(values)
    return logits if top_p is None else nucleus(logits, top_p)


def nucleus(logits: Float[Array, " n"], top_p: float | Float[Array, ""]) -> Float[Array, " n"]:
    """The logits of the fewest likeliest tokens whose probabilities reach `top_p`; −∞ elsewhere.

    Among equal tokens the first are kept. The `FEW` likeliest tokens are tried first, because
    sorting the whole vocabulary takes twenty times as long.
    """
    n = logits.shape[-1]
    total = jax.nn.logsumexp(logits)

    def among(k: int, logits):
        values, tokens = jax.lax.top_k(logits, k)
        p = jnp.exp(values - total)
        kept = jnp.cumsum(p) - p < top_p  # the tokens before it do not reach top_p
        kept = kept.at[0].set(True)  # even if top_p rounds to 0 in float32
        return jnp.full_like(logits, -jnp.inf).at[tokens].set(jnp.where(kept, values, -jnp.inf))

    if n <= FEW:
        return among(n, logits)
    enough = jnp.exp(jax.lax.top_k(logits, FEW)[0] - total).sum() >= top_p
    return jax.lax.cond(enough, functools.partial(among, FEW), functools.partial(among, n), logits)
