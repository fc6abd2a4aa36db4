"""A Llama's weights on the devices, read from a checkpoint one tensor at a time.

Each layer has arrays of its own, not slices of a stacked one, so a compiled step reads every weight
once, without a copy. Matrices are (out, in), as in the checkpoints: XLA:CPU multiplies them with
the activations of one token up to twice as fast as (in, out), and in half precision ten times as
fast. Matrices with the same input are joined, so a token takes four products in a layer.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from treeattn.checks import Array
from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.config import rotary_frequencies


class Layer(NamedTuple):
    """One layer's weights: d is the width, q and kv the heads' widths together, f the MLP's."""

    attention_norm: Float[Array, " d"]
    qkv: Float[Array, "q+2*kv d"]
    output: Float[Array, "d q"]
    mlp_norm: Float[Array, " d"]
    gate_up: Float[Array, "2*f d"]
    down: Float[Array, "d f"]
    # Biases, if the configuration has them.
    qkv_bias: Float[Array, " q+2*kv"] | None = None
    output_bias: Float[Array, " d"] | None = None
    gate_up_bias: Float[Array, " 2*f"] | None = None
    down_bias: Float[Array, " d"] | None = None


class Weights(NamedTuple):
    """embedding and head (vocabulary, d), the same array if tied; frequencies (head_dim / 2,)."""

    embedding: Float[Array, "vocabulary d"]
    layers: tuple[Layer, ...]
    norm: Float[Array, " d"]
    head: Float[Array, "vocabulary d"]
    frequencies: Float[Array, " half"]


# The parts of a checkpoint's layer that each field joins, one below the other.
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}


def load_weights(
    checkpoint: Checkpoint, put: Callable[[np.ndarray], jax.Array], dtype=None
) -> Weights:
    """The checkpoint's weights, each moved to the devices by `put`.

    dtype: None for the stored dtype of each weight, float32 if it is quantized. The embedding's
           dtype is also that of the activations and of the cache.

    Raises ValueError, with the tensor's name, for numbers that are not finite in this dtype.
    """
    expected = checkpoint.config.tensors()

    def read(*names: str) -> jax.Array:
        """The tensors, one below the other."""
        parts = [checkpoint.read(name) for name in names]
        kept = dtype or jnp.result_type(*parts)
        joined = _aligned_empty((sum(map(len, parts)), *parts[0].shape[1:]), kept)
        with np.errstate(over="ignore"):  # an overflow gives ∞, which is refused below
            np.concatenate(parts, out=joined, casting="unsafe")
        least, most = float(joined.min()), float(joined.max())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise ValueError(
                f"{checkpoint.path}: {names[0]}: expected finite numbers in {joined.dtype}, got "
                f"{least} to {most}"
            )
        return put(joined)

    def layer(i: int) -> Layer:
        fields = {}
        for field, parts in PARTS.items():
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                names = [f"model.layers.{i}.{part}.{kind}" for part in parts]
                if names[0] in expected:
                    fields[field + suffix] = read(*names)
        return Layer(**fields)

    tied = checkpoint.config.tied
    if tied and "lm_head.weight" in checkpoint.shapes:
        head, embedding = map(checkpoint.read, ("lm_head.weight", "model.embed_tokens.weight"))
        if not np.array_equal(head, embedding):
            raise ValueError(
                f"{checkpoint.path}: tie_word_embeddings: lm_head.weight is not the embedding"
            )
    # Reading a tensor takes memory for a moment, so the largest come first.
    embedding = read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        head=embedding if tied else read("lm_head.weight"),
        frequencies=put(_checked_frequencies(checkpoint)),
        norm=read("model.norm.weight"),
        layers=tuple(layer(i) for i in range(checkpoint.config.layers)),
    )


def move_weights(weights: Weights, put: Callable[[np.ndarray], jax.Array]) -> Weights:
    """The same weights, each moved by `put`; a tied head stays the embedding."""
    tied = weights.head is weights.embedding
    moved = jax.tree.map(lambda x: put(np.asarray(x)), weights)
    return moved._replace(head=moved.embedding) if tied else moved


def _checked_frequencies(checkpoint: Checkpoint) -> np.ndarray:
    """`rotary_frequencies`, divided by the checkpoint's factors.

    Raises ValueError unless each of them gives a finite angle in float32 at any position.
    """
    with np.errstate(all="ignore"):  # the result is checked below
        frequencies = rotary_frequencies(checkpoint.config)
        if checkpoint.rotary_factors is not None:
            frequencies = frequencies / checkpoint.rotary_factors.astype(np.float32)
    largest = np.abs(frequencies).max()
    if not largest < 1e28:
        raise ValueError(f"{checkpoint.path}: rotary frequencies: {largest} is no angle")
    return frequencies


def _aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialized array that starts at a multiple of 64 bytes.

    JAX on a CPU uses such memory as it is, so loading copies nothing, and simulated devices share
    one copy of the weights.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
