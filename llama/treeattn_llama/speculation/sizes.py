"""The sizes of steps that are compiled: each is a program for every batch and capacity of a cache.

Compiling one takes as long as dozens of steps. So none compiles in the middle of a text, after the
first that a model writes: what a budget needs at most is ready before the prompt is read, and what
smaller trees were padded to is smaller from some text on, if that would have saved enough.
"""

import collections
import weakref
from collections.abc import Iterable

import jax
import numpy as np

from treeattn_llama import layers
from treeattn_llama.model import Llama
from treeattn_llama.speculation.budget import Budget
from treeattn_llama.speculation.models import first_layers

PATIENCE = 32  # steps that would have been shorter with a size, before it is compiled


class Sizes:
    """What is kept, between texts, of a model's steps for one batch and capacity.

    ready:  the sizes that are compiled; 1 is plain decoding's
    wished: how many steps would have been shorter with a size that was not
    texts:  how often texts were begun
    budget: the default one, with the times that it has measured
    """

    def __init__(self):
        self.ready = {1}
        self.wished: collections.Counter[int] = collections.Counter()
        self.texts = 0
        self.budget = Budget()

    def due(self, sizes: Iterable[int]) -> list[int]:
        """Those of a budget's sizes to compile now: the largest, and what was missed."""
        largest = max(sizes)
        missed = (size for size in sizes if size == largest or self.wished[size] >= PATIENCE)
        return [size for size in missed if size not in self.ready]


_KEPT: weakref.WeakKeyDictionary[Llama, dict[tuple[int, int], Sizes]] = weakref.WeakKeyDictionary()


def sizes_of(model: Llama, batch: int, capacity: int) -> Sizes:
    """What is kept for this model, so many texts and a cache of this capacity."""
    return _KEPT.setdefault(model, {}).setdefault((batch, capacity), Sizes())


def compile_step(model: Llama, batch: int, capacity: int, size: int):
    """Run a step of `size` nodes once, so that its programs are there; returns its logits.

    All layers are one program's, so a model of the first layer will do, but where a step is one
    program over all layers.
    """
    if model._programs(size) is layers.PROGRAM_A_LAYER:
        model = first_layers(model, 1)
    cache = model.new_cache(batch, capacity)
    tokens = np.zeros((batch, size), np.int32)
    mask = np.broadcast_to(np.eye(size, dtype=bool), (batch, size, size))
    states, new = model.states(tokens, cache, positions=tokens, mask=mask)
    logits = model.read_out(states)
    nothing = np.zeros(batch, int)
    jax.block_until_ready(
        model.commit(cache, new, select=np.zeros((batch, size), int), counts=nothing)
    )
    return logits
