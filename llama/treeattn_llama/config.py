"""What a Llama is: its numbers, and the tensors that follow from them."""

import dataclasses
from collections.abc import Callable

import numpy as np

from treeattn_llama.arguments import boolean, integer, number


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama. head_dim need not be width / heads.

    Raises a TypeError or ValueError for a size that is no whole number of at least 1, a number
    that is not finite and above 0, and for sizes that do not fit each other.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    context: int  # the longest text that it was trained on: a larger cache is warned of
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: "LinearScaling | Llama3Scaling | None" = None
    tied: bool = False  # the output matrix is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type in CHECKS:
                checked = CHECKS[field.type](field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, checked)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads} query heads cannot share {self.kv_heads} key heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim: expected an even number, for rotary pairs, got {self.head_dim}"
            )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a checkpoint of this model must have, and their shapes (out, in)."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        d = self.width
        f = self.mlp_width
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


CHECKS = {
    int: lambda name, x: integer(name, x, 1),
    float: lambda name, x: number(name, x, 1e-38),  # above 0 in float32, too
    bool: boolean,
}

# The fields that both formats have: in config.json, and in a GGUF file's metadata after "llama.".
NAMES = {
    "vocabulary": ("vocab_size", "vocab_size"),
    "width": ("hidden_size", "embedding_length"),
    "layers": ("num_hidden_layers", "block_count"),
    "heads": ("num_attention_heads", "attention.head_count"),
    "kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "mlp_width": ("intermediate_size", "feed_forward_length"),
    "context": ("max_position_embeddings", "context_length"),
    "norm_epsilon": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    "rotary_base": ("rope_theta", "rope.freq_base"),
}

# What is meant where a file does not say it, by the fields before it.
DEFAULTS = {
    "kv_heads": lambda known: known["heads"],
    "head_dim": lambda known: max(known["width"] // known["heads"], 1),
    "context": lambda known: 2048,
    "norm_epsilon": lambda known: 1e-6,
    "rotary_base": lambda known: 10000.0,
}


def read_config(names: dict[str, str], get: Callable, **given) -> Config:
    """A `Config` of what a file says, each field checked under the name that it has there.

    names: of each field of `NAMES`, in this file
    get:   from such a name to what the file has there; None where it has nothing
    given: fields that are known otherwise

    Raises a ValueError or TypeError that names the file's field.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(Config)}
    for field, name in names.items():
        if field in given:
            continue
        found = get(name)
        if found is None and field in DEFAULTS:
            found = DEFAULTS[field](given)
        if found is None:
            raise ValueError(f"lacks {name}")
        given[field] = CHECKS[kinds[field]](name, found)
    return Config(**given)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every rotary pair is slowed by `factor`."""

    factor: float

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """The pairs whose wavelength is long against the context of the first training are slowed by
    `factor`, the short ones left as they are, with a ramp between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def __post_init__(self):
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: expected less than high_freq_factor = {self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        low = self.low_freq_factor
        high = self.high_freq_factor
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)  # 1: as it was, 0: slowed
        return frequencies * (keep + (1 - keep) / self.factor)


SCALINGS = {"default": None, "linear": LinearScaling, "llama3": Llama3Scaling}


def rotary_scaling(fields: dict) -> LinearScaling | Llama3Scaling | None:
    """`Config.rotary_scaling` from the fields of a config.json.

    Raises a ValueError for unknown kinds, and for fields that are missing or no numbers above 0.
    """
    kinds = (fields.get("rope_type"), fields.get("type"), "default")
    kind = next(kind for kind in kinds if kind is not None)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"rope scaling: expected one of {tuple(SCALINGS)}, got {kind!r:.40}")
    if kind == "default":
        return None
    names = [field.name for field in dataclasses.fields(SCALINGS[kind])]
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"rope scaling of type {kind!r} lacks {missing[0]}")
    return SCALINGS[kind](*(number(name, fields[name], 0) for name in names))


def rotary_frequencies(config: Config) -> np.ndarray:
    """The angle by which each rotary pair turns a position (head_dim / 2,), float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1 / np.float32(config.rotary_base) ** exponents).astype(np.float32)
    if config.rotary_scaling is not None:
        frequencies = config.rotary_scaling.apply(frequencies)
    return frequencies.astype(np.float32)
