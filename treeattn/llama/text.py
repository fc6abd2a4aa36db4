"""Text from a model: sampling, streaming, stopping, and chatting."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float, Int, Key

from treeattn.idea.arrays import Array, integer, number
from treeattn.llama.inputs import Prompt, Prompts, prompt_lengths, stop_ids
from treeattn.llama.model import Llama
from treeattn.llama.reading.tokenizer import Tokenizer


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


@functools.partial(jax.jit, static_argnames=("greedy", "cut"))
def _sample(logits, key, temperature, top_p, *, greedy, cut):
    if greedy:
        return jnp.argmax(logits, axis=-1)
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

    Drawn from softmax(logits / temperature), cut to its `nucleus` when top_p < 1.
    """
    _check_sampling(key, temperature, top_p)
    return _sample(logits, key, temperature, top_p, greedy=temperature == 0, cut=top_p < 1)


def _check_sampling(key, temperature: float, top_p: float) -> None:
    if not number("temperature", temperature) >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if not 0 < number("top_p", top_p) <= 1:
        raise ValueError(f"top_p: expected more than 0, at most 1, got {top_p}")
    if temperature > 0 and key is None:
        raise ValueError("key: sampling at a temperature above 0 needs a jax.random.key")


def stream(
    model: Llama,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: Key[Array, ""] | None = None,
    stop: Sequence[int] | None = None,
    capacity: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[list[int | None]]:
    """Continue the prompts (lists of token ids, of any lengths), a token of each at a time.

    Yields for each step a list with one id for each prompt, None where the text is over: after
    an id in `stop` (by default the checkpoint's), which is yielded as well.

    capacity: of the cache, in tokens; by default what all of this needs. A longer text than it
              is an error, raised before any work.
    progress: called during prefill with the number of tokens done

    Greedy at temperature 0; else as in `sample`, with a new key from `key` at each step.
    """
    _check_sampling(key, temperature, top_p)
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 1)
    capacity = None if capacity is None else integer("capacity", capacity, 1)
    needed = int(prompt_lengths(prompts).max()) + max_new_tokens - 1
    if capacity is not None and needed > capacity:
        raise ValueError(
            f"capacity: the longest prompt and max_new_tokens need {needed}, got {capacity}"
        )
    stop = stop_ids(stop, model.tokenizer.stop if model.tokenizer else frozenset())

    def tokens():
        cache = model.new_cache(len(prompts), capacity or needed)
        logits, cache = model.prefill(prompts, cache, progress=progress)
        over = np.zeros(len(prompts), bool)
        for i in range(max_new_tokens):
            now = None if key is None else jax.random.fold_in(key, i)
            ids = sample(np.asarray(logits), now, temperature=temperature, top_p=top_p)
            ids = np.asarray(ids, np.int32)
            if jax.process_count() > 1:  # a ring's results may differ in the last bit
                ids = multihost_utils.broadcast_one_to_all(ids)
            yield [None if done else int(token) for token, done in zip(ids, over, strict=True)]
            over |= np.isin(ids, list(stop))
            if over.all() or i == max_new_tokens - 1:
                return
            counts = np.where(over, 0, 1)  # a text that is over does not grow any more
            logits, cache = model.step(ids[:, None], cache, counts=counts, last=True)

    return tokens()


def stream_text(model: Llama, prompt: Prompt, **options) -> Iterator[str]:
    """The text that continues one prompt, in pieces as they come; `options` as in `stream`."""
    return filter(None, pieces(tokenizer_of(model), stream(model, [prompt], **options)))


def pieces(tokenizer: Tokenizer, new: Iterable[Sequence[int]]) -> Iterator[str]:
    """The text of the new ids, a piece each time; at the end what was half of a character."""
    ids, shown = [], 0
    for more in new:
        ids += more
        whole = tokenizer.decode(ids)
        text = whole.rstrip("\ufffd")  # half of a character: wait for the rest
        yield text[shown:]
        shown = max(shown, len(text))
    yield whole[shown:]


def tokenizer_of(model: Llama) -> Tokenizer:
    """The checkpoint's tokenizer, or a ValueError where it has none."""
    if model.tokenizer is None:
        raise ValueError("model: this checkpoint has no tokenizer")
    return model.tokenizer


def chat(model: Llama, messages: str | list[dict[str, str]], **options) -> Iterator[str]:
    """The model's answer, in pieces as they come.

    messages: what the user says, or a list of {"role": …, "content": …} for the checkpoint's
    template; `options` as in `stream`.
    """
    return stream_text(model, tokenizer_of(model).chat(messages), **options)
