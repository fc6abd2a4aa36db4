"""A Llama on disk: its configuration, the shapes of its tensors, and a function that reads one.

Tensors have the names that Hugging Face gives them. Each is read when it is asked for, so memory
holds the weights once.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from treeattn_llama.arguments import list_names
from treeattn_llama.config import Config
from treeattn_llama.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    shapes:         the shape of every tensor, by its Hugging Face name
    read:           the function from a name to the tensor, a new NumPy array
    rotary_factors: divisors of the rotary frequencies (head_dim / 2,), or None
    """

    path: Path
    config: Config
    tokenizer: Tokenizer | None
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    rotary_factors: np.ndarray | None = None

    def check(self) -> None:
        """Raise ValueError, with the tensors' names, if some are missing, misshapen or unknown, or
        if the tokenizer has more tokens than the model."""
        config = self.config
        if config.layers > len(self.shapes):  # checked first: it may be billions
            raise ValueError(
                f"{config.layers} layers are more than the checkpoint's {len(self.shapes)} tensors"
            )
        expected = config.tensors()
        if self.rotary_factors is not None:
            expected["rope_freqs.weight"] = (config.head_dim // 2,)
        if missing := expected.keys() - self.shapes.keys():
            raise ValueError(
                f"missing from the checkpoint: {list_names(missing)}. Names are expected as "
                "transformers gives them to a LlamaForCausalLM: not as Meta does, nor without "
                "'model.', as a base model has them"
            )
        for name, shape in expected.items():
            if (found := self.shapes[name]) != shape:
                raise ValueError(f"{name} has shape {found}; its configuration asks for {shape}")
        # If the head is tied, `load_weights` compares it.
        unknown = self.shapes.keys() - expected.keys() - {"lm_head.weight"}
        unknown = {name for name in unknown if not name.endswith("rotary_emb.inv_freq")}
        if unknown:
            raise ValueError(f"not part of a Llama with this configuration: {list_names(unknown)}")
        if self.tokenizer is not None and self.tokenizer.size > config.vocabulary:
            raise ValueError(
                f"the tokenizer has ids up to {self.tokenizer.size - 1}, the model's vocabulary "
                f"only {config.vocabulary} tokens"
            )
