"""Verify: the candidates packed into a tree, and what the model says after each of its nodes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from treeattn.idea.arrays import Array
from treeattn_llama.sampling import Sampling, settled
from treeattn_llama.speculation.agreement import agreed
from treeattn_llama.speculation.candidates import candidate_lengths, pad_packed
from treeattn.trees.beam import PackedBeam, pack


@dataclasses.dataclass(frozen=True)
class Step:
    """One model call after prefill. Tuples have an entry for each text, 0 where it was over.

    size:     tokens of the call for each text, with padding
    nodes:    real ones, the certain token included
    unpacked: the tokens of as many candidates as there are leaves, before packing
    depth:    of the longest candidate; accepted: tokens that were
    new:      tokens that the text got, the model's own included
    """

    size: int
    nodes: tuple[int, ...]
    unpacked: tuple[int, ...]
    depth: tuple[int, ...]
    accepted: tuple[int, ...]
    new: tuple[int, ...]


class Tree(NamedTuple):
    """A step's candidates, those of each text packed into a tree below its certain token.

    packed:   l nodes for each text, with padding
    lengths:  (B, M) of the candidates, the certain token included; 0 where there is none
    nodes:    (B,) real ones; unpacked: (B,) tokens of as many candidates as there are leaves
    """

    packed: PackedBeam
    lengths: Int[np.ndarray, "b m"]
    nodes: Int[np.ndarray, " b"]
    unpacked: Int[np.ndarray, " b"]

    @property
    def size(self) -> int:
        return self.packed.packed_beam.shape[1]


def tree_of(beam: np.ndarray, scores: np.ndarray, size_for: Callable[[int], int]) -> Tree:
    """The candidates (B, M, C) as trees of `size_for(n)` nodes, n those of the largest."""
    lengths = candidate_lengths(scores)
    packed = pack(beam, lengths)
    nodes = np.diagonal(packed.attention_mask, axis1=1, axis2=2).sum(axis=1)
    leaves = packed.attention_mask.sum(axis=1) == 1  # that only they themselves attend to
    unpacked = (leaves * (packed.position_offsets + 1)).sum(axis=1)
    packed = pad_packed(packed, size_for(int(nodes.max())))
    return Tree(packed, lengths, nodes, unpacked)


def at_hand(logits: Float[Array, "..."]) -> Float[Array, "..."]:
    """As NumPy's array where that copies nothing, on CPUs; elsewhere they stay on their device, and
    only what is made of them goes to the host."""
    if isinstance(logits, np.ndarray):
        return logits
    on_host = all(device.platform == "cpu" for device in logits.devices())
    return np.asarray(logits) if on_host else logits


def what_the_model_says(
    sampling: Sampling, logits: Float[Array, "b l vocabulary"], index: Int[np.ndarray, "b l"]
) -> Callable[[int, int], int]:
    """(b, node) -> the token that the model puts after a node of text b's tree.

    logits: as `at_hand` gives them
    index:  after the node comes the text's new token number index[b, node], from 0. It is drawn
            with that number's key, so that it is the one that plain decoding draws
    """
    index = index.astype(np.int32)
    if sampling.greedy:
        of = _on_host if isinstance(logits, np.ndarray) else _on_device
        if of is _on_host and jax.process_count() == 1:  # of the nodes that the walk comes to
            return lambda b, node: int(_on_host(logits[b, node]))
        tokens = agreed(np.asarray(of(logits), np.int32))
        return lambda b, node: int(tokens[b, node])
    if logits.shape[1] == 1:  # without candidates: of all texts at once
        texts = np.arange(len(logits))
        drawn = sampling.draw_at(logits[:, 0], index[:, 0], texts)
        tokens = agreed(np.asarray(drawn, np.int32))
        return lambda b, node: int(tokens[b])

    def draw(b, node):
        row = _after(logits, b, node)[None]
        return agreed(int(sampling.draw_at(row, index[b, node : node + 1], np.array([b]))[0]))

    return draw


_on_host = functools.partial(np.argmax, axis=-1)
_on_device = jax.jit(lambda logits: jax.lax.argmax(logits, logits.ndim - 1, np.int32))
_taken = jax.jit(lambda logits, b, node: logits[b, node])


def _after(logits, b, node):
    """The logits (vocabulary,) after a node: what is computed from them is then one program for
    trees of any size."""
    return logits[b, node] if isinstance(logits, np.ndarray) else _taken(logits, b, node)


def probabilities_after(logits, b, node, temperature, top_p, *, cut):
    """(vocabulary,) what a token after node (b, node) is drawn from."""
    return _probabilities(_after(logits, b, node), temperature, top_p, cut=cut)


@functools.partial(jax.jit, static_argnames="cut")
def _probabilities(row, temperature, top_p, *, cut):
    return jax.nn.softmax(settled(row, temperature, top_p, cut))


@functools.partial(jax.jit, static_argnames="k")
def likeliest_tokens(logits: Float[Array, "b l vocabulary"], k: int) -> Int[Array, "b l k"]:
    """The k likeliest tokens after each node, best first."""
    return jax.lax.top_k(logits, k)[1]
