"""How the next token is taken from a model's logits: the likeliest, or one drawn with a key."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Key

from treeattn.idea.arrays import Array, number

FEW = 1024  # tokens that are looked at first: a nucleus seldom has more


def nucleus(logits: Float[Array, "*b n"], top_p: float | Float[Array, ""]) -> Float[Array, "*b n"]:
    """The logits of the fewest likeliest tokens whose probabilities reach `top_p`; −∞ elsewhere.

    Of equal ones the first. It is looked for among the likeliest `FEW`; only where these do not
    reach `top_p`, in some row, all of the vocabulary is sorted, which takes twenty times as long.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    n = rows.shape[1]
    if n <= FEW:
        return _nucleus_of(n, rows, top_p).reshape(logits.shape)
    total = jax.nn.logsumexp(rows, axis=-1, keepdims=True)
    likeliest = jax.lax.top_k(rows, FEW)[0]
    enough = jnp.exp(likeliest - total).sum(axis=-1) >= top_p
    few = functools.partial(_nucleus_of, FEW)
    every = functools.partial(_nucleus_of, n)
    cut = jax.lax.cond(enough.all(), few, every, rows, top_p)
    return cut.reshape(logits.shape)


def _nucleus_of(k: int, rows: Float[Array, "b n"], top_p) -> Float[Array, "b n"]:
    """`nucleus` of rows whose k likeliest tokens reach `top_p`."""
    values, tokens = jax.lax.top_k(rows, k)
    p = jnp.exp(values - jax.nn.logsumexp(rows, axis=-1, keepdims=True))
    kept = jnp.cumsum(p, axis=-1) - p < top_p  # what comes before it is not enough yet
    cut = jnp.full_like(rows, -jnp.inf)
    at = jnp.arange(len(rows))[:, None], tokens
    return cut.at[at].set(jnp.where(kept, values, -jnp.inf))


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
    text is the same however many tokens a call of the model confirms. Of several texts, each has a
    key of its own made of that (`text_key`): no text's draw computes another's.

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
        """A token for each row, those of texts 0, 1, 2, …"""
        if self.greedy:
            return _likeliest(logits)
        return _draw(logits, key, self.temperature, self.top_p, cut=self.top_p < 1)

    def draw_at(
        self, logits: Float[Array, "b n"], index: Int[Array, " b"], texts: Int[Array, " b"]
    ) -> Int[Array, " b"]:
        """The new token number index[i] of text texts[i], for each row of logits: what `draw` draws
        with the key `for_token(index[i])`."""
        settings = self.temperature, self.top_p
        return _draw_at(logits, self.key, index, texts, *settings, cut=self.top_p < 1)

    def noise_at(
        self, first: Int[Array, " b"], count: int, n: int, dtype: jnp.dtype
    ) -> Float[Array, "b count n"]:
        """The numbers that `draw_at` adds to the logits (of that dtype, n of them, over the
        temperature) of the texts' tokens first[b], first[b] + 1, …: the largest sum is drawn."""
        return _noise_at(self.key, first, count=count, n=n, dtype=dtype)


class Chance(NamedTuple):
    """How the new tokens of texts are drawn: each is where logits / temperature + noise is largest,
    among the tokens that top_p leaves, and the noise is known beforehand.

    sampling: temperature, top_p and key
    begin:    (B,) the prompts' lengths
    logits:   of one token: their shape (vocabulary,) and dtype
    """

    sampling: Sampling
    begin: Int[np.ndarray, " b"]
    logits: jax.ShapeDtypeStruct

    def noise(self, lengths: Int[np.ndarray, " b"], count: int) -> Float[Array, "b count v"]:
        """Of the `count` tokens that come after texts of these lengths."""
        first = np.asarray(lengths - self.begin, np.int32)
        (n,) = self.logits.shape
        return self.sampling.noise_at(first, count, n, self.logits.dtype)


_likeliest = jax.jit(functools.partial(jnp.argmax, axis=-1))


def text_key(key: Key[Array, ""], text: int | Int[Array, ""]) -> Key[Array, ""]:
    """Text number `text`'s own, of a token's key: that itself for the first, or only, text."""
    return jnp.where(text == 0, key, jax.random.fold_in(key, text))


@functools.partial(jax.jit, static_argnames="cut")
def _draw(logits, key, temperature, top_p, *, cut):
    keys = jax.vmap(text_key, (None, 0))(key, jnp.arange(len(logits)))
    return _drawn_with(logits, keys, temperature, top_p, cut)


@functools.partial(jax.jit, static_argnames="cut")
def _draw_at(logits, key, index, texts, temperature, top_p, *, cut):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    return _drawn_with(logits, jax.vmap(text_key)(keys, texts), temperature, top_p, cut)


def _drawn_with(logits, keys, temperature, top_p, cut):
    """A token for each row, with a key for each: b rows of a vocabulary take b·n numbers."""
    n = logits.shape[-1]
    noise = jax.vmap(lambda key: gumbel_noise(key, n, logits.dtype))(keys)
    # Computed before it is compared: as one loop, that takes twice as long on a CPU.
    noise = jax.lax.optimization_barrier(noise)
    return jnp.argmax(settled(logits, temperature, top_p, cut) + noise, axis=-1)


def gumbel_noise(key: Key[Array, ""], n: int, dtype: jnp.dtype) -> Float[Array, " n"]:
    """What is added to n logits, so that the largest sum is at a token drawn from them."""
    return jax.random.gumbel(key, (n,), dtype)


@functools.partial(jax.jit, static_argnames=("count", "n", "dtype"))
def _noise_at(key, first, *, count, n, dtype):
    def of(index, text):
        return gumbel_noise(text_key(jax.random.fold_in(key, index), text), n, dtype)

    index = first[:, None] + jnp.arange(count)
    return jax.vmap(jax.vmap(of, (0, None)))(index, jnp.arange(len(first)))


def settled(logits: Float[Array, "*b n"], temperature, top_p, cut: bool) -> Float[Array, "*b n"]:
    """These logits with temperature, and nucleus if they are to be cut."""
    logits = tempered(logits, temperature)
    return nucleus(logits, top_p) if cut else logits


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
