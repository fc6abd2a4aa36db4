"""Speculative decoding with a prefix tree: draft, pack, verify, unpack, accept, commit.

    beam, scores = draft_candidate_tokens(draft, certain=last)
    packed, mask, offsets, unpack_map = pack(beam, candidate_lengths(scores))
    logits, new = model.extend(packed, cache, positions=context[:, None] + offsets, mask=mask)
    verified, verified_scores = (unpack(x, unpack_map) for x in likeliest(logits))
    tokens = accept_candidate_tokens(beam, scores, verified, verified_scores)
    cache = model.commit(cache, new, select=tokens.nodes(unpack_map), counts=tokens.counts)

A model's call for one token mostly waits for its weights and its cache to be read from memory. A
call for several tokens reads them once for all. So a draft guesses what may follow, and one call
says what the model itself would say after each guess. The guesses that it would have made are
accepted: the text is the one that the model writes alone, in fewer calls. (Up to rounding: where
two tokens are as good as equally likely, a call of another size may take the other one.)

`Writer` runs these steps in a loop, with tokens that are likeliest or drawn. Between two calls the
cache holds every token of a text but the last: `context` (B,) of them. The `last` one is certain,
but the model has not read it yet: it goes with the next call, as the first token of every
candidate.

Arrays of candidates are (B, M, C): texts of a batch, candidates of a text, tokens of a candidate.
Candidates of different lengths lie in one array, with scores of −∞ after their ends.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Integer

from treeattn import PackedBeam, pack, unpack
from treeattn_llama.arguments import Array, as_array, integer, integers
from treeattn_llama.cache import Cache

# Draft


@runtime_checkable
class Draft(Protocol):
    """Anything that observes texts, and proposes what may follow them.

    A draft never decides what the text says; it decides how much of it one model call confirms. It
    serves one stream at a time.
    """

    def observe(self, texts: list[list[int]]) -> None:
        """The texts so far, every token of them certain. The lists are copies: the draft may keep
        or change them."""

    def propose(self, budget: int) -> tuple[Any, Any]:
        """(beam, scores), both (B, M, C): candidates for each text, the best ones first.

        budget: how many tokens the next call verifies for each text. A prefix that candidates share
                counts once, and what is proposed beyond the budget is cut off
        beam:   token ids
        scores: the log-probability that the draft gives each token after those before it; −∞ where
                a candidate has ended. Nothing else is read of them
        """


def draft_candidate_tokens(
    draft: Draft,
    *,
    certain: Integer[Array, " b"],
    budget: int = 7,
    vocabulary: int | None = None,
) -> tuple[Int[np.ndarray, "b m c"], Float[np.ndarray, "b m c"]]:
    """(beam, scores), both (B, M, budget + 1): what the draft thinks may follow the texts that it
    observed, after each text's certain token.

    certain:    (B,) each text's last token, the first of all its candidates, with a score of 0;
                every text has a candidate, if only this token
    budget:     how many different prefixes of candidates are kept, candidate by candidate, the
                certain token not counted
    vocabulary: the model's, to check the draft's tokens against

    Raises TypeError for what is no proposal, and ValueError for tokens outside the vocabulary and
    for scores that do not fit. The errors name the draft.
    """
    budget = integer("budget", budget, 0)
    certain = np.asarray(integers("certain", certain, (None,)))
    found = draft.propose(budget)
    try:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(f"expected (beam, scores), got {type(found).__name__} {found!s:.40}")
        beam, scores = _checked_beam(*found, vocabulary)
        if len(beam) != len(certain):
            raise ValueError(f"expected candidates for {len(certain)} texts, got {len(beam)}")
    except (TypeError, ValueError) as error:
        raise type(error)(f"draft: {type(draft).__name__} proposed: {error}") from None
    # A node is a prefix that candidates share. They are numbered candidate by candidate, a prefix
    # before what goes on with it, so that the first `budget` of them are whole beginnings.
    node = pack(beam, candidate_lengths(scores)).unpack_map
    scores = np.where(node < budget, scores, -np.inf)
    batch, rows, width = beam.shape
    kept = min(width, budget)  # no candidate has more nodes
    tokens = np.zeros((batch, max(rows, 1), budget + 1), np.int32)
    log = np.full(tokens.shape, -np.inf)
    tokens[..., 0] = certain[:, None]
    tokens[:, :rows, 1 : kept + 1] = beam[..., :kept]
    log[:, :rows, 1 : kept + 1] = scores[..., :kept]
    goes_on = (log[..., 1:] > -np.inf).any(axis=2)
    goes_on[:, 0] = True  # one of them stays, if only for the certain token
    log[..., 0] = np.where(goes_on, 0.0, -np.inf)
    return tokens, log


def candidate_lengths(scores: Float[Array, "b m c"]) -> Int[np.ndarray, "b m"]:
    """(B, M) the tokens of each candidate: those before the first score of −∞."""
    real = np.asarray(scores) > -np.inf
    return np.cumprod(real, axis=2, dtype=np.int32).sum(axis=2, dtype=np.int32)


def _checked_beam(beam, scores, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A beam's tokens in int32, 0 after a candidate's end, and its scores; or an error."""
    beam = np.asarray(integers("beam", beam, (None, None, None)))
    scores = _checked_scores("scores", scores, beam.shape)
    real = np.arange(beam.shape[2]) < candidate_lengths(scores)[..., None]
    if (scores > -np.inf)[~real].any():
        raise ValueError("scores: −∞ ends a candidate, but a finite score follows it")
    most = np.iinfo(np.int32).max if vocabulary is None else vocabulary - 1
    integers("beam", beam[real], (None,), "tokens", most)
    return np.where(real, beam, 0).astype(np.int32), scores


