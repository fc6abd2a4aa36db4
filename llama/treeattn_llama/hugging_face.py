"""Hugging Face directories: config.json, and safetensors in one file or many."""

from pathlib import Path

import numpy as np
import safetensors

from treeattn_llama import tokenizer
from treeattn_llama.arguments import boolean, number
from treeattn_llama.checkpoint import Checkpoint, list_names
from treeattn_llama.config import NAMES, Config, read_config, rotary_scaling
from treeattn_llama.guard import named

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
    fields = tokenizer.read_json(folder / "config.json")
    with named(folder, "config.json"):
        config = hugging_face_config(fields)
    where = {}
    shapes = {}
    for file in files:
        with _safetensors(file) as shard, named(file):
            for name in shard.keys():  # a shard is no dict
                stored = shard.get_slice(name)
                if (dtype := stored.get_dtype()) not in DTYPES:
                    raise ValueError(f"{file}: {name}: expected one of {DTYPES}, got {dtype}")
                if name in where:
                    raise ValueError(f"{file}: {name} is in {where[name].name}, too")
                where[name] = file
                shapes[name] = tuple(stored.get_shape())

    def read(name: str) -> np.ndarray:
        # Opened anew, so that no file stays mapped longer than it takes to copy one tensor.
        with _safetensors(where[name]) as shard:
            return shard.get_tensor(name)

    return Checkpoint(path, config, tokenizer.from_directory(folder), shapes, read)


def _shards(path: Path) -> list[Path]:
    """The directory's safetensors files: model.safetensors, those of its index, or all."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        with named(index, "weight_map"):
            names = tokenizer.read_json(index)["weight_map"].values()
            files = sorted({path / name for name in names})
        missing = [f.name for f in files if not f.exists()]
        if missing:
            raise ValueError(f"{path}: {list_names(missing)} missing, though the index lists it")
        return files
    if files := sorted(path.glob("*.safetensors")):
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


def hugging_face_config(fields: dict) -> Config:
    """The `Config` that a config.json says; ValueError when it is not a Llama's."""
    if fields.get("model_type") != "llama":
        raise ValueError(f"expected a model of type 'llama', got {fields.get('model_type')!r:.40}")
    if fields.get("hidden_act", "silu") not in ("silu", None):
        raise ValueError(f"expected hidden_act 'silu', got {fields['hidden_act']!r:.40}")
    if fields.get("is_causal") is False:
        raise ValueError("is_causal: expected true, got false: a Llama sees no later tokens")
    # Newer files keep everything rotary in one place. Where both are there, both have to be right.
    places = [_rotary(fields, name) for name in ("rope_scaling", "rope_parameters")]
    bases = [place.get("rope_theta") for place in (fields, *places)]
    bases = [number("rope_theta", base, 0) for base in bases if base is not None]
    scalings = [rotary_scaling(place) for place in places if place]
    if len(set(scalings)) > 1:
        raise ValueError(f"rope_scaling and rope_parameters differ: {scalings}")
    flags = {
        field: boolean(name, False if fields.get(name) is None else fields[name])
        for field, name in FLAGS.items()
    }
    return read_config(
        {field: name for field, (name, _) in NAMES.items()},
        {**fields, "rope_theta": bases[-1] if bases else None}.get,
        rotary_scaling=scalings[-1] if scalings else None,
        **flags,
    )


FLAGS = {
    "tied": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}


def _rotary(fields: dict, name: str) -> dict:
    found = fields.get(name)
    if found is not None and not isinstance(found, dict):
        raise TypeError(f"{name}: rope scaling: expected an object, got {found!r:.40}")
    found = found or {}
    if any(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"{name}: expected one for all layers, got one for each of {list(found)}")
    if found.get("partial_rotary_factor") not in (None, 1):
        part = found["partial_rotary_factor"]
        raise ValueError(f"{name}: partial_rotary_factor: expected 1, got {part!r:.40}")
    return found
