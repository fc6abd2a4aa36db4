"""Prompts of any lengths into a cache, for `Llama.prefill`: all at once, or in chunks."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from treeattn_llama import layers
from treeattn_llama.arguments import Array
from treeattn_llama.cache import Cache

CHUNK = 1024  # tokens of each prompt that go through the layers at a time
FEWEST = 16  # tokens of a chunk: shorter ones are filled up

Read = tuple[Float[Array, "b vocabulary"], Cache]  # (logits after each prompt, the cache)


def run(model, prompts: list[list[int]], cache: Cache) -> Read:
    """What `Llama.prefill` returns, of arguments that were checked."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    empty = not np.asarray(cache.lengths).any()
    p = model.layout.shards
    # The ring's prompts are filled up to a multiple of p²: half of it at most should be padding.
    if empty and p > 1 and 2 * lengths.max() >= p * p:
        return by_ring(model, prompts, lengths, cache)
    return in_chunks(model, prompts, lengths, cache)


def pad_prompts(prompts: list[list[int]], multiple: int) -> np.ndarray:
    """The prompts as rows (batch, n) int32, filled up with zeros to a multiple: [[5, 7, 8]] of 4
    becomes [[5, 7, 8, 0]]."""
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), multiple * -(-longest // multiple)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens


def by_ring(model, prompts: list[list[int]], lengths: np.ndarray, cache: Cache) -> Read:
    """Into an empty cache, all at once: the texts are sharded over the devices, and by Ring
    Attention each device's keys pass by all others."""
    layout = model.layout
    p = layout.shards
    # Padded to a few lengths only, each of which compiles, that `fill` can deal out.
    coarse = 1 << max(int(lengths.max()).bit_length() - 3, 0)
    tokens = pad_prompts(prompts, p * p * -(-coarse // (p * p)))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    given = (layout.put(x, layout.of_keys) for x in (tokens, positions))
    w = model.weights
    x, rotation = layers.embed(*given, w.embedding, w.frequencies)
    filled = []
    for layer, cached in zip(w.layers, cache.layers, strict=True):
        x, cached = layers.prefill_layer(x, layer, rotation, cached, static=model.static)
        filled.append(cached)
    cache = Cache(*zip(*filled, strict=True), cache.lengths + lengths)
    return model.read_out(x, lengths - 1), cache


def in_chunks(model, prompts: list[list[int]], lengths: np.ndarray, cache: Cache) -> Read:
    """By `CHUNK` tokens of every prompt at a time, each of which attends to the cache like any
    step."""
    longest = int(lengths.max())
    tokens = pad_prompts(prompts, CHUNK)
    empty = not np.asarray(cache.lengths).any()
    logits = None
    for start in range(0, longest, CHUNK):
        # The last piece is padded to a power of two: few lengths, each of which compiles.
        size = min(CHUNK, max(FEWEST, 1 << (longest - start - 1).bit_length()))
        counts = np.clip(lengths - start, 0, size)
        piece = tokens[:, start : start + size]
        positions = np.asarray(cache.lengths)[:, None] + np.arange(size, dtype=np.int32)
        see_cache = start > 0 or not empty
        x, new = model.run_layers(piece, cache, positions, see_cache=see_cache)
        cache = model.commit(cache, new, counts=counts)
        seen = model.read_out(x, counts - 1)
        logits = seen if logits is None else jnp.where(counts[:, None] > 0, seen, logits)
    return logits, cache