def _checked_scores(name: str, scores, shape: tuple[int, ...]) -> np.ndarray:
    """The scores as an array, or an error unless there is one for each token."""
    scores = np.asarray(as_array(name, scores))
    if scores.shape != shape:
        raise ValueError(f"{name}: expected a score for each token, {shape}, got {scores.shape}")
    return scores


# Pack


def pad_packed(packed: PackedBeam, size: int) -> PackedBeam:
    """The tree with padding up to `size` nodes, which see nothing and are seen by none. Each size
    of a call compiles its own programs, so use few sizes."""
    tokens, mask, offsets, unpack_map = packed
    size = integer("size", size, tokens.shape[1])
    more = (0, size - tokens.shape[1])
    tokens, offsets = (np.pad(x, [(0, 0), more]) for x in (tokens, offsets))
    return PackedBeam(tokens, np.pad(mask, [(0, 0), more, more]), offsets, unpack_map)


def call_size(nodes: int, budget: int) -> int:
    """How many tokens the call has that takes so many nodes: 1, 4, 16, … or the budget."""
    size = 1
    while size < nodes:
        size *= 4
    return min(size, budget)


# Verify


@jax.jit
def likeliest(
    logits: Float[Array, "*b vocabulary"],
) -> tuple[Int[Array, "*b"], Float[Array, "*b"]]:
    """(tokens, scores): the likeliest token of each distribution, and its log-probability."""
    token = jnp.argmax(logits, axis=-1)
    top = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, top - jax.nn.logsumexp(logits, axis=-1)


# Accept


