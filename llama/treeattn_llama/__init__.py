"""A Llama whose attention is a parameter: checkpoints, weights, cache, text."""

from treeattn.extras import need

need("llama", "gguf", "tokenizers", "safetensors", "jinja2", "tqdm")

from treeattn_llama.cache import Cache, in_order, shard_lengths  # noqa: E402
from treeattn_llama.model import Llama  # noqa: E402
from treeattn_llama.reading.config import Config  # noqa: E402
from treeattn_llama.reading.files import open_checkpoint, packaged_model  # noqa: E402
from treeattn_llama.rows import log_probs  # noqa: E402
from treeattn_llama.speculation import (  # noqa: E402
    accept_candidate_tokens,
    draft_candidate_tokens,
)
from treeattn_llama.text import Generation, chat, generate, stream  # noqa: E402
from treeattn_llama.weights import Layer, Weights, rotary_frequencies  # noqa: E402

__all__ = [
    "Cache",
    "Config",
    "Generation",
    "Layer",
    "Llama",
    "Weights",
    "accept_candidate_tokens",
    "chat",
    "draft_candidate_tokens",
    "generate",
    "in_order",
    "log_probs",
    "open_checkpoint",
    "packaged_model",
    "rotary_frequencies",
    "shard_lengths",
    "stream",
]
