"""The sizes of models: what a step of decoding reads of them, and what devices hold."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from labs.cost.topology import DATA
from labs.cost.workload import Number


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama, of one with latent attention, or of one with experts.

    width, hidden:  of the residual stream, and between the two matrices of a feed-forward layer
    head_dim:       of a query and a key, as they meet
    value_dim:      of a value; head_dim when None
    tied:           whether the input embedding is the last projection's matrix
    latent:         whether a value is a part of its key, as in MLA (arXiv 2405.04434): queries come
                    out of `query_rank` numbers, `inner_dim` and the rotary part (head_dim less
                    value_dim) for each head, are taken to the latent, and outputs back from it
    experts:        of a layer, with a feed-forward network of `expert_hidden` each, of which a
                    token uses `experts_used`, besides the `shared_experts`; 0 for a dense model
    dense_layers:   layers whose feed-forward network has `hidden` and no experts; without experts,
                    all are
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    head_dim: int = 128
    value_dim: int | None = None
    tied: bool = False
    latent: bool = False
    query_rank: int = 0
    inner_dim: int = 0
    experts: int = 0
    experts_used: int = 0
    shared_experts: int = 0
    expert_hidden: int = 0
    dense_layers: int = 0

    def __post_init__(self):
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)

    def projections(self, heads: int, kv_heads: int) -> int:
        """Weights of a layer that make the queries of so many heads and such keys and values."""
        if not self.latent:
            keys_and_values = kv_heads * (self.head_dim + self.value_dim)
            return self.width * (heads * self.head_dim + keys_and_values)
        rotary = self.head_dim - self.value_dim
        of_a_head = self.query_rank * (self.inner_dim + rotary) + self.inner_dim * self.value_dim
        return self.width * (self.query_rank + kv_heads * self.head_dim) + heads * of_a_head

    def output(self, heads: int) -> int:
        """Weights of a layer that take so many heads' outputs back to the residual stream."""
        if not self.latent:
            return heads * self.value_dim * self.width
        return heads * self.inner_dim * (self.value_dim + self.width)

    def feed_forward(self, tokens: Number) -> Number:
        """Weights of all layers' feed-forward networks that so many tokens use, each of them once.

        A token's experts are drawn evenly, so that n tokens meet E (1 − (1 − k/E)ⁿ) of E.
        """
        if not self.experts:
            return 3 * self.width * self.hidden * self.layers
        missed = (1 - self.experts_used / self.experts) ** tokens
        met = self.shared_experts + self.experts * (1 - missed)
        sparse_layers = self.layers - self.dense_layers
        hidden = self.dense_layers * self.hidden + sparse_layers * met * self.expert_hidden
        return 3 * self.width * hidden

    @property
    def attention(self) -> int:
        """Weights of all layers' projections and outputs."""
        layer = self.projections(self.heads, self.kv_heads) + self.output(self.heads)
        return self.layers * layer

    @property
    def weights(self) -> Number:
        """Weights that a step of one token reads: all layers' and the last projection's."""
        return self.attention + self.feed_forward(1) + self.vocabulary * self.width

    @property
    def parameters(self) -> Number:
        """All weights: all experts', and the input embedding's where it is another matrix."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return self.attention + self.feed_forward(float("inf")) + embeddings


MODELS = {name: Model(name, **sizes) for name, sizes in DATA["models"].items()}


def find_model(name: str | os.PathLike) -> Model:
    """One of `MODELS` by its name, or any by its Hugging Face config.json (or the folder of one).

    Raises ValueError where there is neither, and for a config that lacks a size.
    """
    if str(name) in MODELS:
        return MODELS[str(name)]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(MODELS)
        raise ValueError(f"model: expected a config.json or one of {known}, got {str(name)!r}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _of_config(path.resolve().parent.name, config)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"model: {path} has no sizes of a model: {error!r}") from None


def _of_config(name: str, config: dict) -> Model:
    """A Llama's sizes, or those of MLA, with or without experts, by Hugging Face's names."""
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    hidden = config["intermediate_size"]
    sizes = {"kv_heads": config.get("num_key_value_heads") or heads}
    sizes["head_dim"] = config.get("head_dim") or width // heads
    if "kv_lora_rank" in config:
        latent = config["kv_lora_rank"]
        sizes = {"kv_heads": 1, "head_dim": latent + config["qk_rope_head_dim"], "latent": True}
        sizes |= {"value_dim": latent, "query_rank": config["q_lora_rank"]}
        sizes |= {"inner_dim": config["qk_nope_head_dim"]}
    # DeepSeek's, Mixtral's and Qwen's names for one number.
    names = "n_routed_experts", "num_local_experts", "num_experts"
    if experts := next((config[name] for name in names if config.get(name)), 0):
        sizes |= {
            "experts": experts,
            "experts_used": config["num_experts_per_tok"],
            "shared_experts": config.get("n_shared_experts") or 0,
            "expert_hidden": config.get("moe_intermediate_size") or hidden,
            "dense_layers": config.get("first_k_dense_replace", 0),
        }
    tied = config.get("tie_word_embeddings", False)
    layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    return Model(
        name, layers, width, heads, hidden=hidden, vocabulary=vocabulary, tied=tied, **sizes
    )
