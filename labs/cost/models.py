"""The sizes of models: the weights that a decode step reads, and those that devices hold."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from labs.cost.topology import DATA
from labs.cost.workload import Number


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama, or of a model with latent attention or experts.

    width, hidden:  of the residual stream, and between the two matrices of a feed-forward layer
    head_dim:       of a query and a key in their product
    value_dim:      of a value; head_dim when None
    tied:           whether the input embedding is the last projection's matrix
    latent:         whether a value is a part of its key, as in MLA (arXiv 2405.04434). A head's
                    query is projected from `query_rank` numbers to `inner_dim` and a rotary part
                    (head_dim less value_dim), then to the latent; its output comes back from it
    experts:        experts of a layer, 0 for a dense model: feed-forward networks of
                    `expert_hidden`. A token uses `experts_used` and the `shared_experts`
    dense_layers:   layers with a feed-forward network of `hidden` and no experts; ignored if
                    there are no experts
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
        """Weights of a layer that make queries for `heads` and keys and values for `kv_heads`."""
        if not self.latent:
            keys_and_values = kv_heads * (self.head_dim + self.value_dim)
            return self.width * (heads * self.head_dim + keys_and_values)
        rotary = self.head_dim - self.value_dim
        of_a_head = self.query_rank * (self.inner_dim + rotary) + self.inner_dim * self.value_dim
        return self.width * (self.query_rank + kv_heads * self.head_dim) + heads * of_a_head

    def output(self, heads: int) -> int:
        """Weights of a layer that project `heads` outputs back to the residual stream."""
        if not self.latent:
            return heads * self.value_dim * self.width
        return heads * self.inner_dim * (self.value_dim + self.width)

    def feed_forward(self, tokens: Number) -> Number:
        """Feed-forward weights of all layers that so many tokens use, each weight once.

        A token's experts are drawn evenly, so n tokens use E (1 − (1 − k/E)ⁿ) of E experts.
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
        """All weights, including all experts and an untied input embedding."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return self.attention + self.feed_forward(float("inf")) + embeddings


MODELS = {name: Model(name, **sizes) for name, sizes in DATA["models"].items()}


def find_model(name: str | os.PathLike) -> Model:
    """One of `MODELS` by its name, or any model by its Hugging Face config.json or folder.

    Raises ValueError if there is neither, or if the config lacks a size.
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
    # DeepSeek's, Mixtral's and Qwen's names for the number of experts.
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
