"""Speculative decoding with a prefix tree: draft, pack, verify, unpack, accept, commit.

    beam, scores = draft_candidate_tokens(draft, certain=last)
    packed, mask, offsets, unpack_map = pack(beam, candidate_lengths(scores))
    logits, new = model.extend(packed, cache, positions=context[:, None] + offsets, mask=mask)
    verified, verified_scores = (unpack(x, unpack_map) for x in likeliest(logits))
    tokens = accept_candidate_tokens(beam, scores, verified, verified_scores)
    cache = model.commit(cache, new, select=tokens.nodes(unpack_map), counts=tokens.counts)

A model's call for one token mostly waits until its weights and its cache are read from memory. So a
draft guesses how the text goes on, and one call computes the model's own token after each guess.
The guesses that the model agrees with are accepted, and the text is the one that the model writes
alone, in fewer calls.

`Writer` runs these steps in a loop. Between two calls the cache holds all tokens of a text but the
last one: `context` (B,) of them. The `last` token is certain, but the model has not read it yet, so
it is the first token of every candidate.

Arrays of candidates are (B, M, C): texts of a batch, candidates of a text, tokens of a candidate.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Integer

from treeattn import PackedBeam, pack, unpack
from treeattn.checks import Array, as_array, integer
from treeattn_llama.arguments import integers, named
from treeattn_llama.cache import Cache

# Draft


@runtime_checkable
class Draft(Protocol):
    """An object that observes texts, and proposes how they go on, for one stream at a time."""

    def observe(self, texts: list[list[int]]) -> None:
        """Get the texts so far; all their tokens are certain. The lists are copies, which the draft
        may keep or change."""

    def propose(self, budget: int) -> tuple[Any, Any]:
        """(beam, scores), both (B, M, C): candidates for each text, the best ones first.

        budget: the number of different prefixes that the next call verifies for each text; the rest
                of a larger proposal is cut off
        scores: the draft's log-probability of each token after those before it, −∞ after the end of
                a candidate. Only the −∞ are used.
        """


def draft_candidate_tokens(
    draft: Draft,
    *,
    certain: Integer[Array, " b"],
    budget: int = 7,
    vocabulary: int | None = None,
) -> tuple[Int[np.ndarray, "b m c"], Float[np.ndarray, "b m c"]]:
    """(beam, scores), both (B, M, budget + 1): the draft's candidates for the texts that it has
    observed. Every text has a candidate, if only its certain token.

    certain:    (B,) each text's last token, the first of all its candidates, with a score of 0
    budget:     the number of different prefixes of candidates that are kept, candidate by
                candidate, the certain token not counted
    vocabulary: the size of the model's, to check the draft's tokens

    Raises ValueError, with the draft's name, for a proposal that does not fit texts or vocabulary.
    """
    budget = integer("budget", budget, 0)
    certain = np.asarray(integers("certain", certain, (None,)))
    found = draft.propose(budget)
    with named(f"draft: {type(draft).__name__} proposed"):
        beam, scores = found
        beam, scores = _checked_beam(beam, scores, vocabulary)
        if len(beam) != len(certain):
            raise ValueError(f"expected candidates for {len(certain)} texts, got {len(beam)}")
    # A node is a prefix that candidates share. `pack` numbers nodes candidate by candidate, and a
    # prefix before its continuations, so the first `budget` nodes are whole beginnings.
    node = pack(beam, candidate_lengths(scores)).unpack_map
    scores = np.where(node < budget, scores, -np.inf).astype(float)
    width = min(beam.shape[2], budget)  # no candidate has more nodes
    padding = (0, 0), (0, int(beam.shape[1] == 0)), (1, budget - width)
    beam = np.pad(beam[..., :width], padding)
    scores = np.pad(scores[..., :width], padding, constant_values=-np.inf)
    has_tokens = (scores > -np.inf).any(axis=2)
    has_tokens[:, 0] = True  # the first candidate stays, for the certain token
    beam[..., 0] = certain[:, None]
    scores[..., 0] = np.where(has_tokens, 0.0, -np.inf)
    return beam, scores


def candidate_lengths(scores: Float[Array, "b m c"]) -> Int[np.ndarray, "b m"]:
    """(B, M) the number of tokens of each candidate: those before the first score of −∞."""
    real = np.asarray(scores) > -np.inf
    return np.cumprod(real, axis=2, dtype=np.int32).sum(axis=2, dtype=np.int32)


def _checked_beam(beam, scores, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A beam's tokens in int32, with 0 after a candidate's end, and its scores; or an error."""
    beam = np.asarray(integers("beam", beam, (None, None, None)))
    scores = np.asarray(as_array("scores", scores))
    if scores.shape != beam.shape:
        raise ValueError(
            f"scores: expected a score for each token, {beam.shape}, got {scores.shape}"
        )
    real = np.arange(beam.shape[2]) < candidate_lengths(scores)[..., None]
    if (scores > -np.inf)[~real].any():
        raise ValueError("scores: −∞ ends a candidate, but a finite score follows it")
    most = np.iinfo(np.int32).max if vocabulary is None else vocabulary - 1
    integers("beam", beam[real], (None,), "tokens", most)
    return np.where(real, beam, 0).astype(np.int32), scores


