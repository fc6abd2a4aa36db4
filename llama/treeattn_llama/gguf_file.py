"""GGUF files: other names than Hugging Face's, another order of rows, the metadata inside."""

import dataclasses
import functools
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np

from treeattn_llama.arguments import number
from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.config import (
    NAMES,
    Config,
    LinearScaling,
    Llama3Scaling,
    read_config,
    rotary_scaling,
)
from treeattn_llama.gguf_tokenizer import from_gguf
from treeattn_llama.guard import named

# What is read as it is stored; quantized tensors are read as float32.
DTYPES = {
    gguf.GGMLQuantizationType.F64: np.float64,
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.BF16: jnp.bfloat16,
}


class _Reader(gguf.GGUFReader):
    """gguf's own, over a plain array: slicing a memory map costs four times as much, and reading
    a tokenizer slices 250,000 times (0.8 seconds instead of 2.9)."""

    @property
    def data(self) -> np.ndarray:
        """The bytes of the file."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._bytes = np.asarray(mapped)

    def _get(self, offset, dtype, count=1, *order, **named_order):
        """As gguf has it, but what lies beyond the end of the file is an error: a list of 2⁴⁰
        bytes would be read without an end."""
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"expected {end} bytes or more, got {len(self.data)}")
        return super()._get(offset, dtype, count, *order, **named_order)


def hugging_face_names(config: Config, tensors: int) -> dict[str, str]:
    """Hugging Face's name of each tensor of such a model, by GGUF's, as the library gguf has them.

    blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. No more layers are named than
    the file has tensors, whatever it says.
    """
    config = dataclasses.replace(config, layers=max(min(config.layers, tensors), 1))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    suffixes = (".weight", ".bias")
    return {names.get_name(name, suffixes): name for name in config.tensors()}


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint of a GGUF file."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file")
    with named(path, "truncated or corrupt GGUF file"):
        reader = _Reader(path)
        if reader.byte_order == "S":
            raise ValueError("expected numbers in little-endian order, got big-endian ones")
        fields = {name: functools.cache(field.contents) for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in stored.items()}
    with named(path, "metadata"):
        config = gguf_config(fields, shapes)
    names = hugging_face_names(config, len(stored))
    tensors = {names.get(name, name): tensor for name, tensor in stored.items()}
    shapes = {names.get(name, name): shape for name, shape in shapes.items()}

    def read(name: str) -> np.ndarray:
        with named(f"{path}: {tensors[name].name}"):
            x = _numbers(tensors[name]).reshape(shapes[name])
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                # GGUF has a head's rows as rotary pairs (0, 1), (2, 3), …; they become two halves.
                x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(shapes[name])
        return x

    factors = read("rope_freqs.weight") if "rope_freqs.weight" in shapes else None
    return Checkpoint(path, config, from_gguf(fields, path), shapes, read, factors)


def _numbers(tensor: gguf.ReaderTensor) -> np.ndarray:
    """What a tensor holds, in the dtype it is stored in, or in float32 if it is quantized."""
    if dtype := DTYPES.get(tensor.tensor_type):
        return tensor.data.view(dtype)
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"stored as {tensor.tensor_type.name}, unknown to gguf") from None


def gguf_config(fields: dict, shapes: dict) -> Config:
    """The `Config` that a file's metadata says; ValueError when it is not a Llama's.

    shapes: of its tensors, by GGUF's names
    """

    def get(name):
        return fields[name]() if name in fields else None

    kind = get("general.architecture")
    if kind != "llama":
        raise ValueError(f"expected architecture 'llama', got {kind!r:.40}")
    if experts := get("llama.expert_count"):
        raise ValueError(f"llama.expert_count: a mixture of {experts!r:.40} is not a Llama")
    given = {"tied": "output.weight" not in shapes, "attention_bias": "blk.0.attn_q.bias" in shapes}
    given["rotary_scaling"] = _scaling(get)
    if embedding := shapes.get("token_embd.weight"):
        given["vocabulary"] = embedding[0]
    names = {field: f"llama.{name}" for field, (_, name) in NAMES.items()}
    config = read_config(names, get, **given)
    rotated = get("llama.rope.dimension_count")
    if rotated not in (None, config.head_dim) or isinstance(rotated, bool):
        all_of_it = f"{config.head_dim}, all of each head"
        raise ValueError(f"llama.rope.dimension_count: expected {all_of_it}, got {rotated!r:.40}")
    return config


def _scaling(get) -> LinearScaling | Llama3Scaling | None:
    """What the metadata says. (Llama 3's factors are a tensor in GGUF files, `rope_freqs`.)

    As in llama.cpp a factor without a type is a linear one, and has an older name.
    """
    names = ("llama.rope.scaling.factor", "llama.rope.scale_linear")
    factors = {name: get(name) for name in names if get(name) is not None}
    kind = get("llama.rope.scaling.type")
    if kind is None and factors:
        kind = "linear"
    if kind is None or kind == "none":
        return None
    fields = {"rope_type": kind}
    if kind == "linear":
        if not factors:
            raise ValueError(f"lacks {names[0]}")
        name, factor = next(iter(factors.items()))
        fields["factor"] = number(name, factor, 0)
    return rotary_scaling(fields)
