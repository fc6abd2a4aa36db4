"""The arguments of a Llama's calls, checked before any work; errors name the argument.

The values of a traced array are not known. They are not checked.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from treeattn.checks import Array, as_array, integer
from treeattn_llama.arguments import integers, named
from treeattn_llama.cache import Cache, Pair
from treeattn_llama.text_shards import TextShards

# The token ids of one text, and of several: lists of whole numbers, or arrays.
Ids = Sequence[SupportsIndex] | Array
Prompts = Sequence[Ids] | Array

NewEntries = tuple[Pair, ...]  # the keys and values of new tokens, layer by layer


def floating_dtype(dtype) -> np.dtype | None:
    """`dtype`, or None. Raises TypeError unless it is a float of 16 bits or more, and ValueError
    for float64 if x64 is off."""
    if dtype is None:
        return None
    with named("dtype"):
        found = jnp.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise TypeError(f"dtype: expected a floating-point one of 16 bits or more, got {dtype!r}")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"dtype: {found} needs jax.config.update('jax_enable_x64', True)")
    return found


def check_batch(name: str, shards: TextShards, batch: int) -> None:
    """Raise ValueError unless the mesh's batch axis can share so many texts evenly."""
    if batch % shards.parts:
        raise ValueError(
            f"{name}: expected a number of texts that {shards.parts} parts of the mesh's batch "
            f"axis can share evenly, got {batch}"
        )


def check_tokens(tokens, vocabulary: int, shards: TextShards) -> Array:
    """`tokens` as an array (b, l) of ids, of as many texts as the devices can share."""
    tokens = integers("tokens", tokens, (None, None), "ids", vocabulary - 1)
    check_batch("tokens", shards, tokens.shape[0])
    return tokens


def check_prompts(prompts: Prompts, vocabulary: int) -> list[list[int]]:
    """The prompts as lists of ints, from lists or arrays of NumPy or JAX.

    Raises ValueError unless they are a sequence of sequences, none of them empty, of ids in the
    vocabulary.
    """
    with named("prompts", "expected lists of token ids"):
        texts = [as_array(f"text {i}", prompts[i]) for i in range(len(prompts))]
    lengths = [len(text) if text.ndim == 1 else 0 for text in texts]
    if not texts or not all(lengths):
        raise ValueError(
            f"prompts: expected texts or lists of ids, none of them empty, got lengths {lengths} "
            f"of {prompts!s:.40}"
        )
    return [integers("prompts", ids, (None,), "ids", vocabulary - 1).tolist() for ids in texts]


def check_cache(cache: Cache, model) -> None:
    """Raise TypeError or ValueError unless `cache` is one of this model's, on its devices."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: expected a Cache, as new_cache makes it, got {cache!r:.40}")
    config = model.config
    k = cache.k[0]
    found = len(cache.k), *k.shape[2:], k.dtype.name
    dtype = model.weights.embedding.dtype
    expected = config.layers, config.kv_heads, config.head_dim, dtype.name
    if found != expected:
        raise ValueError(
            f"cache: expected layers, key heads, head_dim and dtype {expected}, as the model has, "
            f"got {found}"
        )
    if isinstance(k, jax.core.Tracer):
        return
    wanted = model.shards.sharding(model.shards.of_keys)
    same = len(k.devices()) == 1 if wanted is None else k.sharding.is_equivalent_to(wanted, k.ndim)
    if not same:
        raise ValueError(
            f"cache: expected {wanted or 'one device'}, as the model, got {k.sharding}"
        )


def check_new(tokens: Array, cache: Cache, positions, mask) -> tuple[Array, Array | None]:
    """(positions (b, l), mask (b, l, l) or None) for tokens after those of the cache.

    Raises ValueError if their shapes or the number of texts do not fit, or the cache has no room:
    with a mask, for one token of each text that has any.
    """
    b, l = tokens.shape
    if b != len(cache.lengths):
        raise ValueError(f"tokens: the cache has {len(cache.lengths)} texts, got {b}")
    if positions is None:
        traced = isinstance(cache.lengths, jax.core.Tracer)
        lengths = cache.lengths if traced else np.asarray(cache.lengths)
        positions = lengths[:, None] + np.arange(l, dtype=np.int32)
    positions = integers("positions", positions, (b, l))
    if mask is None:
        check_room(cache, l)
        return positions, None
    mask = as_array("mask", mask)
    if mask.shape != (b, l, l) or mask.dtype != bool:
        raise ValueError(f"mask: expected booleans {(b, l, l)}, got {mask.dtype} {mask.shape}")
    # A token that does not see itself is padding.
    check_room(cache, mask.diagonal(axis1=1, axis2=2).any(axis=1))
    return positions, mask


def check_commit(cache: Cache, new: NewEntries, counts, select) -> tuple[Array, Array | None]:
    """(counts (b,), select (b, m) or None) for what `extend` returned.

    Raises TypeError unless `extend` can have returned `new` for such a cache, and ValueError if
    counts, indices or the number of texts do not fit, or the cache has no room.
    """
    arrays = jax.tree.leaves(new)
    heads = cache.k[0].shape[2:]
    fits = all(isinstance(x, Array) and x.ndim == 4 and x.shape[2:] == heads for x in arrays)
    if not fits or jax.tree.structure(new) != jax.tree.structure(cache.layers):
        raise TypeError(
            f"new: expected what extend returns, {len(cache.k)} layers of heads {heads}, "
            f"got {type(new).__name__} {new!r:.40}"
        )
    batch, most = new[0][0].shape[:2]
    if batch != len(cache.lengths):
        raise ValueError(f"new: the cache has {len(cache.lengths)} texts, got those of {batch}")
    if select is not None:
        select = integers("select", select, (batch, None), "indices", most - 1)
        most = select.shape[1]
    counts = np.full(batch, most) if counts is None else counts
    counts = integers("counts", counts, (batch,), "numbers of tokens", most)
    check_room(cache, counts)
    return counts.astype(np.int32), select


def check_room(cache: Cache, counts, name: str = "tokens") -> None:
    """Raise ValueError unless `counts` more tokens of each text fit."""
    if isinstance(cache.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
        return
    needed = int(np.max(np.asarray(cache.lengths) + np.asarray(counts)))
    if needed > cache.capacity:
        raise ValueError(f"{name}: {needed} tokens do not fit into a cache of {cache.capacity}")


def check_capacity(capacity, context: int) -> int:
    """`capacity` as an integer. Warns, at the line that called this package, if it is more than the
    model was trained on."""
    capacity = integer("capacity", capacity, 1)
    if capacity > context:
        level, frame = 1, sys._getframe()
        while frame.f_globals.get("__package__") == __package__:
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"capacity: the model was trained on texts of up to {context} tokens, and the cache "
            f"has room for {capacity}",
            stacklevel=level,
        )
    return capacity