# Pack and verify


def pad_packed(packed: PackedBeam, size: int) -> PackedBeam:
    """The tree with padding up to `size` nodes, which see nothing and are seen by none.

    Use few sizes, because each compiles programs of its own.
    """
    tokens, mask, offsets, unpack_map = packed
    size = integer("size", size, tokens.shape[1])
    more = (0, size - tokens.shape[1])
    tokens, offsets = (np.pad(x, [(0, 0), more]) for x in (tokens, offsets))
    return PackedBeam(tokens, np.pad(mask, [(0, 0), more, more]), offsets, unpack_map)


def call_size(nodes: int, budget: int) -> int:
    """The number of tokens of a call for so many nodes: 1, 4, 16, … or the budget."""
    size = 1
    while size < nodes:
        size *= 4
    return min(size, budget)


@jax.jit
def likeliest(
    logits: Float[Array, "*b vocabulary"],
) -> tuple[Int[Array, "*b"], Float[Array, "*b"]]:
    """(tokens, scores): the likeliest token of each distribution, and its log-probability."""
    top = jnp.max(logits, axis=-1)
    return jnp.argmax(logits, axis=-1), top - jax.nn.logsumexp(logits, axis=-1)


# Accept


class Accepted(list):
    """A list of each text's new tokens, and the candidate that they follow.

    candidates: (B,) the candidate whose beginning was accepted, by its number
    counts:     (B,) the number of its accepted nodes, the certain one included, and of new tokens
    """

    def __init__(self, tokens: list[list[int]], candidates, counts):
        super().__init__(tokens)
        self.candidates = candidates
        self.counts = counts

    def nodes(self, unpack_map: Int[Array, "b m c"]) -> Int[np.ndarray, "b c"]:
        """The accepted candidate's packed nodes, of which the first `counts` were accepted."""
        unpack_map = integers("unpack_map", unpack_map, (len(self), None, None))
        return np.asarray(unpack_map)[np.arange(len(self)), self.candidates]


def accept_candidate_tokens(
    beam: Integer[Array, "b m c"],
    scores: Float[Array, "b m c"],
    verified_beam: Integer[Array, "b m c"],
    verified_scores: Float[Array, "b m c"],
) -> Accepted:
    """The tokens that each text goes on with: those accepted, and the model's own after them.

    beam, scores:    (B, M, C) as from `draft_candidate_tokens`, the certain token first
    verified_beam:   (B, M, C) the model's own token *after* beam[b, m, : c + 1], likeliest or
                     drawn, the same for all candidates with this prefix
    verified_scores: (B, M, C) its log-probability

    A candidate is followed as long as each of its tokens is the model's own after those before it.
    The tokens of the longest such path are accepted, and the model's token after them is new. The
    scores only say where candidates end, because a text must not depend on the draft.

    For [7, 3, 5] and [7, 3, 6], and a model with 3 after 7, 6 after 3, and 9 after 6, the second
    candidate's three nodes are accepted, and the text goes on with 3, 6, 9.

    Raises ValueError if shapes do not fit, or a finite score follows −∞.
    """
    beam, scores = _checked_beam(beam, scores)
    verified = np.asarray(integers("verified_beam", verified_beam, beam.shape))
    if np.shape(verified_scores) != beam.shape:
        raise ValueError(
            f"verified_scores: expected shape {beam.shape}, got {np.shape(verified_scores)}"
        )
    batch, _, width = beam.shape
    lengths = candidate_lengths(scores)
    right = beam[..., 1:] == verified[..., :-1]
    right &= np.arange(1, width) < lengths[..., None]
    counts = np.where(lengths > 0, 1 + np.cumprod(right, axis=2).sum(axis=2), 0)
    candidates = counts.argmax(axis=1)
    counts = counts.max(axis=1)
    path = verified[np.arange(batch), candidates]
    tokens = [row[:n].tolist() for row, n in zip(path, counts, strict=True)]
    return Accepted(tokens, candidates, counts)


# Commit, and the loop


