"""What a Llama's calls take: arguments checked before any work, by errors that name them.

Arrays that are being traced pass: their values are not known.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from treeattn.idea.arrays import Array, as_array, integer
from treeattn.kernel.quantized import LARGEST, NAMES
from treeattn_llama.cache import Cache, NewEntries, Quantized
from treeattn_llama.int8 import Int8Matrix
from treeattn_llama.placement import Placement, check_texts

# A text's token ids, and those of several texts: lists of whole numbers, or arrays.
Prompt = Sequence[SupportsIndex] | Array
Prompts = Sequence[Prompt] | Array


def check_mesh(mesh: Mesh | None, shard_weights: bool = False) -> None:
    """Raise a TypeError unless `mesh` is one, or None, and a ValueError where there is none to
    shard weights over."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh or None, got {mesh!r:.80}")
    if not isinstance(shard_weights, bool):
        raise TypeError(f"shard_weights: expected True or False, got {shard_weights!r}")
    if shard_weights and mesh is None:
        raise ValueError("shard_weights: expected a mesh to shard them over, got none")


def check_hashable(**functions) -> None:
    """Raise a TypeError that names the first that JAX could not compile a program for."""
    for name, x in functions.items():
        try:
            hash(x)
        except TypeError:
            kind = type(x).__name__
            raise TypeError(f"{name}: expected a name or a hashable function, got {kind}") from None


def warn_of_capacity(capacity: int, context: int) -> int:
    """`capacity` as an integer; a warning where it is more than a model was trained on."""
    capacity = integer("capacity", capacity, 1)
    if capacity > context:
        trained = f"the model was trained on texts of up to {context} tokens"
        warnings.warn(f"capacity: {trained}, got {capacity}", stacklevel=3)
    return capacity


def check_exact(model) -> None:
    """Raise a TypeError unless `model.exact` is a bool; a ValueError unless all else allows for it
    where it is True, and where it is not, for an implementation "exact"."""
    if not isinstance(model.exact, bool):
        raise TypeError(f"exact: expected True or False, got {model.exact!r:.40}")
    if not model.exact:
        by_ring = model.mesh is not None and model.prefill_with in (None, "ring")
        if by_ring and model.implementation == "exact":
            raise ValueError(
                "implementation: a ring's states are rounded before they merge, so 'exact' sums "
                "there would have other bits on other meshes; take exact=True, whose weights are "
                'in int8, or prefill_with="chunks" or "ulysses"'
            )
        return
    if not isinstance(model.weights.embedding, Int8Matrix):
        raise ValueError('exact: expected weights="int8", whose products are exact')
    if model.shard_weights:
        raise ValueError("shard_weights: an exact model has its weights whole on every device")
    only = {
        "attention": ("tree",),
        "prefill_with": (None, "chunks"),
        "implementation": (None, "exact"),
        "wire": (None,),
        "cache_dtype": (None,),
    }
    for name, allowed in only.items():
        if (came := getattr(model, name)) not in allowed:
            raise ValueError(f"{name}: an exact model takes one of {allowed}, got {came!r:.40}")


def check_cache_dtype(model) -> None:
    """Raise a ValueError unless `model.cache_dtype` is None, or one of 8 bits which all else of the
    model takes."""
    if model.cache_dtype is None:
        return
    try:
        known = jnp.dtype(model.cache_dtype) in LARGEST
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"cache_dtype: expected {NAMES}, or None, got {model.cache_dtype!r:.40}")
    if callable(model.attention) or model.attention == "exact":
        raise ValueError(f"attention: {model.attention!r:.40} takes no cache_dtype")
    if model.implementation not in (None, "blockwise"):
        came = f"{model.implementation!r:.40} takes no cache_dtype"
        raise ValueError(f"implementation: {came}; use 'blockwise' or None")


WEIGHTS = ("float32", "int8")


def check_weights(weights: str, dtype: np.dtype | None) -> np.dtype | None:
    """The dtype of weights that `Llama.load` names so; a ValueError unless both are possible."""
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ValueError(f"weights: expected one of {WEIGHTS}, got {weights!r:.40}")
    if weights == "float32":
        return dtype
    if dtype is not None and dtype != np.float32:
        raise ValueError(f"dtype: weights in int8 are computed with in float32, got {dtype}")
    return np.dtype(np.float32)


