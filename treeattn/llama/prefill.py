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
from treeattn.llama import cache as caches
from treeattn.llama import dealt, inputs, layers
from treeattn.llama.cache import Cache

FEWEST = 16  # tokens of a chunk: shorter ones are filled up


def at_once(
    model, prompts: list[list[int]], lengths: np.ndarray, cache: Cache, attention: Callable
) -> tuple[Float[Array, "b vocabulary"], Cache]:
    """(logits after each prompt, the cache, which was empty) by a function like `ring_attention`.

    The texts are sharded over the devices of the model's mesh.
    """
    longest = int(lengths.max())
    p = model.mesh.size
    # Padded to a few lengths only, each of which compiles, that `fill` can deal out.
    multiple = p * p if longest >= p * p else p
    coarse = 1 << max(longest.bit_length() - 3, 0)
    tokens = inputs.pad_prompts(prompts, multiple * -(-coarse // multiple))
    along = NamedSharding(model.mesh, P(None, caches.axes_of(model.mesh)))
    tokens = jax.make_array_from_callback(tokens.shape, along, lambda index: tokens[index])
    x, rotation = model._embed(tokens, out=along if model.shard_weights else None)
    prefill_layer = (dealt if model.shard_weights else layers).prefill_layer
    static = model._static(cached=False)
    filled = []
    for w, cached in zip(model.weights.layers, cache.layers, strict=True):
        x, cached = prefill_layer(x, w, rotation, cached, static=static, attention=attention)
        filled.append(cached)
    k, v = zip(*filled, strict=True)
    cache = Cache(k, v, caches.advance(cache.lengths, lengths))
    return model.read_out(x, lengths - 1), cache


def in_chunks(
    model,
    prompts: list[list[int]],
    lengths: np.ndarray,
    cache: Cache,
    chunk: int,
    progress: Callable[[int], None],
) -> tuple[Float[Array, "b vocabulary"], Cache]:
    """(logits after each prompt, the cache), `chunk` tokens of every prompt at a time.

    Each chunk attends to the cache like any step. progress is called with its number of tokens.
    """
    longest = int(lengths.max())
    tokens = inputs.pad_prompts(prompts, max(chunk, FEWEST))
    empty = not np.asarray(cache.lengths).any()
    logits = None
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
        progress(int(counts.sum()))
    return logits, cache
