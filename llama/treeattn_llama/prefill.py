"""`Llama.prefill`: prompts of any lengths into a cache, all at once or in chunks."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from treeattn.checks import Array
from treeattn_llama import layers
from treeattn_llama.cache import Cache

CHUNK = 1024  # the most tokens of each prompt in one pass through the layers
FEWEST = 16  # the fewest: shorter chunks are padded

Read = tuple[Float[Array, "b vocabulary"], Cache]  # (logits after each prompt, the cache)


def run(model, prompts: list[list[int]], cache: Cache) -> Read:
    """`Llama.prefill` without checks."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    empty = not np.asarray(cache.lengths).any()
    p = model.shards.devices
    # The ring pads prompts to a multiple of p², and no more than half should be padding.
    if empty and p > 1 and 2 * lengths.max() >= p * p:
        return by_ring(model, prompts, lengths, cache)
    return in_chunks(model, prompts, lengths, cache, empty)


def pad_prompts(prompts: list[list[int]], multiple: int) -> np.ndarray:
    """The prompts as one array (batch, n) int32, padded with zeros to a multiple.

    [[5, 7, 8]] becomes [[5, 7, 8, 0]] with a multiple of 4.
    """
    n = multiple * -(-max(map(len, prompts)) // multiple)
    return np.array([prompt + [0] * (n - len(prompt)) for prompt in prompts], np.int32)


def by_ring(model, prompts, lengths: np.ndarray, cache: Cache) -> Read:
    """All prompts at once into an empty cache: the devices share the tokens of each prompt, and
    send their keys around the ring."""
    shards = model.shards
    p = shards.devices
    # Prompts are padded to few lengths, because each compiles, and to multiples of p² for `fill`.
    coarse = 1 << max(int(lengths.max()).bit_length() - 3, 0)
    tokens = pad_prompts(prompts, p * p * -(-coarse // (p * p)))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    x, rotation = model.embed(*(shards.put(x, shards.of_keys) for x in (tokens, positions)))
    filled = []
    for layer, cached in zip(model.weights.layers, cache.layers, strict=True):
        x, cached = layers.prefill_layer(x, layer, rotation, cached, static=model.static)
        filled.append(cached)
    cache = Cache(*zip(*filled, strict=True), cache.lengths + lengths)
    return model.read_out(x, lengths - 1), cache


def in_chunks(model, prompts, lengths: np.ndarray, cache: Cache, empty: bool) -> Read:
    """`CHUNK` tokens of every prompt at a time, which attend to the cache as those of a step do."""
    longest = int(lengths.max())
    tokens = pad_prompts(prompts, CHUNK)
    logits = 0.0
    for start in range(0, longest, CHUNK):
        # The last piece is padded to a power of two: few lengths, because each compiles.
        size = min(CHUNK, max(FEWEST, 1 << (longest - start - 1).bit_length()))
        counts = np.clip(lengths - start, 0, size)
        piece = tokens[:, start : start + size]
        positions = np.asarray(cache.lengths)[:, None] + np.arange(size, dtype=np.int32)
        x, new = model.run_layers(piece, positions, cache=None if empty else cache)
        cache = model.commit(cache, new, counts=counts)
        empty = False
        logits = jnp.where(counts[:, None] > 0, model.read_out(x, counts - 1), logits)
    return logits, cache
