"""Hugging Face directories: config.json, and safetensors in one file or many."""

from pathlib import Path

import numpy as np
import safetensors

from treeattn.llama import tokenizer
from treeattn.llama.checkpoint import Checkpoint, some
from treeattn.llama.config import Config, rotary_scaling

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_PICKLES = (
    "Unpickling runs whatever code the file holds, so it is not read; convert it to safetensors."
)
DTYPES = ("F64", "F32", "F16", "BF16")


def open_hugging_face(path: Path) -> Checkpoint:
    """The checkpoint of a directory with config.json and one or many *.safetensors.

    A *.safetensors file stands for itself alone, with what lies beside it.
    """
    folder, files = (path, _shards(path)) if path.is_dir() else (path.parent, [path])
    config = hugging_face_config(tokenizer.read_json(folder / "config.json"), folder)
    where, shapes = {}, {}
    for file in files:
        with _safetensors(file) as shard:
            for name in shard.keys():  # a shard is no dict
                stored = shard.get_slice(name)
                if (dtype := stored.get_dtype()) not in DTYPES:
                    raise ValueError(f"{file}: {name}: expected one of {DTYPES}, got {dtype}")
                where[name], shapes[name] = file, tuple(stored.get_shape())

    def read(name: str) -> np.ndarray:
        # Opened anew, so that no file stays mapped longer than it takes to copy one tensor.
        with _safetensors(where[name]) as shard:
            return shard.get_tensor(name)

    return Checkpoint(path, config, tokenizer.from_directory(folder), shapes, read)


def _shards(path: Path) -> list[Path]:
    """The directory's safetensors files: those of its index, model.safetensors, or all."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.exists():
        names = tokenizer.read_json(index).get("weight_map", {}).values()
        files = sorted({path / name for name in names})
        missing = [f.name for f in files if not f.exists()]
        if missing:
            raise ValueError(f"{path}: {some(missing)} missing, though the index lists it")
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
    kind = fields.get("model_type")
    if kind != "llama":
        raise ValueError(f"{path}: expected a model of type 'llama', got {kind!r}")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: expected hidden_act 'silu', got {fields['hidden_act']!r}")
    try:
        heads, width = fields["num_attention_heads"], fields["hidden_size"]
        # Newer files keep everything rotary in one place.
        rotary = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        return Config(
            vocabulary=fields["vocab_size"],
            width=width,
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or width // heads,
            mlp_width=fields["intermediate_size"],
            context=fields.get("max_position_embeddings", 2048),
            norm_epsilon=fields.get("rms_norm_eps", 1e-6),
            rotary_base=float(rotary.get("rope_theta") or fields.get("rope_theta", 10000.0)),
            rotary_scaling=rotary_scaling(rotary, path),
            tied=fields.get("tie_word_embeddings", False),
            attention_bias=fields.get("attention_bias", False),
            mlp_bias=fields.get("mlp_bias", False),
        )
    except KeyError as missing:
        raise ValueError(f"{path}: config.json lacks {missing}") from None
