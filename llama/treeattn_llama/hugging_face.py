"""Hugging Face directories: config.json, and safetensors in one file or many."""

from pathlib import Path

import numpy as np
import safetensors

from treeattn_llama import tokenizer
from treeattn_llama.arguments import named
from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.config import NAMES, Config, read_config, rotary_scaling

DTYPES = ("F64", "F32", "F16", "BF16")
CONFIG_NAMES = {field: name for field, (name, _) in NAMES.items()}
CONFIG_NAMES |= {"tied": "tie_word_embeddings"}
CONFIG_NAMES |= {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}


def open_hugging_face(path: Path) -> Checkpoint:
    """The checkpoint of a directory with config.json and one or many *.safetensors files, or that
    of one such file, with the other files of its directory."""
    folder = path if path.is_dir() else path.parent
    files = _shards(path) if path.is_dir() else [path]
    fields = tokenizer.read_json(folder / "config.json")
    with named(folder, "config.json"):
        config = hugging_face_config(fields)
    where = {}
    shapes = {}
    for file in files:
        with _safetensors(file) as shard, named(file):
            for name in shard.keys():  # a shard is not a dict
                stored = shard.get_slice(name)
                if (dtype := stored.get_dtype()) not in DTYPES:
                    raise ValueError(f"{file}: {name}: expected one of {DTYPES}, got {dtype}")
                if name in where:
                    raise ValueError(f"{file}: {name} is in {where[name].name}, too")
                where[name] = file
                shapes[name] = tuple(stored.get_shape())

    def read(name: str) -> np.ndarray:
        # The file is opened anew for each tensor, because an open one stays mapped in memory.
        with _safetensors(where[name]) as shard:
            return shard.get_tensor(name)

    return Checkpoint(path, config, tokenizer.from_directory(folder), shapes, read)


def _shards(path: Path) -> list[Path]:
    """The directory's safetensors files: model.safetensors, those in its index, or all."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        with named(index, "weight_map"):
            names = tokenizer.read_json(index)["weight_map"].values()
            files = sorted({path / name for name in names})
            if outside := [name for name in names if ".." in Path(name).parts or Path(name).root]:
                raise ValueError(f"expected files of this directory, got {outside[0]!r:.80}")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(
            "expected config.json and *.safetensors, found no safetensors. A folder of the hub's "
            "cache has them in snapshots/…. Pickled files (*.bin, *.pt) are not read, because "
            "unpickling runs the code in them: convert to safetensors"
        )
    return files


def _safetensors(file: Path):
    with named(file, "truncated or corrupt safetensors file"):
        return safetensors.safe_open(file, framework="np")


def hugging_face_config(fields: dict) -> Config:
    """The `Config` in a config.json. Raises ValueError or TypeError, with the field's name, if it
    is not a Llama's."""
    if fields.get("model_type") != "llama":
        raise ValueError(f"expected a model of type 'llama', got {fields.get('model_type')!r:.40}")
    if fields.get("hidden_act", "silu") not in ("silu", "swish", None):
        raise ValueError(f"expected hidden_act 'silu', got {fields['hidden_act']!r:.40}")
    if fields.get("is_causal") is False:
        raise ValueError("is_causal: expected true, got false: a Llama sees no later tokens")
    # Newer files have all rotary fields in rope_parameters. If a file has both, both are checked.
    places = [_rotary(fields, name) for name in ("rope_scaling", "rope_parameters")]
    bases = [
        place["rope_theta"] for place in (fields, *places) if place.get("rope_theta") is not None
    ]
    scalings = [rotary_scaling(place) for place in places if place]
    if len(set(scalings)) > 1:
        raise ValueError(f"rope_scaling and rope_parameters differ: {scalings}")
    rotary = {"rope_theta": bases[-1] if bases else None}
    scaling = scalings[-1] if scalings else None
    return read_config(CONFIG_NAMES, {**fields, **rotary}.get, rotary_scaling=scaling)


def _rotary(fields: dict, name: str) -> dict:
    found = {} if fields.get(name) is None else fields[name]
    if not isinstance(found, dict):
        raise TypeError(f"{name}: rope scaling: expected an object, got {found!r:.40}")
    if any(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"{name}: expected one for all layers, got one for each of {list(found)}")
    if found.get("partial_rotary_factor") not in (None, 1):
        part = found["partial_rotary_factor"]
        raise ValueError(f"{name}: partial_rotary_factor: expected 1, got {part!r:.40}")
    return found
