"""A Llama's weights on the devices, read from a checkpoint one tensor at a time.

Each layer has its own arrays, rather than a slice of a stacked one: a compiled step then reads
every weight once, where it lies. Matrices are (out, in), as in the checkpoints: XLA:CPU multiplies
them with one token's activations up to twice as fast as (in, out), in half precision ten times.
Those that read the same input are one, so that a token costs four products a layer.
"""

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn.llama.reading.checkpoint import Checkpoint
from treeattn.llama.reading.config import Config


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


# The axis of a weight that is dealt over all devices of a mesh when weights are sharded; those not
# named here are whole on every device. Rows of zeros fill up what the devices do not divide.
SHARDED_AXIS = {
    "embedding": 0,  # the vocabulary
    "head": 0,
    "qkv": 0,  # queries, keys and values one below the other, wherever a head ends
    "qkv_bias": 0,
    "output": 1,  # heads, ⌈h/p⌉ to a device, as a merge scatters them
    "gate_up": 0,  # the MLP's width: each device's rows of the gate, then its own of "up"
    "gate_up_bias": 0,
    "down": 1,
}


def load_weights(
    checkpoint: Checkpoint, mesh: Mesh | None, dtype=None, sharded: bool = False,
    meanwhile=lambda first: None,
) -> Weights:  # fmt: skip
    """The checkpoint's weights, on every device of the mesh (None: on the default device), or
    sharded over its devices (`SHARDED_AXIS`).

    Each keeps the dtype it is stored in (quantized ones become float32) unless `dtype` is given.
    The embedding's is that of the activations, and of the cache.
    meanwhile: called, in a thread, with the weights of a model of the first layer only
    """
    config = checkpoint.config

    def read(field: str, *names: str) -> jax.Array:
        """The tensors, one below the other."""
        parts = [checkpoint.read(name) for name in names]
        kept = dtype or functools.reduce(jnp.promote_types, (x.dtype for x in parts))
        joined = aligned_empty((sum(map(len, parts)), *parts[0].shape[1:]), kept)
        joined = np.concatenate(parts, out=joined, casting="unsafe")
        return place_field(joined, field, config, mesh, sharded)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}."
        attention, mlp = at + "self_attn.", at + "mlp."
        parts = {
            "qkv": [f"{attention}{x}_proj" for x in "qkv"],
            "output": [f"{attention}o_proj"],
            "gate_up": [f"{mlp}gate_proj", f"{mlp}up_proj"],
            "down": [f"{mlp}down_proj"],
        }
        arrays = {}
        for part, names in parts.items():
            arrays[part] = read(part, *(f"{n}.weight" for n in names))
            if f"{names[0]}.bias" in config.tensors():
                arrays[f"{part}_bias"] = read(f"{part}_bias", *(f"{n}.bias" for n in names))
        return Layer(
            attention_norm=read("attention_norm", at + "input_layernorm.weight"),
            mlp_norm=read("mlp_norm", at + "post_attention_layernorm.weight"),
            **arrays,
        )

    # The largest first: what reading a tensor takes for a moment is then never on top of all.
    embedding = read("embedding", "model.embed_tokens.weight")
    head = embedding if config.tied else read("head", "lm_head.weight")
    with np.errstate(all="ignore"):  # what comes of it is looked at
        frequencies = rotary_frequencies(config)
        if checkpoint.rotary_factors is not None:
            frequencies = frequencies / checkpoint.rotary_factors.astype(np.float32)
    if not (np.abs(frequencies) < 1e28).all():  # times any position, that is a float32
        largest = np.abs(frequencies).max()
        raise ValueError(f"{checkpoint.path}: rotary frequencies: {largest} is no angle")
    norm, frequencies = read("norm", "model.norm.weight"), place(frequencies, mesh)
    first = Weights(embedding, (layer(0),), norm, head, frequencies)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(meanwhile, first)
        layers = (*first.layers, *map(layer, range(1, config.layers)))
        running.result()
    return first._replace(layers=layers)


def field_spec(field: str, axes: tuple[str, ...]) -> PartitionSpec:
    """How a sharded weight of that name lies over the axes."""
    axis = SHARDED_AXIS.get(field)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, axes)


def layer_specs(layer: Layer, axes: tuple[str, ...]) -> Layer:
    """How each of a layer's sharded weights lies over the axes."""
    return Layer(
        **{f: None if x is None else field_spec(f, axes) for f, x in layer._asdict().items()}
    )


def move_weights(
    weights: Weights, config: Config, mesh: Mesh | None, sharded: bool, dealt: int
) -> Weights:
    """The same weights elsewhere, dealt over so many devices before (1: whole).

    On a CPU, whole ones stay where they are, shared.
    """

    def moved(fields):
        return {
            field: None
            if x is None
            else place_field(np.asarray(x), field, config, mesh, sharded, dealt)
            for field, x in fields._asdict().items()
            if field != "layers"
        }

    layers = tuple(Layer(**moved(layer)) for layer in weights.layers)
    elsewhere = Weights(**moved(weights), layers=layers)
    return elsewhere._replace(head=elsewhere.embedding) if config.tied else elsewhere


def place_field(
    x: np.ndarray, field: str, config: Config, mesh: Mesh | None, sharded: bool, dealt: int = 1
) -> jax.Array:
    """A weight of that name where it belongs: whole, or cut along its `SHARDED_AXIS`.

    x may be filled up for, and dealt over, another number of devices.
    """
    axis = SHARDED_AXIS.get(field)
    if axis is None:
        return place(x, mesh)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    real = {"embedding": config.vocabulary, "head": config.vocabulary, "output": q}
    size = real.get(field, q + 2 * kv if field.startswith("qkv") else config.mlp_width)
    paired = field.startswith("gate_up")
    x, axis = (halves(x, dealt), 1) if paired else (x, axis)
    x = x.take(range(size), axis) if x.shape[axis] > size else x
    p = mesh.size if sharded and mesh is not None else 1
    if p > 1:
        unit = config.head_dim if field == "output" else 1
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -size % (unit * p))
        x = np.pad(x, widths)
    if paired:
        x = x.reshape(2, p, -1, *x.shape[2:]).swapaxes(0, 1).reshape(-1, *x.shape[2:])
    return place(x, mesh, field_spec(field, mesh.axis_names) if p > 1 else PartitionSpec())


def halves(x, p: int):
    """(2, f, …): the gate's rows and those of "up", of (2·f, …) as p devices hold them."""
    return x.reshape(p, 2, -1, *x.shape[1:]).swapaxes(0, 1).reshape(2, -1, *x.shape[1:])


def together_again(w: Layer, p: int) -> Layer:
    """A layer's weights that were dealt over p devices and are whole again, in their own order."""
    bias = w.gate_up_bias
    return w._replace(
        gate_up=halves(w.gate_up, p).reshape(w.gate_up.shape),
        gate_up_bias=None if bias is None else halves(bias, p).reshape(bias.shape),
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


def place(x: np.ndarray, mesh: Mesh | None, spec=PartitionSpec()) -> jax.Array:  # noqa: B008
    """`x` on every device of the mesh, or as `spec` says, or on the default device."""
    if mesh is None:
        return jax.device_put(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def rotary_frequencies(config: Config) -> np.ndarray:
    """The angle by which each rotary pair turns a position (head_dim / 2,), float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1 / np.float32(config.rotary_base) ** exponents).astype(np.float32)
    if config.rotary_scaling is not None:
        frequencies = config.rotary_scaling.apply(frequencies)
    return frequencies.astype(np.float32)
