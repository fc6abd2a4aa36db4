"""Prompts of any lengths into a cache, for `Llama.prefill`: all at once, or in chunks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn.kernel.causal import CAUSAL_BLOCK
from treeattn_llama import cache as caches
from treeattn_llama import inputs
from treeattn_llama.attentions import prompt_attention
from treeattn_llama.cache import Cache
from treeattn_llama.products import take_token
from treeattn_llama.static import static_of

FEWEST = 16  # tokens of a chunk: shorter ones are filled up


Read = tuple[Float[Array, "b vocabulary"], Cache, Float[Array, "b width"] | None]
"""(logits after each prompt, the cache, the last layer's output there, if it was asked for)."""


def run(
    model,
    prompts: inputs.Prompts,
    cache: Cache,
    chunk: int,
    progress: Callable[[int], None],
    with_states: bool = False,
) -> Read:
    """What `Read` says, of arguments that are checked here."""
    inputs.check_cache(cache, model)
    prompts, lengths = inputs.check_prompts(prompts, cache, model.config.vocabulary)
    attention = prompt_attention(model.prefill_with, model.place.layout)
    empty = not np.asarray(cache.lengths).any()
    if attention is None or model.exact or not empty:
        return in_chunks(model, prompts, lengths, cache, chunk, progress, with_states)
    result = at_once(model, prompts, lengths, cache, attention, with_states)
    progress(int(lengths.sum()))
    return result


def at_once(
    model,
    prompts: list[list[int]],
    lengths: np.ndarray,
    cache: Cache,
    attention: Callable,
    with_states: bool,
) -> Read:
    """What `run` returns, from an empty cache, by a function like `ring_attention`.

    The texts are sharded over the devices of the model's mesh.
    """
    longest = int(lengths.max())
    layout = model.place.layout
    p = caches.shards_of(layout)
    # Padded to a few lengths only, each of which compiles, that `fill` can deal out.
    multiple = p * p if longest >= p * p else p
    coarse = 1 << max(longest.bit_length() - 3, 0)
    tokens = inputs.pad_prompts(prompts, multiple * -(-coarse // multiple))
    along = NamedSharding(layout.mesh, P(layout.batch or None, layout.axes))
    tokens = jax.make_array_from_callback(tokens.shape, along, lambda index: tokens[index])
    x, rotation = model._embed(tokens, along=layout.axes)
    prefill_layer = model._kind.prefill_layer
    static = static_of(model)
    filled = []
    for w, cached in zip(model.weights.layers, cache.layers, strict=True):
        x, cached = prefill_layer(x, w, rotation, cached, static=static, attention=attention)
        filled.append(cached)
    k, v = zip(*filled, strict=True)
    cache = Cache(k, v, caches.advance(cache.lengths, lengths))
    logits = model.read_out(x, lengths - 1, along=layout.axes)
    if not with_states:
        return logits, cache, None
    caches.wait_on_cpus((x, logits), layout.mesh)
    return logits, cache, _state_at(x, lengths - 1)


_state_at = jax.jit(lambda x, last: take_token(x, last)[:, 0])


def in_chunks(
    model,
    prompts: list[list[int]],
    lengths: np.ndarray,
    cache: Cache,
    chunk: int,
    progress: Callable[[int], None],
    with_states: bool,
) -> Read:
    """What `run` returns, by `chunk` tokens of every prompt at a time.

    Each chunk attends to the cache like any step. progress is called with its number of tokens.
    """
    longest = int(lengths.max())
    tokens = inputs.pad_prompts(prompts, max(chunk, FEWEST))
    empty = not np.asarray(cache.lengths).any()
    logits = None
    state = None
    for start in range(0, longest, chunk):
        # The last piece is padded to a power of two: few lengths, each of which compiles.
        size = min(chunk, max(FEWEST, 1 << (longest - start - 1).bit_length()))
        counts = np.clip(lengths - start, 0, size)
        piece = tokens[:, start : start + size]
        # In a long piece the last layer computes only what is read of it. In a short one
        # that would save less than it takes to compile.
        last = counts - 1 if size > CAUSAL_BLOCK else None
        x, new = model._run_layers(piece, cache, see_cache=start > 0 or not empty, last=last)
        cache = model._write(cache, new, counts)
        seen = model.read_out(x, counts - 1)
        logits = seen if logits is None else jnp.where(counts[:, None] > 0, seen, logits)
        if with_states:
            at = _state_at(x, counts - 1)
            state = at if state is None else jnp.where(counts[:, None] > 0, at, state)
        progress(int(counts.sum()))
    return logits, cache, state