def floating_dtype(dtype) -> np.dtype | None:
    """`dtype` of a model, or None; a TypeError unless it is a float of 16 bits or more."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise TypeError(f"dtype: expected a floating-point one of 16 bits or more, got {dtype!r}")
    return found


def stop_ids(stop: Iterable[SupportsIndex] | None, default: frozenset[int]) -> frozenset[int]:
    """The token ids after which a text is over: `stop`, whole numbers; `default` for None."""
    if stop is None:
        return default
    try:
        tokens = list(stop)
    except TypeError:  # no numbers, or an array that is only one
        raise TypeError(f"stop: expected token ids, as [2], or None, got {stop!r:.40}") from None
    return frozenset(integer("stop", token) for token in tokens)


def integers(name: str, x, shape: tuple, what: str = "", top: int | None = None) -> Array:
    """`x` as an array of integers of that shape (None for any number), from 0 to `top`."""
    x = as_array(name, x)
    fits = x.ndim == len(shape) and all(m in (None, n) for n, m in zip(x.shape, shape, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        expected = str(shape).replace("None", "any")
        raise ValueError(f"{name}: expected integers {expected} in shape, got {x.dtype} {x.shape}")
    if top is not None and x.size and not isinstance(x, jax.core.Tracer):
        low = int(np.min(x))
        high = int(np.max(x))
        if low < 0 or high > top:
            got = low if low < 0 else high
            raise ValueError(f"{name}: expected {what} from 0 to {top}, got {got}")
    return x


def check_tokens(tokens, vocabulary: int, place: Placement) -> Array:
    """`tokens` as an array (b, l) of ids, of as many texts as the devices can share."""
    tokens = integers("tokens", tokens, (None, None), "ids", vocabulary - 1)
    check_texts("tokens", place, tokens.shape[0])
    return tokens


def prompt_lists(prompts: Prompts) -> list[list[int]]:
    """The prompts as lists of ints, whatever they came as: lists or arrays, NumPy's or JAX's.

    Raises a TypeError for what is no sequence, and a ValueError for one that does not hold lists
    of whole numbers, none of them empty.
    """
    try:
        rows = [as_array("prompts", prompts[i]) for i in range(len(prompts))]
    except (TypeError, KeyError):  # no length, no order, ragged rows
        raise TypeError(
            f"prompts: expected lists of token ids, got {type(prompts).__name__} {prompts!s:.40}"
        ) from None
    lengths = [len(row) if row.ndim == 1 else 0 for row in rows]
    if not rows or not all(lengths):
        raise ValueError(
            f"prompts: expected lists of token ids, none of them empty, got lengths {lengths} of "
            f"{prompts!s:.40}"
        )
    return [integers("prompts", row, (None,)).tolist() for row in rows]


def prompt_lengths(prompts: Prompts, batch: int | None = None) -> np.ndarray:
    """The lengths (batch,) of as many prompts, or (None) of any number of them."""
    lengths = [len(prompt) for prompt in prompt_lists(prompts)]
    if batch not in (None, len(lengths)):
        raise ValueError(f"prompts: expected {batch}, got {len(lengths)} of lengths {lengths}")
    return np.array(lengths, np.int32)


def check_prompts(
    prompts: Prompts, cache: Cache, vocabulary: int
) -> tuple[list[list[int]], np.ndarray]:
    """The prompts as lists, and their lengths (batch,), for all of which the cache has room."""
    prompts = prompt_lists(prompts)
    lengths = prompt_lengths(prompts, len(cache.lengths))
    for prompt in prompts:
        integers("prompts", prompt, (None,), "ids", vocabulary - 1)
    check_room(cache, lengths, "prompts")
    return prompts, lengths


def check_cache(cache: Cache, model) -> None:
    """Raise a TypeError or ValueError unless `cache` is one of such a model."""
    config = model.config
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: expected a Cache, as new_cache makes it, got {cache!r:.40}")
    came = len(cache.k), *cache.k[0].shape[2:]
    expected = config.layers, config.kv_heads, config.head_dim
    if came != expected:
        shape = "layers, key heads and a head_dim of"
        raise ValueError(f"cache: expected {shape} {expected}, as the model has, got {came}")
    came = cache.k[0].dtype
    quantized = came if isinstance(cache.k[0], Quantized) else None
    if quantized != (model.cache_dtype and jnp.dtype(model.cache_dtype)):
        raise ValueError(f"cache: the model has cache_dtype={model.cache_dtype!r}, got {came}")


def check_commit(cache: Cache, new: NewEntries, counts, select) -> tuple[Array, Array | None]:
    """(counts, select) as arrays, if they fit each other, the cache, and `new`: a TypeError unless
    that is what `extend` returned for such a cache."""
    if not isinstance(new, tuple) or len(new) != len(cache.k):
        kind = f"a tuple of {len(cache.k)} layers, as extend returns it"
        raise TypeError(f"new: expected {kind}, got {type(new).__name__} {new!r:.40}")
    batch = new[0][0].shape[0]
    if batch != len(cache.lengths):
        raise ValueError(f"new: the cache has {len(cache.lengths)} texts, got those of {batch}")
    most = new[0][0].shape[1]
    if select is not None:
        select = integers("select", select, (batch, None), "indices", most - 1)
        most = select.shape[1]
    return check_counts(counts, most, cache), select


def check_counts(counts, most: int, cache: Cache) -> Array:
    """`counts` as an array (batch,), `most` of each text when None; the cache has room for them."""
    batch = len(cache.lengths)
    counts = np.full(batch, most) if counts is None else counts
    counts = integers("counts", counts, (batch,), "numbers of tokens", most)
    check_room(cache, counts)
    return counts.astype(np.int32)


def check_room(cache: Cache, counts, name: str = "tokens") -> None:
    """Raise a ValueError unless `counts` more tokens of each text fit."""
    if isinstance(cache.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
        return
    needed = int(np.max(np.asarray(cache.lengths) + np.asarray(counts)))
    if needed > cache.capacity:
        raise ValueError(f"{name}: {needed} tokens do not fit into a cache of {cache.capacity}")


def check_room_for_one(cache: Cache, mask) -> None:
    """Raise a ValueError unless one more token fits, of each text that has one under this mask."""
    mask = as_array("mask", mask)
    if mask.ndim != 3 or isinstance(mask, jax.core.Tracer):
        return  # `check_new` says what is wrong with it
    real = mask.diagonal(axis1=1, axis2=2)  # padding sees nothing, not even itself
    check_room(cache, np.asarray(real).any(axis=1))


def check_new(tokens: Array, cache: Cache, positions, mask) -> tuple[Array | None, Array | None]:
    """(positions, mask) as arrays, if they and the tokens fit each other and the cache."""
    b, l = tokens.shape
    if b != len(cache.lengths):
        raise ValueError(f"tokens: the cache has {len(cache.lengths)} texts, got {b} rows")
    if positions is not None:
        positions = integers("positions", positions, (b, l))
    if mask is not None:
        mask = as_array("mask", mask)
        if mask.shape not in ((b, l, l), (1, l, l)) or mask.dtype != bool:
            raise ValueError(f"mask: expected booleans {(b, l, l)}, got {mask.dtype} {mask.shape}")
    return positions, mask


def pad_prompts(prompts: Sequence[Sequence[int]], multiple: int) -> np.ndarray:
    """The prompts as rows (batch, n) int32, filled up with zeros to a multiple: [[5, 7, 8]] of 4
    becomes [[5, 7, 8, 0]]."""
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), multiple * -(-longest // multiple)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens


def options_of(model) -> list[str]:
    """How a model is shown: "name=value" of all but its weights, of which it says the dtype."""
    fields = (f.name for f in dataclasses.fields(model))
    shown = [name for name in fields if name not in ("weights", "tokenizer")]
    said = [f"{name}={getattr(model, name)!r}" for name in shown]
    said.append(f"dtype={model.weights.embedding.dtype}")
    if isinstance(model.weights.embedding, Int8Matrix):
        said.append("weights='int8'")
    return said
