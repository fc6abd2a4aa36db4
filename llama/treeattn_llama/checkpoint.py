"""A Llama on disk: what it is, which tensors there are, and how to read one of them.

Tensors go by the names that Hugging Face gives them. None is read before it is asked for, so that
a model never needs its weights twice.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from treeattn_llama.config import Config
from treeattn_llama.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    shapes:         of every tensor in it, by its Hugging Face name
    read:           name -> the tensor, as a new numpy array
    rotary_factors: numbers that the rotary frequencies are divided by (head_dim / 2,), or None
    """

    path: Path
    config: Config
    tokenizer: Tokenizer | None
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    rotary_factors: np.ndarray | None = None

    def check(self) -> None:
        """Raise a ValueError that names tensors which are missing, misshapen or unknown."""
        if self.config.layers > len(self.shapes):
            layers = f"{self.config.layers} layers"
            raise ValueError(f"{self.path}: {layers} are more than its {len(self.shapes)} tensors")
        expected = self.config.tensors()
        missing = [name for name in expected if name not in self.shapes]
        if missing:
            raise ValueError(f"{self.path}: {list_names(missing)} missing from the checkpoint")
        for name, shape in expected.items():
            if (came := self.shapes[name]) != shape:
                wanted = f"its configuration asks for {shape}"
                raise ValueError(f"{self.path}: {name} has shape {came}; {wanted}")
        factors = self.rotary_factors
        pairs = (self.config.head_dim // 2,)
        if factors is not None and factors.shape != pairs:
            raise ValueError(
                f"{self.path}: rope_freqs.weight has shape {factors.shape}, not {pairs}"
            )
        harmless = {"lm_head.weight"}  # where tied: `load_weights` looks whether it is
        harmless |= set() if factors is None else {"rope_freqs.weight"}
        unknown = set(self.shapes) - set(expected) - harmless
        unknown = sorted(n for n in unknown if not n.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise ValueError(
                f"{self.path}: {list_names(unknown)} not part of a Llama so configured"
            )
        if self.tokenizer is not None and self.tokenizer.size > self.config.vocabulary:
            raise ValueError(
                f"{self.path}: the tokenizer has ids up to {self.tokenizer.size - 1}, the model's "
                f"vocabulary only {self.config.vocabulary} tokens"
            )


def list_names(names: list[str]) -> str:
    """The first of the names, and their verb, for a message."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