class State(NamedTuple):
    """The state of a `Writer` between two calls of the model. A call replaces it by a new one at
    once, so an interrupt leaves one or the other."""

    texts: tuple[list[int], ...]  # the prompts with their new tokens
    over: tuple[bool, ...]  # whether each text has ended
    cache: Cache | None = None  # None if the texts must be read (again)
    steps: int = 0  # the number of calls after the texts were read


@dataclasses.dataclass(eq=False)
class Writer(Iterator[list[list[int]]]):
    """An iterator that calls the model, and yields the new ids of each text: a list of lists, []
    for a text that is over. An interrupt during a call loses no token: the next call goes on from
    the last state."""

    model: Any  # a `Llama`
    prompts: list[list[int]]
    ending: Any  # finds the end of a text: a `text.Ending`
    sampling: Any  # chooses tokens from logits: a `sampling.Sampling`
    capacity: int  # of the cache, in tokens
    draft: Draft | None
    budget: int  # the most tokens of a call, the certain one included

    def __post_init__(self):
        self.begin = np.array([len(prompt) for prompt in self.prompts])
        self.state = State(tuple(self.prompts), (False,) * len(self.prompts))

    @property
    def steps(self) -> int:
        """The number of calls of the model so far, after the texts were read."""
        return self.state.steps

    def __next__(self) -> list[list[int]]:
        before = self.state.texts
        if all(self.state.over):
            raise StopIteration
        state = self._read() if self.state.cache is None else self._step()
        new = [text[len(old) :] for text, old in zip(state.texts, before, strict=True)]
        self.state = state  # last, because an interrupt after it would lose the new tokens
        return new

    def _read(self) -> State:
        """Read the texts, and choose the token after each."""
        texts = self.state.texts
        cache = self.model.new_cache(len(texts), self.capacity)
        # A text that is over may be longer than the cache. Its last token is not read.
        logits, cache = self.model.prefill([text[: self.capacity] for text in texts], cache)
        index = self._lengths() - self.begin
        new = self.sampling.next_tokens(logits[:, None], index[:, None])
        return self._after(new.tolist(), cache)

    def _step(self) -> State:
        """Draft, pack, verify, unpack, accept, commit."""
        context = self._lengths() - 1  # the tokens in the cache
        beam, scores = self._candidates()
        packed = pack(beam, candidate_lengths(scores))
        packed = pad_packed(packed, call_size(packed.packed_beam.shape[1], self.budget))
        tokens, mask, offsets, unpack_map = packed
        cache = self.state.cache
        logits, keys = self.model.extend(
            tokens, cache, positions=context[:, None] + offsets, mask=mask
        )
        # The token after a node has this number in its text, for every draft.
        index = (context + 1 - self.begin)[:, None] + offsets
        verified = unpack(self.sampling.next_tokens(logits, index), unpack_map)
        accepted = accept_candidate_tokens(beam, scores, verified, np.zeros(beam.shape))
        # `commit` donates the cache, so after an interrupt from here on the texts are read again.
        self.state = self.state._replace(cache=None)
        nodes = accepted.nodes(unpack_map)
        cache = self.model.commit(cache, keys, select=nodes, counts=accepted.counts)
        return self._after(accepted, cache)._replace(steps=self.steps + 1)

    def _candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(beam, scores) as far as the cache has room; a text that is over has no candidates."""
        texts = self.state.texts
        certain = np.array([text[-1] for text in texts], np.int32)
        beam, scores = certain[:, None, None], np.zeros((len(texts), 1, 1))
        if self.draft is not None:
            self.draft.observe([list(text) for text in texts])
            vocabulary = self.model.config.vocabulary
            beam, scores = draft_candidate_tokens(
                self.draft, certain=certain, budget=self.budget - 1, vocabulary=vocabulary
            )
        room = self.capacity + 1 - self._lengths()  # for the certain token and its candidates
        room = np.where(self.state.over, 0, room)[:, None, None]
        return beam, np.where(np.arange(beam.shape[2]) < room, scores, -np.inf)

    def _after(self, tokens: list[list[int]], cache: Cache) -> State:
        """The state after the texts have got these tokens, up to their ends."""
        texts = list(self.state.texts)
        over = list(self.state.over)
        for b, (text, begin) in enumerate(zip(texts, self.begin.tolist(), strict=True)):
            if not over[b]:
                longer = text + tokens[b]
                end = self.ending.at(longer, begin, len(text))
                over[b] = end is not None
                texts[b] = longer[:end]
        return self.state._replace(texts=tuple(texts), over=tuple(over), cache=cache)

    def _lengths(self) -> Int[np.ndarray, " b"]:
        return np.array([len(text) for text in self.state.texts])