class Accepted(list):
    """The tokens that each text goes on with, a list for each; and which candidate they follow.

    candidates: (B,) the one whose beginning was accepted, as a row of the beam
    counts:     (B,) how many of its nodes were, the certain one included: those whose keys belong
                in the cache, as many as the text has new tokens
    """

    def __init__(self, tokens: list[list[int]], candidates, counts):
        super().__init__(tokens)
        self.candidates = candidates
        self.counts = counts

    def nodes(self, unpack_map: Int[Array, "b m c"]) -> Int[np.ndarray, "b c"]:
        """The accepted candidate's packed nodes, of which the first `counts` were accepted.

        unpack_map: as from `pack`
        """
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
    verified_beam:   (B, M, C) the token that the model itself puts *after* beam[b, m, : c + 1],
                     likeliest or drawn: one for each prefix, whichever candidate it is read from
    verified_scores: (B, M, C) its log-probability

    Candidates are followed as far as each token is the model's own after those before it. What the
    longest such path says after the certain token is accepted, and the model's token after it is
    new: one token at least for each text that has a candidate, at most C. Scores decide nothing,
    since a text must not depend on who drafted it; they say where candidates end.

    Raises ValueError when shapes do not fit, or a finite score follows −∞.
    """
    beam, scores = _checked_beam(beam, scores)
    verified = np.asarray(integers("verified_beam", verified_beam, beam.shape))
    _checked_scores("verified_scores", verified_scores, beam.shape)
    return accept(beam, candidate_lengths(scores), verified)


def accept(
    beam: Int[np.ndarray, "b m c"], lengths: Int[np.ndarray, "b m"], verified: np.ndarray
) -> Accepted:
    """`accept_candidate_tokens`, of arrays that are known to fit.

    For [7, 3, 5] and [7, 3, 6], and a model that says 3 after 7, 6 after 3, and 9 after 6, the
    second candidate's three nodes are accepted, and the text goes on with 3, 6, 9.
    """
    batch, rows, width = beam.shape
    if rows == 0:
        nothing = np.zeros(batch, np.int32)
        return Accepted([[] for _ in range(batch)], nothing, nothing)
    right = beam[..., 1:] == verified[..., :-1]
    right &= np.arange(1, width) < lengths[..., None]
    counts = np.where(lengths > 0, 1 + np.cumprod(right, axis=2).sum(axis=2), 0)
    candidates = counts.argmax(axis=1)
    counts = counts.max(axis=1)
    says = verified[np.arange(batch), candidates]
    tokens = [row[:n].tolist() for row, n in zip(says, counts, strict=True)]
    return Accepted(tokens, candidates, counts)


# Commit, and the loop


class State(NamedTuple):
    """Where a `Writer` stands. Each call of the model makes a new one, which takes the place of the
    old one at once: whoever interrupts finds one of the two.

    texts: prompts and what was written so far
    over:  whether each text has ended
    cache: of all tokens but each text's last; None: the texts have to be read (again)
    new:   what the last call has brought each text
    steps: calls after the texts were read
    """

    texts: tuple[list[int], ...]
    over: tuple[bool, ...]
    cache: Cache | None = None
    new: tuple[list[int], ...] = ()
    steps: int = 0


@dataclasses.dataclass(eq=False)
class Writer:
    """An iterator over the calls of the model: for each, the new ids of each text (a list of lists,
    [] where it is over).

    model:    a `Llama`
    prompts:  lists of token ids
    ending:   says where a text ends (`text.Ending`): `at(new, before)` is how many of its new ids
              belong to it, if it ends within those after the first `before`, else None
    sampling: takes tokens from logits (`sampling.Sampling`)
    capacity: of the cache, in tokens
    draft:    a `Draft`, or None
    budget:   the tokens of one call, the certain one included

    Nothing is kept between texts but compiled programs. An interrupt while a call is made loses no
    token: the next one goes on from the last state.
    """

    model: Any
    prompts: list[list[int]]
    ending: Any
    sampling: Any
    capacity: int
    draft: Draft | None
    budget: int

    def __post_init__(self):
        self.begin = np.array([len(prompt) for prompt in self.prompts])
        self.state = State(tuple(map(list, self.prompts)), (False,) * len(self.prompts))

    @property
    def steps(self) -> int:
        """Calls of the model after the texts were read, so far."""
        return self.state.steps

    def __iter__(self) -> "Writer":
        return self

    def __next__(self) -> list[list[int]]:
        if all(self.state.over):
            raise StopIteration
        state = self._read() if self.state.cache is None else self._step()
        new = list(map(list, state.new))
        self.state = state  # and nothing after it, where an interrupt would lose what is new
        return new

    def _read(self) -> State:
        """Read the texts, and write the token after each."""
        texts = self.state.texts
        cache = self.model.empty_cache(len(texts), self.capacity)
        # All but the last token of a text that is over may fill the cache: nobody reads on there.
        logits, cache = self.model.prefill([text[: self.capacity] for text in texts], cache)
        index = self._lengths() - self.begin
        new = self.sampling.next_tokens(logits[:, None], index[:, None])
        return self._after(new.tolist(), cache)

    def _step(self) -> State:
        """Draft, pack, verify, unpack, accept, commit."""
        context = self._lengths() - 1  # what the cache holds
        beam, lengths = self._candidates()
        packed = pack(beam, lengths)
        packed = pad_packed(packed, call_size(packed.packed_beam.shape[1], self.budget))
        tokens, mask, offsets, unpack_map = packed
        logits, keys = self.model.extend(
            tokens, self.state.cache, positions=context[:, None] + offsets, mask=mask
        )
        # What comes after a node is the text's new token with this number, whoever drafted it.
        index = (context + 1 - self.begin)[:, None] + offsets
        says = self.sampling.next_tokens(logits, index)
        accepted = accept(beam, lengths, unpack(says, unpack_map))
        cache = self.state.cache
        # `commit` gives the cache up: after an interrupt from here on the texts are read anew.
        self.state = self.state._replace(cache=None)
        nodes = accepted.nodes(unpack_map)
        cache = self.model.commit(cache, keys, select=nodes, counts=accepted.counts)
        state = self._after(accepted, cache)
        return state._replace(steps=state.steps + 1)

    def _candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(beam, lengths) after each text's certain last token, no more than there is room for; a
        text that is over has no candidates."""
        texts = self.state.texts
        over = np.array(self.state.over)
        certain = np.array([text[-1] for text in texts], np.int32)
        if self.draft is None:
            return certain[:, None, None], (~over)[:, None].astype(np.int32)
        self.draft.observe([list(text) for text in texts])
        vocabulary = self.model.config.vocabulary
        beam, scores = draft_candidate_tokens(
            self.draft, certain=certain, budget=self.budget - 1, vocabulary=vocabulary
        )
        room = self.capacity + 1 - self._lengths()  # of the certain token and its candidates
        lengths = np.minimum(candidate_lengths(scores), room[:, None])
        return beam, np.where(over[:, None], 0, lengths)

    def _after(self, tokens: list[list[int]], cache: Cache) -> State:
        """The state after the texts have gone on with these tokens, up to where they end."""
        state = self.state
        texts, over, added = [], [], []
        for b, text in enumerate(state.texts):
            written = text[self.begin[b] :]
            new = [] if state.over[b] else tokens[b]
            end = self.ending.at(written + new, len(written))
            if end is not None:
                new = new[: end - len(written)]
            texts.append(text + new)
            over.append(state.over[b] or end is not None)
            added.append(new)
        return state._replace(texts=tuple(texts), over=tuple(over), cache=cache, new=tuple(added))

    def _lengths(self) -> Int[np.ndarray, " b"]:
        return np.array([len(text) for text in self.state.texts])
