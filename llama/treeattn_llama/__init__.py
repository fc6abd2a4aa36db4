"""A Llama whose attention is a parameter: checkpoints, weights, cache, text.

model = Llama.load()                  # the packaged SmolLM2-135M-Instruct, or a path
generate(model, "Once upon a time").text
"".join(chat(model, "What is the capital of France?"))
"""

from treeattn_llama import layers
from treeattn_llama.attention import ATTENTIONS, ShardAttention
from treeattn_llama.cache import Cache, in_order
from treeattn_llama.config import Config, rotary_frequencies
from treeattn_llama.files import open_checkpoint, packaged_model
from treeattn_llama.lookup import LookupDraft
from treeattn_llama.model import Llama
from treeattn_llama.speculate import (
    Draft,
    accept_candidate_tokens,
    candidate_lengths,
    draft_candidate_tokens,
    likeliest,
    pad_packed,
)
from treeattn_llama.text import Generation, chat, generate, stream
from treeattn_llama.tokenizer import Tokenizer
from treeattn_llama.weights import Layer, Weights

__version__ = "0.2.0"

__all__ = [
    "ATTENTIONS",
    "Cache",
    "Config",
    "Draft",
    "Generation",
    "Layer",
    "Llama",
    "LookupDraft",
    "ShardAttention",
    "Tokenizer",
    "Weights",
    "accept_candidate_tokens",
    "candidate_lengths",
    "chat",
    "draft_candidate_tokens",
    "generate",
    "in_order",
    "layers",
    "likeliest",
    "open_checkpoint",
    "packaged_model",
    "pad_packed",
    "rotary_frequencies",
    "stream",
]
