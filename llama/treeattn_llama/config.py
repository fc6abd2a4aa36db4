"""A Llama's configuration: its numbers, and the tensors that follow from them."""

import dataclasses
from collections.abc import Callable

import numpy as np

from treeattn.checks import integer
from treeattn_llama.arguments import boolean, list_names, number


@dataclasses.dataclass(frozen=True)
class Config:
    """The numbers of a Llama. head_dim need not be width / heads.

    Raises TypeError or ValueError for a wrong number, and for sizes that do not fit each other.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    context: int = 2048  # the longest text that it was trained on; a larger cache gives a warning
    norm_epsilon: float = 1e-6
    rotary_base: float = 10000.0
    rotary_scaling: "RotaryScaling | None" = None
    tied: bool = False  # the output matrix is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if check := CHECKS.get(field.type):
                found = check(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, found)
        scaling = self.rotary_scaling
        if not isinstance(scaling, RotaryScaling | None):
            raise TypeError(f"rotary_scaling: expected a RotaryScaling, got {scaling!r:.40}")
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
        parts = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        biased = {"self_attn": self.attention_bias, "mlp": self.mlp_bias}
        shapes = {"model.embed_tokens.weight": (self.vocabulary, d), "model.norm.weight": (d,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, d)
        for i in range(self.layers):
            for part, shape in parts.items():
                shapes[f"model.layers.{i}.{part}.weight"] = shape
                if biased.get(part.split(".")[0]):
                    shapes[f"model.layers.{i}.{part}.bias"] = shape[:1]
        return shapes


CHECKS = {
    int: lambda name, x: integer(name, x, 1),
    float: lambda name, x: number(name, x, 1e-38),  # float32 rounds a smaller one to 0
    bool: boolean,
}

# The names of a field in config.json, and in a GGUF file's metadata after "llama.".
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

REQUIRED = {"vocabulary", "width", "layers", "heads", "mlp_width"}


def read_config(names: dict[str, str], get: Callable, **given) -> Config:
    """The `Config` in a file.

    names: the file's name of each field of `NAMES`
    get:   the function from such a name to the value in the file, None if there is none
    given: fields that are known already

    Raises ValueError or TypeError, with the file's name of the field.
    """
    for field, name in names.items():
        if field not in given and (found := get(name)) is not None:
            given[field] = CHECKS[Config.__annotations__[field]](name, found)
    if missing := REQUIRED - given.keys():
        raise ValueError(f"lacks {list_names({names[field] for field in missing})}")
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("head_dim", max(given["width"] // given["heads"], 1))
    return Config(**given)


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Rotary pairs slowed by `factor`: all of them, or by Llama 3's rule if the other fields are
    given. By that rule pairs whose wavelength is long, measured by the context of the first
    training, are slowed, short ones are not, and there is a ramp between."""

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: float | None = None

    def __post_init__(self):
        given = {name: x for name, x in vars(self).items() if x is not None}
        if len(given) not in (1, 4):
            raise ValueError(f"rope scaling: expected factor, or all four fields, got {given}")
        for name, x in given.items():
            object.__setattr__(self, name, number(name, x, 0))
        if self.low_freq_factor is not None and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: expected less than high_freq_factor = {self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        low = self.low_freq_factor
        if low is None:
            return frequencies / self.factor
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        keep = np.clip((turns - low) / (self.high_freq_factor - low), 0, 1)  # 0: slowed, 1: kept
        return frequencies * (keep + (1 - keep) / self.factor)


# The number of fields of `RotaryScaling` that each kind has.
SCALINGS = {"default": 0, "linear": 1, "llama3": 4}


def rotary_scaling(fields: dict) -> RotaryScaling | None:
    """`Config.rotary_scaling` from the fields of a config.json.

    Raises ValueError or TypeError for an unknown kind, and for a field that is missing or not a
    number above 0.
    """
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in tuple(SCALINGS):
        raise ValueError(f"rope scaling: expected one of {tuple(SCALINGS)}, got {kind!r:.40}")
    names = [field.name for field in dataclasses.fields(RotaryScaling)[: SCALINGS[kind]]]
    found = [number(f"rope scaling: {name}", fields.get(name), 0) for name in names]
    return RotaryScaling(*found) if found else None


def rotary_frequencies(config: Config) -> np.ndarray:
    """The angle by which each pair rotates between two positions (head_dim / 2,), float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = (1 / np.float32(config.rotary_base) ** exponents).astype(np.float32)
    if config.rotary_scaling is not None:
        frequencies = config.rotary_scaling.apply(frequencies)
    return frequencies.astype(np.float32)
