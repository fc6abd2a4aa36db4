"""A Llama's weights on the devices, read from a checkpoint one tensor at a time.

Each layer has its own arrays, rather than a slice of a stacked one: a compiled step then reads
every weight once, where it lies. Matrices are (out, in), as in the checkpoints: XLA:CPU multiplies
them with one token's activations up to twice as fast as (in, out), in half precision ten times.
Those that read the same input are one, so that a token costs four products a layer.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn_llama.int8 import Int8Matrix, quantize
from treeattn_llama.reading.checkpoint import Checkpoint
from treeattn_llama.reading.config import Config
from treeattn_llama.reading.guard import named


class Layer(NamedTuple):
    """One layer's weights: d the width, q and kv the heads' widths together, f the MLP's."""

    attention_norm: Float[Array, " d"]
    qkv: Float[Array, "q+2*kv d"] | Int8Matrix
    output: Float[Array, "d q"] | Int8Matrix
    mlp_norm: Float[Array, " d"]
    gate_up: Float[Array, "2*f d"] | Int8Matrix
    down: Float[Array, "d f"] | Int8Matrix
    # Biases, where the configuration has them.
    qkv_bias: Float[Array, " q+2*kv"] | None = None
    output_bias: Float[Array, " d"] | None = None
    gate_up_bias: Float[Array, " 2*f"] | None = None
    down_bias: Float[Array, " d"] | None = None


class Weights(NamedTuple):
    """embedding and head (vocabulary, d), the same array when tied; frequencies (head_dim / 2,)."""

    embedding: Float[Array, "vocabulary d"] | Int8Matrix
    layers: tuple[Layer, ...]
    norm: Float[Array, " d"]
    head: Float[Array, "vocabulary d"] | Int8Matrix
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
MATRICES = ("embedding", "head", *_PRODUCTS)
LAYER_TENSORS["attention_norm"] = ["input_layernorm.weight"]
LAYER_TENSORS["mlp_norm"] = ["post_attention_layernorm.weight"]


def load_weights(
    checkpoint: Checkpoint,
    put: Callable[[np.ndarray, str], jax.Array],
    dtype=None,
    meanwhile: Callable[[Weights], None] = lambda first: None,
    int8: bool = False,
) -> Weights:
    """The checkpoint's weights, on the devices where `put` puts each.

    Each keeps the dtype it is stored in (quantized ones become float32) unless `dtype` is given.
    The embedding's is that of the activations, and of the cache.
    put:       from a weight and its field's name in `Layer` or `Weights` to the array on devices
    meanwhile: called, in a thread, with the weights of a model of the first layer only
    int8:      whether matrices, the embedding included, become `Int8Matrix`
    """
    config = checkpoint.config
    expected = config.tensors()

    def read(field: str, *names: str) -> jax.Array | Int8Matrix:
        """The tensors, one below the other."""
        parts = [checkpoint.read(name) for name in names]
        kept = dtype or functools.reduce(jnp.promote_types, (x.dtype for x in parts))
        joined = aligned_empty((sum(map(len, parts)), *parts[0].shape[1:]), kept)
        joined = np.concatenate(parts, out=joined, casting="unsafe")
        if not int8 or field not in MATRICES:
            return put(joined, field)
        with named(f"{checkpoint.path}: {names[0]}"):
            return map_parts(put, Int8Matrix(*map(aligned, quantize(joined))), field)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        arrays = {
            field: read(field, *(f"{at}.{name}" for name in names))
            for field, names in LAYER_TENSORS.items()
            if f"{at}.{names[0]}" in expected
        }
        return Layer(**arrays)

    # The largest first: what reading a tensor takes for a moment is then never on top of all.
    embedding = read("embedding", "model.embed_tokens.weight")
    head = embedding if config.tied else read("head", "lm_head.weight")
    frequencies = _checked_frequencies(checkpoint)
    first = Weights(
        embedding=embedding,
        layers=(layer(0),),
        norm=read("norm", "model.norm.weight"),
        head=head,
        frequencies=put(frequencies, "frequencies"),
    )
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(meanwhile, first)
        layers = (*first.layers, *map(layer, range(1, config.layers)))
        running.result()
    return first._replace(layers=layers)


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


def map_parts(f: Callable, x, field: str):
    """f(weight, its field's name), or that of both parts of an `Int8Matrix`: the scale of "qkv" is
    called "qkv_scale"."""
    if isinstance(x, Int8Matrix):
        return Int8Matrix(f(x.rows, field), f(x.scale, f"{field}_scale"))
    return f(x, field)


def map_fields(f: Callable[[jax.Array, str], jax.Array], weights: Weights, tied: bool) -> Weights:
    """`map_parts` of each of them; of a tied head and embedding once."""

    def mapped(fields) -> dict:
        items = fields._asdict().items()
        return {
            name: map_parts(f, x, name) for name, x in items if x is not None and name != "layers"
        }

    layers = tuple(Layer(**mapped(layer)) for layer in weights.layers)
    if tied:
        ours = mapped(weights._replace(head=None))
        return Weights(**ours, head=ours["embedding"], layers=layers)
    return Weights(**mapped(weights), layers=layers)


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialized array that starts at a multiple of 64 bytes.

    JAX on a CPU uses such memory as it is: loading copies nothing, and simulated devices share
    one copy of the weights.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def aligned(x: np.ndarray) -> np.ndarray:
    """The same numbers in such memory."""
    copy = aligned_empty(x.shape, x.dtype)
    copy[...] = x
    return copy


def put_whole(x: np.ndarray, field: str, mesh: Mesh | None) -> jax.Array:
    """A weight of that name on every device of the mesh, or on the default device."""
    del field  # all of them alike
    return place(x, mesh)


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
