"""A Llama whose attention is a parameter: checkpoints, weights, cache, text."""

from treeattn.extras import need

need("llama", "gguf", "tokenizers", "safetensors", "jinja2", "tqdm")

from treeattn.llama.model import Llama  # noqa: E402
from treeattn.llama.text import chat, stream, stream_text  # noqa: E402

__all__ = ["Llama", "chat", "stream", "stream_text"]
