"""GGUF files: tensors by other names than Hugging Face's, rows in another order, and metadata."""

import dataclasses
import functools
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np

from treeattn_llama.arguments import list_names, named, number
from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.config import NAMES, Config, RotaryScaling, read_config
from treeattn_llama.gguf_tokenizer import from_gguf

# These are read as they are stored; quantized tensors are read as float32.
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


# Fields that change nothing if they have this value. With another the file is refused.
EXPECTED = {
    "split.count": 1,
    "llama.expert_count": 0,
    "llama.attention.causal": True,
    "llama.rope.scaling.attn_factor": 1,
}
HINTS = {"split.count": ": merge the files first (llama-gguf-split --merge)"}
# Of fields that begin so, those that are not read are refused, because they may change numbers.
OTHERS = ("llama.rope.", "llama.attention.")
# But these are read elsewhere (`_scaling`), or are of a scaling that is refused.
IGNORED = {
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.finetuned",
}


class _Reader(gguf.GGUFReader):
    """gguf's reader, faster: a tokenizer takes 250,000 small reads, and this one takes a fifth of
    the time of gguf's, which slices a memory map and makes a dtype each time."""

    def _get(self, offset, dtype, count=1, override_order=None) -> np.ndarray:
        """`count` numbers at the offset.

        Raises ValueError beyond the end of the file, where gguf would go on reading, and for
        big-endian numbers.
        """
        if self.byte_order == "S":
            raise ValueError("expected numbers in little-endian order, got big-endian ones")
        return np.frombuffer(self.data, dtype, int(count), offset)


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint of a GGUF file."""
    with named(path, "not a directory and not a GGUF file, or a damaged one"):
        reader = _Reader(path)
        fields = {name: functools.cache(field.contents) for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
        if any(tensor.data_offset < reader.data_offset for tensor in reader.tensors):
            raise ValueError("a tensor's offset is so large that it wraps around")
    with named(path, "metadata"):
        config = gguf_config(fields, stored)
    # No more layers are named than the file has tensors, because its number of layers may be wrong.
    layers = max(min(config.layers, len(stored)), 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    expected = dataclasses.replace(config, layers=layers).tensors()
    names = {names.get_name(name, (".weight", ".bias")): name for name in expected}
    tensors = {names.get(name, name): tensor for name, tensor in stored.items()}
    shapes = {name: tuple(map(int, t.shape[::-1])) for name, t in tensors.items()}

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        dtype = DTYPES.get(tensor.tensor_type.name)
        with named(f"{path}: {tensor.name}"):
            data = tensor.data
            x = data.view(dtype) if dtype else gguf.dequantize(data, tensor.tensor_type)
        x = x.reshape(shapes[name])
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                # GGUF has a head's rows as rotary pairs (0, 1), (2, 3), …; they become two halves.
                x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(shapes[name])
        return x

    factors = read("rope_freqs.weight") if "rope_freqs.weight" in shapes else None
    return Checkpoint(path, config, from_gguf(fields, path), shapes, read, factors)


def gguf_config(fields: dict, tensors: dict) -> Config:
    """The `Config` in a file's metadata.

    tensors: the file's, by GGUF's names

    Raises ValueError or TypeError, with the field's name, if it is not a Llama's.
    """

    def get(name):
        return fields[name]() if name in fields else None

    kind = get("general.architecture")
    if kind != "llama":
        raise ValueError(f"expected architecture 'llama', got {kind!r:.40}")
    given = {
        "tied": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rotary_scaling": _scaling(get),
    }
    if "token_embd.weight" in tensors:
        given["vocabulary"] = int(tensors["token_embd.weight"].shape[-1])
    names = {field: f"llama.{name}" for field, (_, name) in NAMES.items()}
    config = read_config(names, get, **given)
    whole = config.head_dim
    expected = EXPECTED | {
        "llama.rope.dimension_count": whole,
        "llama.attention.value_length": whole,
    }
    for name, value in expected.items():
        if (found := get(name)) not in (None, value):
            raise ValueError(f"{name}: expected {value}, got {found!r:.40}{HINTS.get(name, '')}")
    known = expected.keys() | IGNORED | set(names.values())
    unknown = {name for name in fields.keys() - known if name.startswith(OTHERS)}
    if unknown:
        raise ValueError(f"not known, and may change numbers: {list_names(unknown)}")
    return config


def _scaling(get) -> RotaryScaling | None:
    """The rotary scaling in the metadata.

    As in llama.cpp, a factor without a type is linear. Llama 3's factors are not here: GGUF files
    have them as a tensor, `rope_freqs`.
    """
    name = "llama.rope.scaling.factor"
    kind = get("llama.rope.scaling.type")
    if kind == "none" or (kind is None and get(name) is None):
        return None
    if kind not in ("linear", None):
        raise ValueError(f"llama.rope.scaling.type: expected 'none' or 'linear', got {kind!r:.40}")
    return RotaryScaling(number(name, get(name), 0))
