"""The loop of speculative decoding: draft, pack, verify, accept, commit."""

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from treeattn.llama.speculation.accept import descend
from treeattn.llama.speculation.candidates import (
    Drawn,
    Seen,
    after_certain,
    ask,
    candidate_lengths,
    of_each,
    padded,
    ranked,
)
from treeattn.llama.speculation.most_expected import MostExpectedDraft
from treeattn.llama.speculation.sampling import Sampling, likeliest_tokens
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


class Candidates(NamedTuple):
    """What is verified at a step, and who proposed it.

    beam, scores: (B, M, C), the certain token in the first column
    drawn:        what the candidates were drawn from, if they were
    draft:        (B,) whose candidates each text has, as an index into `Loop.drafts`
    expected:     (B,) how many of them that draft expects to be accepted
    """

    beam: np.ndarray
    scores: np.ndarray
    drawn: Drawn | None
    draft: np.ndarray
    expected: np.ndarray


DRAFTS_CHANCE = 2**32 - 1  # the key's number for drafts: those below it are the new tokens'


class Loop:
    """The texts, their cache, and the steps that both take."""

    def __init__(
        self, model, prompts, draft, budget, *, max_new_tokens, temperature=0.0, top_p=1.0,
        key=None, stop=None, capacity=None, progress=lambda tokens: None,
    ):  # fmt: skip
        self.model, self.draft, self.budget, self.progress = model, draft, budget, progress
        self.sampling = Sampling(temperature, top_p, key)
        self.texts = [list(prompt) for prompt in prompts]
        self.begin = np.array([len(prompt) for prompt in prompts])
        self.end = self.begin + max_new_tokens
        self.capacity = capacity or max(int(self.end.max()) - 1, 1)
        if stop is None:
            stop = model.tokenizer.stop if model.tokenizer else ()
        self.stop, self.over = frozenset(stop), np.zeros(len(prompts), bool)
        self.drafts = draft.drafts if isinstance(draft, MostExpectedDraft) else (draft,)
        budget.begin([type(each).__name__ for each in self.drafts])
        if hasattr(draft, "begin"):
            chance = jax.random.key(0) if key is None else key  # None: greedy, which chance is not
            draft.begin(jax.random.fold_in(chance, DRAFTS_CHANCE))

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(text) for text in self.texts])

    def first(self) -> list[list[int]]:
        """Prefill, and the token after it."""
        cache = self.model.new_cache(len(self.texts), self.capacity)
        logits, self.cache = self.model.prefill(self.texts, cache, progress=self.progress)
        own = self.sampling.own(np.asarray(logits)[:, None], np.zeros((len(self.texts), 1), int))
        return self._take([[agreed(own(b, 0))] for b in range(len(self.texts))], None)

    def step(self) -> tuple[list[list[int]], Step]:
        """Draft, pack, verify, accept."""
        candidates = self._draft()
        beam, scores = candidates.beam, candidates.scores
        began, lengths = time.perf_counter(), candidate_lengths(scores)
        packed = pack(beam, lengths)
        nodes = np.diagonal(packed.attention_mask, axis1=1, axis2=2).sum(axis=1)
        leaves = packed.attention_mask.sum(axis=1) == 1  # that only they themselves attend to
        unpacked = (leaves * (packed.position_offsets + 1)).sum(axis=1)
        size = self.budget.padded(int(nodes.max()))
        packed = padded(packed, size)
        logits, new, states = self._call(packed, nodes)

        # What a node `offset` after the certain token is followed by is new token `index`.
        index = (self.lengths - self.begin)[:, None] + packed.position_offsets
        own = self.sampling.own(logits, index)
        counts, select, paths = np.zeros_like(nodes), np.zeros((len(beam), size), int), []
        for b, path in enumerate(packed.unpack_map):
            judge = lambda m, c, further, b=b, path=path: own(b, path[m, c])  # noqa: E731
            if candidates.drawn is not None and self.sampling.temperature > 0:
                drawn = beam[b], candidates.drawn, path
                judge = self.sampling.rejecting(logits, b, index[b, 0], *drawn)
            decide = lambda *at, judge=judge: agreed(judge(*at))  # noqa: E731
            m, counts[b], tokens = descend(beam[b], lengths[b], decide)
            select[b, : counts[b]] = path[m, : counts[b]]
            paths.append(tokens)
        if new is not None:
            self.cache = self.model.commit(self.cache, new, select=select, counts=counts)
        if states is not None:
            texts = np.arange(len(beam))
            states = np.asarray(states)[texts, select[texts, counts - 1]]
        tokens = self._take(paths, self._seen(packed, nodes, logits, states))
        self.budget.took(size, time.perf_counter() - began)
        accepted, depth = np.maximum(counts - 1, 0), np.maximum(lengths.max(axis=1) - 1, 0)
        for i, record in enumerate(self.budget.records):
            its = candidates.draft == i
            record.came_out(float(candidates.expected[its].sum()), int(accepted[its].sum()))
        found = (tuple(x.tolist()) for x in (nodes, unpacked, depth, accepted))
        return tokens, Step(size, *found, tuple(map(len, tokens)))

    def _draft(self) -> Candidates:
        """Candidates below each text's last token, as far as there is room."""
        batch, drawn = len(self.texts), None
        found = {}
        for i in range(len(self.drafts)):
            if agreed(self.budget.asks(i)):
                found[i] = self._ask(i)
        if len(self.drafts) == 1 and found:
            drawn = found[0][2]
        draft, expected = np.zeros(batch, int), np.zeros(batch)
        if not found:
            beam, scores = np.zeros((batch, 0, 0), np.int32), np.zeros((batch, 0, 0))
        elif drawn is not None:  # leaving out some would change how they are distributed
            beam, scores = drawn.beam, np.asarray(drawn.scores, np.float64)
        else:
            beam, scores, draft, expected = self._best(found)
        certain = np.array([text[-1] for text in self.texts])
        beam, scores = agreed_arrays(*after_certain(beam, scores, certain))
        room = np.where(self.over, 0, self.end - self.lengths)[:, None, None]
        scores = np.where(np.arange(beam.shape[2]) < room, scores, -np.inf)
        return Candidates(beam, scores, drawn, draft, expected)

    def _ask(self, i: int) -> tuple[np.ndarray, np.ndarray, Drawn | None]:
        """What draft i proposes, checked, and how long it took."""
        began, draft = time.perf_counter(), self.drafts[i]
        texts, vocabulary = len(self.texts), self.model.config.vocabulary
        found = ask(draft, self.budget.most - 1, vocabulary, texts)
        self.budget.drafted(time.perf_counter() - began, i)
        if found[2] is not None and self.sampling.temperature > 0 and not hasattr(draft, "begin"):
            raise TypeError(
                f"draft: {type(draft).__name__} draws at random, but has no method begin(key) to "
                f"take its chance from: over keys, the text would not be the model's"
            )
        return found

    def _best(self, found) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(beam, scores, draft, expected), as in `Candidates`, of what the budget chooses."""
        going, asked = ~self.over, list(found)
        ranks, chances = zip(*(ranked(*found[i][:2]) for i in asked), strict=True)
        which = np.zeros(len(self.texts), int)
        which[going], nodes = self.budget.choose([x[going] for x in chances], asked)
        kept = [
            (beam, np.where(rank < nodes, scores, -np.inf))
            for (beam, scores, _), rank in zip(found.values(), ranks, strict=True)
        ]
        expected = np.stack([x[:, :nodes].sum(axis=1) for x in chances])
        expected = np.where(going, expected[which, np.arange(len(which))], 0.0)
        return *of_each(kept, which), np.array(asked)[which], expected

    def _call(self, packed: PackedBeam, nodes: np.ndarray):
        """(logits (b, l, vocabulary), the nodes' keys, or None where they are committed, and the
        nodes' states, if the draft asks for them)."""
        tokens, new, states = packed.packed_beam, None, None
        wanted = getattr(self.draft, "states", False)
        if tokens.shape[1] == 1 and not wanted:  # a plain step
            logits, self.cache = self.model.step(tokens, self.cache, counts=nodes, last=True)
            logits = logits[:, None]
        else:
            positions = (self.lengths[:, None] - 1 + packed.position_offsets).astype(np.int32)
            states, new = self.model.states(
                tokens, self.cache, positions=positions, mask=packed.attention_mask
            )
            logits = self.model.read_out(states)
        # Several simulated devices would each do all that follows.
        logits = logits if self.model.mesh is None else np.asarray(logits)
        return logits, new, states if wanted else None

    def _take(self, tokens: list[list[int]], seen: Seen | None) -> list[list[int]]:
        """The texts go on with these tokens, up to the first that ends them."""
        for b, new in enumerate(tokens):
            ends = [i for i, token in enumerate(new) if token in self.stop]
            del new[ends[0] + 1 if ends else len(new) :]
            self.texts[b] += new
            self.over[b] |= bool(ends) or len(self.texts[b]) >= self.end[b]
        self.draft.observe(self.texts, seen)
        return tokens

    def _seen(self, packed: PackedBeam, nodes: np.ndarray, logits, state) -> Seen:
        likely = min(getattr(self.draft, "likely", 0), self.model.config.vocabulary)
        real = np.arange(packed.packed_beam.shape[1]) < nodes[:, None]
        after = likeliest_tokens(logits, likely) if likely else np.zeros((*real.shape, 0), int)
        return Seen(packed.packed_beam, real, np.asarray(after), state)


def agreed(x):
    """An int or bool that all processes agree on: the first one's. Rounding and clocks differ."""
    if jax.process_count() == 1:
        return x
    return type(x)(multihost_utils.broadcast_one_to_all(np.int32(x)))


def agreed_arrays(beam: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first process's candidates, in all of them."""
    if jax.process_count() == 1:
        return beam, scores
    rows, width = multihost_utils.broadcast_one_to_all(np.array(beam.shape[1:], np.int32))
    grown = np.zeros((len(beam), rows, width), np.int32), np.zeros((len(beam), rows, width))
    if beam.shape == grown[0].shape:
        grown = beam, scores
    return tuple(np.asarray(x) for x in multihost_utils.broadcast_one_to_all(grown))
