"""Hugging Face directories: config.json, and safetensors in one file or many."""

from pathlib import Path

import numpy as np
import safetensors

from treeattn.idea.arrays import integer, number
from treeattn_llama.reading import tokenizer
from treeattn_llama.reading.checkpoint import Checkpoint, list_names
from treeattn_llama.reading.config import Config, boolean, rotary_scaling
from treeattn_llama.reading.guard import named

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_PICKLES = (
    "Unpickling runs whatever code the file holds, so it is not read; convert it to safetensors."
)
DTYPES = ("F64", "F32", "F16", "BF16")


def open_hugging_face(path: Path) -> Checkpoint:
    """The checkpoint of a directory with config.json and one or many *.safetensors.

    A *.safetensors file stands for itself alone, with what lies beside it.
    """
    folder = path if path.is_dir() else path.parent
    files = _shards(path) if path.is_dir() else [path]
    config = hugging_face_config(tokenizer.read_json(folder / "config.json"), folder)
    where = {}
    shapes = {}
    for file in files:
        with _safetensors(file) as shard, named(file):
            for name in shard.keys():  # a shard is no dict
                stored = shard.get_slice(name)
                if (dtype := stored.get_dtype()) not in DTYPES:
                    raise ValueError(f"{file}: {name}: expected one of {DTYPES}, got {dtype}")
                where[name] = file
                shapes[name] = tuple(stored.get_shape())

    def read(name: str) -> np.ndarray:
        # Opened anew, so that no file stays mapped longer than it takes to copy one tensor.
        with _safetensors(where[name]) as shard:
            return shard.get_tensor(name)

    return Checkpoint(path, config, tokenizer.from_directory(folder), shapes, read)


def _shards(path: Path) -> list[Path]:
    """The directory's safetensors files: those of its index, model.safetensors, or all."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.exists():
        with named(index, "weight_map"):
            names = tokenizer.read_json(index)["weight_map"].values()
            files = sorted({path / name for name in names})
        missing = [f.name for f in files if not f.exists()]
        if missing:
            raise ValueError(f"{path}: {list_names(missing)} missing, though the index lists it")
        return files
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(f.name for pattern in PICKLES for f in path.glob(pattern))
    if pickles:
        raise ValueError(f"{path}: only a pickled checkpoint ({pickles[0]}). {NO_PICKLES}")
    raise ValueError(f"{path}: expected config.json and *.safetensors, found no safetensors")


def _safetensors(file: Path):
    try:
        return safetensors.safe_open(file, framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file}: truncated or corrupt safetensors file ({error})") from None


def hugging_face_config(fields: dict, path: Path) -> Config:
    """The `Config` that a config.json says; ValueError when it is not a Llama's."""
    with named(path, "config.json"):
        return _config(fields)


def _config(fields: dict) -> Config:
    def get(name, default=None, among=fields):
        found = among.get(name)  # null is as good as nothing
        if found is None and default is None:
            raise ValueError(f"lacks {name!r}")
        return default if found is None else found

    def size(name, default=None):
        return integer(name, get(name, default), 1)

    if fields.get("model_type") != "llama":
        raise ValueError(f"expected a model of type 'llama', got {fields.get('model_type')!r:.40}")
    if get("hidden_act", "silu") != "silu":
        raise ValueError(f"expected hidden_act 'silu', got {fields['hidden_act']!r:.40}")
    # Newer files keep everything rotary in one place.
    rotary = get("rope_parameters", get("rope_scaling", {}))
    if not isinstance(rotary, dict):
        raise TypeError(f"rope scaling: expected an object, got {rotary!r:.40}")
    base = get("rope_theta", get("rope_theta", 10000.0), among=rotary)
    heads = size("num_attention_heads")
    width = size("hidden_size")
    return Config(
        vocabulary=size("vocab_size"),
        width=width,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", width // heads),
        mlp_width=size("intermediate_size"),
        context=size("max_position_embeddings", 2048),
        norm_epsilon=number("rms_norm_eps", get("rms_norm_eps", 1e-6), 0),
        rotary_base=number("rope_theta", base, 0),
        rotary_scaling=rotary_scaling(rotary),
        tied=boolean("tie_word_embeddings", get("tie_word_embeddings", False)),
        attention_bias=boolean("attention_bias", get("attention_bias", False)),
        mlp_bias=boolean("mlp_bias", get("mlp_bias", False)),
    )
