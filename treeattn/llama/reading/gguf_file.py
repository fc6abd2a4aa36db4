"""GGUF files: other names than Hugging Face's, another order of rows, the metadata inside."""

import functools
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np

from treeattn.idea.arrays import integer, number
from treeattn.llama.reading.checkpoint import Checkpoint
from treeattn.llama.reading.config import Config, rotary_scaling
from treeattn.llama.reading.gguf_tokenizer import from_gguf
from treeattn.llama.reading.guard import named

GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What is read as it is stored; quantized tensors are read as float32.
DTYPES = {
    gguf.GGMLQuantizationType.F64: np.float64,
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.BF16: jnp.bfloat16,
}


def _name_from_gguf(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names as they are."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return GGUF_NAMES.get(name, name)


class _Reader(gguf.GGUFReader):
    """gguf's own, without what slicing a memory map costs: a tokenizer is 250,000."""

    def __setattr__(self, name, value):
        super().__setattr__(name, np.asarray(value) if name == "data" else value)

    def _get(self, offset, dtype, count=1, override_order=None):
        ordered = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        return np.frombuffer(self.data, ordered, int(count), offset)


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint of a GGUF file."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file")
    with named(path, "truncated or corrupt GGUF file"):
        reader = _Reader(path)
        fields = {name: functools.cache(field.contents) for name, field in reader.fields.items()}
        tensors = {_name_from_gguf(t.name): t for t in reader.tensors}
        shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in tensors.items()}
    config = gguf_config(fields, shapes, path)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        try:
            if dtype := DTYPES.get(tensor.tensor_type):
                x = tensor.data.view(dtype)
            else:
                x = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{path}: {tensor.name}: stored as {kind}, unknown to gguf") from None
        x = x.reshape(shapes[name])
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                # GGUF has a head's rows as rotary pairs (0, 1), (2, 3), …; they become two halves.
                x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(shapes[name])
        return x

    factors = read("rope_freqs.weight") if "rope_freqs.weight" in shapes else None
    return Checkpoint(path, config, from_gguf(fields, path), shapes, read, factors)


def gguf_config(fields: dict, shapes: dict, path: Path) -> Config:
    """The `Config` that a GGUF file's metadata says; ValueError when it is not a Llama's."""
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
    embedding = shapes.get("model.embed_tokens.weight")
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
        tied="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
    )
