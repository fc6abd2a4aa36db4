"""A Llama's weights on the devices, read from a checkpoint one tensor at a time.

Each layer has its own arrays, rather than a slice of a stacked one: a compiled step then reads
every weight once, where it lies. Matrices are (out, in), as in the checkpoints: XLA:CPU multiplies
them with one token's activations up to twice as fast as (in, out), in half precision ten times.
Those that read the same input are one, so that a token costs four products a layer.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from treeattn_llama.arguments import Array
from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.config import rotary_frequencies


class Layer(NamedTuple):
    """One layer's weights: d the width, q and kv the heads' widths together, f the MLP's."""

    attention_norm: Float[Array, " d"]
    qkv: Float[Array, "q+2*kv d"]
    output: Float[Array, "d q"]
    mlp_norm: Float[Array, " d"]
    gate_up: Float[Array, "2*f d"]
    down: Float[Array, "d f"]
    # Biases, where the configuration has them.
    qkv_bias: Float[Array, " q+2*kv"] | None = None
    output_bias: Float[Array, " d"] | None = None
    gate_up_bias: Float[Array, " 2*f"] | None = None
    down_bias: Float[Array, " d"] | None = None


class Weights(NamedTuple):
    """embedding and head (vocabulary, d), the same array when tied; frequencies (head_dim / 2,)."""

    embedding: Float[Array, "vocabulary d"]
    layers: tuple[Layer, ...]
    norm: Float[Array, " d"]
    head: Float[Array, "vocabulary d"]
    frequencies: Float[Array, " half"]


# The tensors of a layer that each field holds, one below the other, after "model.layers.3.".
_PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LAYER_TENSORS = {field: [f"{name}.weight" for name in names] for field, names in _PRODUCTS.items()}
LAYER_TENSORS |= {
    f"{field}_bias": [f"{name}.bias" for name in names] for field, names in _PRODUCTS.items()
}
LAYER_TENSORS["attention_norm"] = ["input_layernorm.weight"]
LAYER_TENSORS["mlp_norm"] = ["post_attention_layernorm.weight"]


def load_weights(
    checkpoint: Checkpoint, put: Callable[[np.ndarray], jax.Array], dtype=None
) -> Weights:
    """The checkpoint's weights, on the devices where `put` puts each.

    Each keeps the dtype it is stored in (quantized ones become float32) unless `dtype` is given.
    The embedding's is that of the activations, and of the cache.
    """
    expected = checkpoint.config.tensors()

    def read(*names: str) -> jax.Array:
        """The tensors, one below the other."""
        parts = [checkpoint.read(name) for name in names]
        kept = dtype or functools.reduce(jnp.promote_types, (x.dtype for x in parts))
        joined = _aligned_empty((sum(map(len, parts)), *parts[0].shape[1:]), kept)
        with np.errstate(over="ignore"):  # what comes of it is looked at
            np.concatenate(parts, out=joined, casting="unsafe")
        least, most = float(joined.min()), float(joined.max())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise ValueError(
                f"{checkpoint.path}: {names[0]}: expected finite numbers in {joined.dtype}, got "
                f"{least} to {most}"
            )
        return put(joined)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        return Layer(
            **{
                field: read(*(f"{at}.{name}" for name in names))
                for field, names in LAYER_TENSORS.items()
                if f"{at}.{names[0]}" in expected
            }
        )

    tied = checkpoint.config.tied
    if tied and "lm_head.weight" in checkpoint.shapes:
        head, embedding = map(checkpoint.read, ("lm_head.weight", "model.embed_tokens.weight"))
        if not np.array_equal(head, embedding):
            raise ValueError(
                f"{checkpoint.path}: tie_word_embeddings: lm_head.weight is not the embedding"
            )
    # The largest first: what reading a tensor takes for a moment is then never on top of all.
    embedding = read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        head=embedding if tied else read("lm_head.weight"),
        frequencies=put(_checked_frequencies(checkpoint)),
        norm=read("model.norm.weight"),
        layers=tuple(layer(i) for i in range(checkpoint.config.layers)),
    )


def move_weights(weights: Weights, put: Callable[[np.ndarray], jax.Array]) -> Weights:
    """The same weights where `put` puts them; a tied head stays the embedding."""
    tied = weights.head is weights.embedding
    moved = jax.tree.map(lambda x: put(np.asarray(x)), weights._replace(head=()))
    return moved._replace(head=moved.embedding if tied else put(np.asarray(weights.head)))


def _checked_frequencies(checkpoint: Checkpoint) -> np.ndarray:
    """`rotary_frequencies`, divided by the checkpoint's factors; a ValueError unless angles."""
    with np.errstate(all="ignore"):  # what comes of it is looked at
        frequencies = rotary_frequencies(checkpoint.config)
        if checkpoint.rotary_factors is not None:
            frequencies = frequencies / checkpoint.rotary_factors.astype(np.float32)
    if not (np.abs(frequencies) < 1e28).all():  # times any position, that is a float32
        largest = np.abs(frequencies).max()
        raise ValueError(f"{checkpoint.path}: rotary frequencies: {largest} is no angle")
    return frequencies


def _aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialized array that starts at a multiple of 64 bytes.

    JAX on a CPU uses such memory as it is: loading copies nothing, and simulated devices share
    one copy of the weights.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
