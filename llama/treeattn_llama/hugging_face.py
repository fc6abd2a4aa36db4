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
CONFIG_NAMES |= {
    "tied": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}

# Fields that change nothing if they have one of these values (None: or are missing). With another
# the directory is refused.
EXPECTED = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish", None),
    "is_causal": (True, None),
    "partial_rotary_factor": (1, None),
}


def open_hugging_face(path: Path) -> Checkpoint:
    """The checkpoint of a directory with config.json and one or many *.safetensors files."""
    files = _shards(path)
    fields = tokenizer.read_json(path / "config.json")
    with named(path, "config.json"):
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

    return Checkpoint(path, config, tokenizer.from_directory(path), shapes, read)


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
    # Newer files have all rotary fields in rope_parameters. If a file has both, the scalings of
    # both are checked, and other fields are those of rope_parameters.
    places = [_rotary(fields, name) for name in ("rope_scaling", "rope_parameters")]
    fields = {**fields, **places[0], **places[1]}
    for name, values in EXPECTED.items():
        if (found := fields.get(name)) not in values:
            raise ValueError(f"{name}: expected {values[0]!r}, got {found!r:.40}")
    scalings = {rotary_scaling(place) for place in places if place}
    if len(scalings) > 1:
        raise ValueError(f"rope_scaling and rope_parameters differ: {scalings}")
    scaling = scalings.pop() if scalings else None
    return read_config(CONFIG_NAMES, fields.get, rotary_scaling=scaling)


def _rotary(fields: dict, name: str) -> dict:
    """The fields in this place, but null ones."""
    found = {} if fields.get(name) is None else fields[name]
    if not isinstance(found, dict):
        raise TypeError(f"{name}: rope scaling: expected an object, got {found!r:.40}")
    if any(isinstance(x, dict) for x in found.values()):
        raise ValueError(f"{name}: expected one for all layers, got one for each of {list(found)}")
    return {field: x for field, x in found.items() if x is not None}
