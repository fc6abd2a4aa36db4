"""What the model itself says after a node: its likeliest token, a drawn one, or a judge's."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Key

from treeattn.idea.arrays import Array
from treeattn.llama.speculation.accept import Judge, KeyDice, rejection_judge
from treeattn.llama.speculation.candidates import Drawn
from treeattn.llama.text import nucleus, tempered


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; greedily at temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    key: Key[Array, ""] | None = None

    def own(self, logits, index: np.ndarray) -> Callable[[int, int], int]:
        """(b, node) -> what the model says after the node, which is the text's new token
        index[b, node]: with the key of that position, as in `treeattn.llama.text.stream`."""
        if self.temperature == 0:
            tokens = np.asarray(jnp.argmax(logits, axis=-1))
            return lambda b, node: int(tokens[b, node])

        def draw(b, node):
            key = jax.random.fold_in(self.key, int(index[b, node]))
            cut = self.top_p < 1
            return int(_draw(logits, b, node, key, self.temperature, self.top_p, cut=cut))

        return draw

    def rejecting(self, logits, b: int, index: int, beam, drawn: Drawn, path: np.ndarray) -> Judge:
        """The judge of text b's candidates that were drawn, beam (m, c), which are the nodes
        path (m, c); `index` is the number of the text's next new token."""

        def model(m, c):
            args = logits, b, path[m, c], self.temperature, self.top_p
            return np.asarray(_probabilities(*args, cut=self.top_p < 1), np.float64)

        dice = KeyDice(jax.random.fold_in(jax.random.fold_in(self.key, int(index)), b))
        # Before the drawn tokens comes the certain one, which nothing was drawn from.
        distributions = np.pad(drawn.distributions[b], [(0, 0), (1, 0), (0, 0)])
        return rejection_judge(beam, distributions, model, dice, drawn.replacement)


@jax.jit
def likeliest(
    logits: Float[Array, "*b vocabulary"],
) -> tuple[Int[Array, "*b"], Float[Array, "*b"]]:
    """(tokens, scores): the likeliest token of each distribution, and its log-probability."""
    token = jnp.argmax(logits, axis=-1)
    top = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, top - jax.nn.logsumexp(logits, axis=-1)


@functools.partial(jax.jit, static_argnames="k")
def likeliest_tokens(logits, k):
    """(…, k) the k likeliest tokens of each distribution, best first."""
    return jax.lax.top_k(logits, k)[1]


def _cut(logits, b, node, temperature, top_p, cut):
    logits = tempered(logits[b, node], temperature)
    return nucleus(logits, top_p) if cut else logits


@functools.partial(jax.jit, static_argnames="cut")
def _draw(logits, b, node, key, temperature, top_p, *, cut):
    """What `treeattn.llama.text.sample` draws for text b of the batch with this key."""
    row = _cut(logits, b, node, temperature, top_p, cut)
    all_texts = jnp.zeros((len(logits), len(row)), row.dtype).at[b].set(row)
    return jax.random.categorical(key, all_texts, axis=-1)[b]


@functools.partial(jax.jit, static_argnames="cut")
def _probabilities(logits, b, node, temperature, top_p, *, cut):
    return jax.nn.softmax(_cut(logits, b, node, temperature, top_p, cut))
