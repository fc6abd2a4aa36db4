"""GGUF files: other names than Hugging Face's, another order of rows, the metadata inside."""

import dataclasses
import functools
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np

from treeattn.idea.arrays import integer, number
from treeattn_llama.reading.checkpoint import Checkpoint
from treeattn_llama.reading.config import Config, rotary_scaling
from treeattn_llama.reading.gguf_tokenizer import from_gguf
from treeattn_llama.reading.guard import named

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
        fields = {name: functools.cache(field.contents) for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in stored.items()}
    config = gguf_config(fields, shapes, path)
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


def gguf_config(fields: dict, shapes: dict, path: Path) -> Config:
    """The `Config` that a GGUF file's metadata says; ValueError when it is not a Llama's.

    shapes: of its tensors, by GGUF's names
    """
    with named(path, "metadata"):
        return _config(fields, shapes)


def _config(fields: dict, shapes: dict) -> Config:
    def get(name, default=None):
        if f"llama.{name}" in fields:
            return fields[f"llama.{name}"]()
        if default is None:
            raise ValueError(f"lacks llama.{name}")
        return default

    def size(name, default=None):
        return integer(f"llama.{name}", get(name, default), 1)

    def positive(name, default=None):
        return number(f"llama.{name}", get(name, default), 0)

    kind = fields["general.architecture"]() if "general.architecture" in fields else None
    if kind != "llama":
        raise ValueError(f"expected architecture 'llama', got {kind!r:.40}")
    width = size("embedding_length")
    heads = size("attention.head_count")
    head_dim = size("attention.key_length", max(width // heads, 1))
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError("llama.rope.dimension_count: expected that all of each head is rotated")
    if get("expert_count", 0):
        raise ValueError(f"a mixture of {get('expert_count')!r:.40} experts is not a Llama")
    scaling = {"rope_type": get("rope.scaling.type", "default")}
    if scaling["rope_type"] == "none":
        scaling["rope_type"] = "default"
    if scaling["rope_type"] == "linear":
        scaling["factor"] = positive("rope.scaling.factor")
    embedding = shapes.get("token_embd.weight")
    return Config(
        vocabulary=embedding[0] if embedding else size("vocab_size"),
        width=width,
        layers=size("block_count"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=size("feed_forward_length"),
        context=size("context_length"),
        norm_epsilon=positive("attention.layer_norm_rms_epsilon"),
        rotary_base=positive("rope.freq_base", 10000.0),
        rotary_scaling=rotary_scaling(scaling),
        tied="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
    )
