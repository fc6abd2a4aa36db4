"""A Llama whose attention is a parameter: checkpoints, weights, cache, text."""

from treeattn.llama.model import Llama
from treeattn.llama.text import chat, stream, stream_text

__all__ = ["Llama", "chat", "stream", "stream_text"]
