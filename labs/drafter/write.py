"""A greedy text by a model and its drafter: one call of the model confirms several tokens.

The loop of `treeattn_llama.generate` once more, since a drafter that goes on from the model's last
state needs what `generate` does not hand to drafts: that state.
"""

from typing import NamedTuple

import numpy as np

from labs.drafter.recurrent import Drafter, Shared, draft_beam
from treeattn import pack, unpack
from treeattn_llama import (
    Llama,
    accept_candidate_tokens,
    candidate_lengths,
    likeliest,
    pad_packed,
)

ROOM = 256  # a cache holds a multiple of so many tokens: texts of about a length share programs


class Written(NamedTuple):
    """New token ids, and how many of them each call of the model brought."""

    tokens: list[int]
    by_call: list[int]


def write(
    model: Llama,
    prompt: list[int],
    new_tokens: int,
    drafter: tuple[Drafter, Shared] | None = None,
    *,
    width: int = 4,
    length: int = 4,
) -> Written:
    """The model's own greedy text after a prompt of at least two ids, up to a stop token.

    drafter: as `load_drafter` returns it; None: a token a call
    width, length: of the beam that is drafted before each call
    """
    size = 1 + width * length  # nodes of a call, filled up: one program
    needed = len(prompt) + new_tokens + size
    cache = model.new_cache(1, -(-needed // ROOM) * ROOM)
    _, cache = model.prefill([prompt[:-1]], cache)
    text = list(prompt)
    state = None
    by_call = []
    stop = () if model.tokenizer is None else model.tokenizer.stop
    while len(text) < len(prompt) + new_tokens:
        beam, scores = _candidates(text[-1], state, drafter, width, length)
        packed = pack(beam, candidate_lengths(scores))
        tokens, mask, offsets, unpack_map = pad_packed(packed, 1 if drafter is None else size)
        context = len(text) - 1
        x, keys = model.hidden_states(tokens, cache, positions=context + offsets, mask=mask)
        says, log = (unpack(np.asarray(y), unpack_map) for y in likeliest(model.read_out(x)))
        accepted = accept_candidate_tokens(beam, scores, says, log)
        nodes = accepted.nodes(unpack_map)
        cache = model.commit(cache, keys, select=nodes, counts=accepted.counts)
        state = x[:, nodes[0, accepted.counts[0] - 1]]
        (new,) = accepted
        by_call.append(len(new))
        text += new
        if ends := [i for i, token in enumerate(new) if token in stop]:
            text = text[: len(text) - len(new) + ends[0] + 1]
            break
    return Written(text[len(prompt) :][:new_tokens], by_call)


def _candidates(last: int, state, drafter, width: int, length: int):
    """(beam, scores), (1, M, C): the certain last token, and what the drafter thinks follows it."""
    if drafter is None or state is None:
        return np.array([[[last]]], np.int32), np.zeros((1, 1, 1))
    certain = np.array([last], np.int32)
    found = draft_beam(*drafter, state, certain, width=width, length=length)
    beam, scores = (np.asarray(x) for x in found)
    first = np.full((1, beam.shape[1], 1), last, np.int32)
    scores = np.concatenate([np.zeros(first.shape), np.minimum(scores, 0)], axis=2)
    return np.concatenate([first, beam], axis=2), scores
