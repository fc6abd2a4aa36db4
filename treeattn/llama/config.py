"""What a Llama is: its numbers, and the tensors that follow from them."""

import dataclasses
from pathlib import Path

import numpy as np


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
    context: int  # the longest text that it was trained on: a larger cache is warned of
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: "LinearScaling | Llama3Scaling | None" = None
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

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)  # 1: as it was, 0: slowed
        return frequencies * (keep + (1 - keep) / self.factor)


SCALINGS = {"default": None, "linear": LinearScaling, "llama3": Llama3Scaling}


def rotary_scaling(fields: dict, path: Path) -> LinearScaling | Llama3Scaling | None:
    """`Config.rotary_scaling` from the fields of a config.json; ValueError for unknown kinds."""
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in SCALINGS:
        raise ValueError(f"{path}: rope scaling: expected one of {tuple(SCALINGS)}, got {kind!r}")
    if kind == "default":
        return None
    names = [field.name for field in dataclasses.fields(SCALINGS[kind])]
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"{path}: rope scaling of type {kind!r} lacks {missing[0]}")
    return SCALINGS[kind](*(float(fields[name]) for name in names))
