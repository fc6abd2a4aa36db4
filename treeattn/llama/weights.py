"""A Llama's weights on the devices, read from a checkpoint one tensor at a time.

Each layer has its own arrays, rather than a slice of a stacked one: a compiled step then reads
every weight once, where it lies. Matrices are (out, in), as in the checkpoints: XLA:CPU multiplies
them with one token's activations up to twice as fast as (in, out), in half precision ten times.
Those that read the same input are one, so that a token costs four products a layer.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn.llama.checkpoint import Checkpoint
from treeattn.llama.config import Config


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


def load_weights(checkpoint: Checkpoint, mesh: Mesh | None, dtype=None) -> Weights:
    """The checkpoint's weights, on every device of the mesh (None: on the default device).

    Each keeps the dtype it is stored in (quantized ones become float32) unless `dtype` is given.
    The embedding's is that of the activations, and of the cache.
    """
    config = checkpoint.config

    def read(*names: str) -> jax.Array:
        """The tensors, one below the other."""
        parts = [checkpoint.read(name) for name in names]
        kept = dtype or functools.reduce(jnp.promote_types, (x.dtype for x in parts))
        joined = aligned_empty((sum(map(len, parts)), *parts[0].shape[1:]), kept)
        return place(np.concatenate(parts, out=joined, casting="unsafe"), mesh)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}."
        attention, mlp = at + "self_attn.", at + "mlp."
        parts = {
            "qkv": [f"{attention}{x}_proj" for x in "qkv"],
            "output": [f"{attention}o_proj"],
            "gate_up": [f"{mlp}gate_proj", f"{mlp}up_proj"],
            "down": [f"{mlp}down_proj"],
        }
        arrays = {part: read(*(f"{n}.weight" for n in names)) for part, names in parts.items()}
        for part, names in parts.items():
            if f"{names[0]}.bias" in config.tensors():
                arrays[f"{part}_bias"] = read(*(f"{n}.bias" for n in names))
        return Layer(
            attention_norm=read(at + "input_layernorm.weight"),
            mlp_norm=read(at + "post_attention_layernorm.weight"),
            **arrays,
        )

    # The largest first: what reading a tensor takes for a moment is then never on top of all.
    embedding = read("model.embed_tokens.weight")
    head = embedding if config.tied else read("lm_head.weight")
    frequencies = rotary_frequencies(config)
    if checkpoint.rotary_factors is not None:
        frequencies = frequencies / checkpoint.rotary_factors.astype(np.float32)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.layers)),
        norm=read("model.norm.weight"),
        head=head,
        frequencies=place(frequencies, mesh),
    )


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialized array that starts at a multiple of 64 bytes.

    JAX on a CPU uses such memory as it is: loading copies nothing, and simulated devices share
    one copy of the weights.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def place(x: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """`x` on every device of the mesh, or on the default device."""
    if mesh is None:
        return jax.device_put(x)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])


def rotary_frequencies(config: Config) -> np.ndarray:
    """The angle by which each rotary pair turns a position (head_dim / 2,), float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1 / np.float32(config.rotary_base) ** exponents).astype(np.float32)
    if config.rotary_scaling is not None:
        frequencies = config.rotary_scaling.apply(frequencies)
    return frequencies.astype(np.float32)
