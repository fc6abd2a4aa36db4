"""A Llama whose attention is a parameter: checkpoints, weights, cache, text."""

from treeattn.extras import need

need("llama", "gguf", "tokenizers", "safetensors", "jinja2", "tqdm")

from treeattn.llama.model import Llama  # noqa: E402
from treeattn.llama.speculation import (  # noqa: E402
    accept_candidate_tokens,
    draft_candidate_tokens,
    generate,
    speculate,
)
from treeattn.llama.text import chat, stream, stream_text  # noqa: E402

__all__ = [
    "Llama",
    "accept_candidate_tokens",
    "chat",
    "draft_candidate_tokens",
    "generate",
    "speculate",
    "stream",
    "stream_text",
]
