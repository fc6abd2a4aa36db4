"""How the next token is taken from a model's logits: the likeliest, or one drawn with a key."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Key

from treeattn_llama.arguments import Array, integer, number

FEW = 1024  # tokens that are looked at first: a nucleus seldom has more


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), cut to the `top_k` likeliest, then
    to their `nucleus`; at temperature 0 the likeliest is taken.

    key: of a whole text. Its new token number i is drawn with a key made of this and i, so that the
    text is the same however many tokens a call of the model confirms. Of several texts, the
    first has the keys that it would have alone, and every other has keys of its own.

    Raises ValueError for a temperature below 0, a top_k below 1, a top_p outside (0, 1], and a
    temperature above 0 without a key; TypeError for what is no number, and no key.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    key: Key[Array, ""] | None = None

    def __post_init__(self):
        checked = {"temperature": number("temperature", self.temperature)}
        if not checked["temperature"] >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k is not None:
            checked["top_k"] = integer("top_k", self.top_k, 1)
        if self.top_p is not None:
            checked["top_p"] = number("top_p", self.top_p)
            if not 0 < checked["top_p"] <= 1:
                raise ValueError(f"top_p: expected more than 0, at most 1, got {self.top_p}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.temperature > 0 and self.key is None:
            raise ValueError(
                f"temperature: {self.temperature} draws at random: pass seed=0, or a key"
            )
        if self.key is None:
            return
        try:
            jax.random.fold_in(self.key, 0)
        except (TypeError, ValueError):
            raise TypeError(
                f"key: expected a jax.random.key, or seed=0, got {self.key!r:.40}"
            ) from None

    def next_tokens(
        self, logits: Float[Array, "b l n"], index: Int[np.ndarray, "b l"]
    ) -> Int[np.ndarray, "b l"]:
        """What comes after each token, by the model's logits there: of text b, its new token number
        index[b, i], from 0."""
        if self.temperature == 0:
            return np.asarray(logits).argmax(axis=-1).astype(np.int32)  # a CPU copies nothing
        drawn = np.zeros(index.shape, np.int32)
        for b, i in np.ndindex(index.shape):
            at = np.int32(index[b, i]), np.int32(b)
            drawn[b, i] = _draw(
                logits[b, i], self.key, *at, self.temperature, self.top_p, self.top_k
            )
        return drawn


def sampling_of(temperature, top_k, top_p, key, seed) -> Sampling:
    """The `Sampling` that a caller has asked for: by a key of JAX's, or by a seed."""
    if key is not None and seed is not None:
        raise ValueError("seed: expected one of seed and key, got both")
    if seed is not None:
        key = jax.random.key(integer("seed", seed, 0, 2**32 - 1))
    return Sampling(temperature, top_k, top_p, key)


@functools.partial(jax.jit, static_argnames="top_k")
def _draw(logits, key, index, text, temperature, top_p, top_k):
    """New token number `index` of text number `text`, by the logits (n,) there: where these and
    Gumbel noise are largest in sum."""
    key = jax.random.fold_in(key, index)
    key = jnp.where(text == 0, key, jax.random.fold_in(key, text))
    # Computed before it is compared: as one loop, that takes twice as long on a CPU.
    noise = jax.lax.optimization_barrier(jax.random.gumbel(key, logits.shape, logits.dtype))
    return jnp.argmax(settled(logits, temperature, top_k, top_p) + noise)


def settled(
    logits: Float[Array, " n"], temperature, top_k: int | None = None, top_p=None
) -> Float[Array, " n"]:
    """logits / temperature, −∞ at the tokens that top_k and top_p leave out."""
    least = jnp.finfo(logits.dtype).tiny  # a smaller temperature counts as 0 on a CPU
    # Less their largest: the others may overflow to −∞, none to ∞.
    logits = (logits - jnp.max(logits)) / jnp.maximum(temperature, least)
    if top_k is not None and top_k < logits.shape[-1]:
        values, tokens = jax.lax.top_k(logits, top_k)  # of equal ones the first
        logits = jnp.full_like(logits, -jnp.inf).at[tokens].set(values)
    return logits if top_p is None else nucleus(logits, top_p)


def nucleus(logits: Float[Array, " n"], top_p: float | Float[Array, ""]) -> Float[Array, " n"]:
    """The logits of the fewest likeliest tokens whose probabilities reach `top_p`; −∞ elsewhere.

    Of equal ones the first. It is looked for among the likeliest `FEW`; only where these do not
    reach `top_p` all of the vocabulary is sorted, which takes twenty times as long.
    """
    n = logits.shape[-1]
    total = jax.nn.logsumexp(logits)

    def among(k: int, logits):
        values, tokens = jax.lax.top_k(logits, k)
        p = jnp.exp(values - total)
        kept = jnp.cumsum(p) - p < top_p  # what comes before it is not enough yet
        kept = kept.at[0].set(True)  # where float32 has 0 for top_p, too
        return jnp.full_like(logits, -jnp.inf).at[tokens].set(jnp.where(kept, values, -jnp.inf))

    if n <= FEW:
        return among(n, logits)
    enough = jnp.exp(jax.lax.top_k(logits, FEW)[0] - total).sum() >= top_p
    return jax.lax.cond(enough, functools.partial(among, FEW), functools.partial(among, n), logits)
