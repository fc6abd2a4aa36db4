"""How the next token is taken from a model's logits: the likeliest, or one drawn with a key."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Key

from treeattn.idea.arrays import Array, number


def nucleus(logits: Float[Array, "*b n"], top_p: float | Float[Array, ""]) -> Float[Array, "*b n"]:
    """The logits of the fewest likeliest tokens whose probabilities reach `top_p`; −∞ elsewhere."""
    order = jnp.argsort(-logits, axis=-1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < top_p  # what comes before it is not enough yet
    ranks = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(kept, ranks, axis=-1), logits, -jnp.inf)


def tempered(logits: Float[Array, "*b n"], temperature) -> Float[Array, "*b n"]:
    """logits / temperature, less their largest: the others may overflow to −∞, none to ∞."""
    least = jnp.finfo(logits.dtype).tiny  # a smaller one counts as 0 on a CPU
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - largest) / jnp.maximum(temperature, least)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), cut to its `nucleus` when
    top_p < 1; at temperature 0 the likeliest is taken.

    key: of a whole text. Its new token number i is drawn with the key `for_token(i)`, so that the
    text is the same however many tokens a call of the model confirms.

    Raises ValueError for a temperature below 0, a top_p outside (0, 1], and a temperature above 0
    without a key.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    key: Key[Array, ""] | None = None

    def __post_init__(self):
        if not number("temperature", self.temperature) >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 < number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p: expected more than 0, at most 1, got {self.top_p}")
        if not self.greedy and self.key is None:
            raise ValueError("key: sampling at a temperature above 0 needs a jax.random.key")

    @property
    def greedy(self) -> bool:
        return bool(self.temperature == 0)

    def for_token(self, index: int) -> Key[Array, ""]:
        """The key of the new token with this number, from 0."""
        return jax.random.fold_in(self.key, index)

    def draw(self, logits: Float[Array, "b n"], key: Key[Array, ""] | None) -> Int[Array, " b"]:
        """A token for each row."""
        if self.greedy:
            return _likeliest(logits)
        return _draw(logits, key, self.temperature, self.top_p, cut=self.top_p < 1)


_likeliest = jax.jit(functools.partial(jnp.argmax, axis=-1))


@functools.partial(jax.jit, static_argnames="cut")
def _draw(logits, key, temperature, top_p, *, cut):
    logits = tempered(logits, temperature)
    return jax.random.categorical(key, nucleus(logits, top_p) if cut else logits, axis=-1)


def sample(
    logits: Float[Array, "b n"],
    key: Key[Array, ""] | None = None,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> Int[Array, " b"]:
    """A token for each row: the likeliest at temperature 0, else drawn with `key`.

    temperature, top_p, and the errors they raise: as in `Sampling`
    """
    return Sampling(temperature, top_p, key).draw(logits, key)


@jax.jit
def likeliest(
    logits: Float[Array, "*b vocabulary"],
) -> tuple[Int[Array, "*b"], Float[Array, "*b"]]:
    """(tokens, scores): the likeliest token of each distribution, and its log-probability."""
    token = jnp.argmax(logits, axis=-1)
    top = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, top - jax.nn.logsumexp(logits, axis=-1)
