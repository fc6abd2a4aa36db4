"""Speculative decoding with a prefix tree: draft, pack, verify, unpack, accept, commit.

    beam, scores = draft_candidate_tokens(draft, certain=last)
    packed, mask, offsets, unpack_map = pack(beam, candidate_lengths(scores))
    logits, keys = model.extend(packed, cache, positions=context + offsets, mask=mask)
    verified, verified_scores = (unpack(x, unpack_map) for x in likeliest(logits))
    tokens = accept_candidate_tokens(beam, scores, verified, verified_scores)
    cache = model.commit(cache, keys, select=tokens.nodes(unpack_map), counts=tokens.counts)

A model's call for several tokens takes hardly longer than for one, where reading its weights and
its cache is what takes the time. So a draft guesses what may follow, and one call says what the
model itself would say after each guess. The guesses that it would have made are accepted: the text
is the one that the model writes alone, in fewer calls. `Writer` is these lines in a loop.

Between two calls the cache holds every token of a text but the last: `context` of them. The `last`
one is certain, but the model has not read it: it goes with the next call, as the first token of
every candidate.

Arrays of candidates are (B, M, C): texts of a batch, candidates of a text, tokens of a candidate.
Candidates of different lengths lie in one array, with scores of −∞ after their ends.
"""

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

    A draft never decides what the text says; it decides how much of it one model call confirms.
    """

    def observe(self, texts: list[list[int]]) -> None:
        """The texts so far, every token of them certain: lists of its own, to keep or to change."""

    def propose(self, budget: int) -> tuple[Any, Any]:
        """(beam, scores), both (B, M, C): candidates for each text, the best ones first.

        beam:   token ids; of all candidates' prefixes the first `budget` are kept
        scores: the log-probability that the draft gives each token after those before it; −∞ where
                a candidate has ended
        """


def draft_candidate_tokens(
    draft: Draft,
    *,
    budget: int = 7,
    certain: Integer[Array, " b"] | None = None,
    vocabulary: int | None = None,
) -> tuple[Int[np.ndarray, "b m c"], Float[np.ndarray, "b m c"]]:
    """(beam, scores), both (B, M, C): what the draft thinks may follow the texts it observed.

    budget:     how many different prefixes of candidates are kept, candidate by candidate, the
                certain token not counted
    certain:    (B,) each text's last token, which becomes the first of its candidates, with a score
                of 0; every text then has a candidate, if only this token
    vocabulary: the model's, to check the draft's tokens against

    Raises TypeError for what is no proposal, and ValueError for tokens outside the vocabulary, for
    scores whose shape does not fit or that are NaN or above 0. The errors name the draft.
    """
    budget = integer("budget", budget, 0)
    found = draft.propose(budget)
    try:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(f"expected (beam, scores), got {type(found).__name__} {found!s:.40}")
        beam, scores = _checked_beam(*found, vocabulary)
        if certain is not None and len(beam) != len(certain):
            raise ValueError(f"expected candidates for {len(certain)} texts, got {len(beam)}")
    except (TypeError, ValueError) as error:
        raise type(error)(f"draft: {type(draft).__name__} proposed: {error}") from None
    # A node is a prefix that candidates share. They are numbered candidate by candidate, a prefix
    # before what goes on with it, so that the first `budget` of them are whole beginnings.
    node = pack(beam, candidate_lengths(scores)).unpack_map
    scores = np.where(node < budget, scores, -np.inf)
    return (beam, scores) if certain is None else _after_certain(beam, scores, certain)


def candidate_lengths(scores: Float[Array, "b m c"]) -> Int[np.ndarray, "b m"]:
    """(B, M) the tokens of each candidate: those before the first score of −∞."""
    real = np.asarray(scores) > -np.inf
    return np.cumprod(real, axis=2, dtype=np.int32).sum(axis=2, dtype=np.int32)


def _checked_beam(beam, scores, vocabulary: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A beam's tokens in int32 and its scores, or an error."""
    beam = np.asarray(integers("beam", beam, (None, None, None)))
    scores = _checked_scores("scores", scores, beam.shape)
    real = np.arange(beam.shape[2]) < candidate_lengths(scores)[..., None]
    if (scores > -np.inf)[~real].any():
        raise ValueError("scores: −∞ ends a candidate, but a finite score follows it")
    most = np.iinfo(np.int32).max if vocabulary is None else vocabulary - 1
    integers("beam", beam[real], (None,), "tokens", most)
    return np.where(real, beam, 0).astype(np.int32), scores


def _checked_scores(name: str, scores, shape: tuple[int, ...]) -> np.ndarray:
    """The scores as float64, or an error."""
    scores = np.asarray(as_array(name, scores), np.float64)
    if scores.shape != shape:
        raise ValueError(f"{name}: expected a score for each token, {shape}, got {scores.shape}")
    if not (scores <= 1e-5).all():  # as far as rounding goes; nor is a NaN
        raise ValueError(f"{name}: expected logarithms of probabilities, got NaN or one above 0")
    return np.minimum(scores, 0)


def _after_certain(beam, scores, certain) -> tuple[np.ndarray, np.ndarray]:
    """The candidates with a certain token (B,) before each, and at least one for every text."""
    batch, rows, width = beam.shape
    full = np.zeros((batch, max(rows, 1), width + 1), np.int32)
    log = np.full(full.shape, -np.inf)
    full[..., 0] = np.asarray(certain)[:, None]
    full[:, :rows, 1:] = beam
    log[:, :rows, 1:] = scores
    goes_on = (log[..., 1:] > -np.inf).any(axis=2)
    goes_on[:, 0] = True  # one of them stays, if only for the certain token
    log[..., 0] = np.where(goes_on, 0.0, -np.inf)
    return full, log


# Pack


def pad_packed(packed: PackedBeam, size: int) -> PackedBeam:
    """The same nodes, and padding that nobody sees, up to `size`. Each size of a call compiles
    programs of its own: let there be few."""
    tokens, mask, offsets, unpack_map = map(np.asarray, packed)
    more = (0, size - tokens.shape[1])
    tokens, offsets = (np.pad(x, [(0, 0), more]).astype(np.int32) for x in (tokens, offsets))
    return PackedBeam(tokens, np.pad(mask, [(0, 0), more, more]), offsets, unpack_map)


def call_size(nodes: int, budget: int) -> int:
    """How many tokens the call has that takes so many nodes: 1, 4, 16, … or the budget."""
    size = 1
    while size < nodes:
        size *= 4
    return min(size, max(budget, nodes))


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
    """The tokens that each text goes on with, a list for each; and which candidate has them.

    candidates: (B,) the one whose beginning was accepted, as a row of the beam
    counts:     (B,) how many of its tokens were, a certain first one included: those whose keys
                belong in the cache, 0 where a text has no candidates
    """

    def __init__(self, tokens: list[list[int]], candidates, counts):
        super().__init__(tokens)
        self.candidates = np.array(candidates, np.int32)
        self.counts = np.array(counts, np.int32)

    def nodes(
        self, unpack_map: Int[Array, "b m c"], width: int | None = None
    ) -> Int[np.ndarray, "b width"]:
        """The packed nodes of what was accepted, in order, 0 after the first `counts` of a row:
        [[0, 1, 4, 0]] where counts is [3].

        unpack_map: as from `pack`; width: of the result, the beam's when None
        """
        unpack_map = integers("unpack_map", unpack_map, (len(self), None, None))
        width = unpack_map.shape[2] if width is None else width
        width = integer("width", width, int(self.counts.max(initial=0)))
        found = np.zeros((len(self), width), np.int32)
        for b, count in enumerate(self.counts.tolist()):
            if count:
                found[b, :count] = unpack_map[b, self.candidates[b], :count]
        return found


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

    The result is the longest path along which candidates are the model's own tokens, without the
    certain one: one token at least for each text that has a candidate, at most C. Scores decide
    nothing, since a text must not depend on who drafted it; they say where candidates end.

    Raises ValueError when shapes do not fit, a score is NaN or above 0, a finite one follows −∞, or
    a verified one is not finite.
    """
    beam, scores = _checked_beam(beam, scores)
    verified = np.asarray(integers("verified_beam", verified_beam, beam.shape))
    verified_scores = _checked_scores("verified_scores", verified_scores, beam.shape)
    if not np.isfinite(verified_scores[scores > -np.inf]).all():
        raise ValueError("verified_scores: expected finite ones, got −∞ at a candidate's token")
    return accept(beam, candidate_lengths(scores), verified)


def accept(
    beam: Int[np.ndarray, "b m c"], lengths: Int[np.ndarray, "b m"], verified: np.ndarray
) -> Accepted:
    """`accept_candidate_tokens`, of arrays that are known to fit."""
    walks = [_longest_path(*text) for text in zip(beam, lengths, verified, strict=True)]
    return Accepted(
        [tokens for _, tokens in walks], [m for m, _ in walks], [len(t) for _, t in walks]
    )


def _longest_path(beam, lengths, verified) -> tuple[int, list[int]]:
    """(candidate, the model's tokens along it) for one text: (1, [3, 6, 9]) for [7, 3, 5] and
    [7, 3, 6], and a model that says 3 after 7, 6 after 3, and 9 after 6."""
    alive = np.flatnonzero(lengths > 0)
    tokens = []
    while len(alive):
        m = int(alive[0])
        tokens.append(int(verified[m, len(tokens)]))
        c = len(tokens)
        further = alive[lengths[alive] > c]
        alive = further[beam[further, c] == tokens[-1]] if len(further) else further
    return (m, tokens) if tokens else (0, [])


# Commit, and the loop


class Step(NamedTuple):
    """One model call after the prompts. Tuples have an entry for each text, 0 where it was over.

    size:  tokens of the call for each text, with padding
    nodes: real ones, the certain token included
    new:   tokens that the text got: those accepted, and the model's own after them
    """

    size: int
    nodes: tuple[int, ...]
    new: tuple[int, ...]


class State(NamedTuple):
    """Where a `Writer` stands. Each call of the model makes a new one, which takes the place of the
    old one at once: whoever interrupts finds one of the two.

    texts: prompts and what was written so far
    over:  which of them are
    cache: of all tokens but each text's last; None: the texts have to be read (again)
    new:   what was written last
    trace: every step so far
    """

    texts: tuple[list[int], ...]
    over: tuple[bool, ...]
    cache: Cache | None = None
    new: tuple[list[int], ...] = ()
    trace: tuple[Step, ...] = ()


class Writer:
    """An iterator over the calls of the model: for each, the new ids of each text (a list of lists,
    [] where it is over).

    model:    a `Llama`
    prompts:  lists of token ids
    ending:   what ends a text: `text.Ending`
    sampling: how tokens are taken from logits
    capacity: of the cache, in tokens
    draft:    a `Draft`, or None
    budget:   the tokens of one call, the certain one included

    Nothing is kept between texts but compiled programs. An interrupt at any point loses no token:
    the next call goes on from the last state.
    """

    def __init__(self, model, prompts, ending, sampling, capacity, draft, budget):
        self.model = model
        self.ending = ending
        self.sampling = sampling
        self.capacity = capacity
        self.draft = draft
        self.budget = budget
        self.begin = np.array([len(prompt) for prompt in prompts])
        self.state = State(tuple(map(list, prompts)), (False,) * len(prompts))

    @property
    def trace(self) -> tuple[Step, ...]:
        """A `Step` for each call after the prompts, so far."""
        return self.state.trace

    def __iter__(self) -> "Writer":
        return self

    def __next__(self) -> list[list[int]]:
        if all(self.state.over):
            raise StopIteration
        self.state = self._read() if self.state.cache is None else self._step()
        return list(map(list, self.state.new))

    def _read(self) -> State:
        """Read the texts, and write the token after each."""
        texts = self.state.texts
        cache = self.model.empty_cache(len(texts), self.capacity)
        logits, cache = self.model.prefill(texts, cache)
        index = self._lengths() - self.begin
        new = self.sampling.next_tokens(logits[:, None], index[:, None])
        return self._after(new.tolist(), cache)

    def _step(self) -> State:
        """Draft, pack, verify, unpack, accept, commit."""
        context = self._lengths() - 1  # what the cache holds
        beam, lengths = self._candidates()
        packed = pack(beam, lengths)
        nodes = packed.attention_mask.diagonal(axis1=1, axis2=2).sum(axis=1)
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
        select = accepted.nodes(unpack_map, tokens.shape[1])
        cache = self.model.commit(cache, keys, select=select, counts=accepted.counts)
        state = self._after(accepted, cache)
        step = Step(tokens.shape[1], tuple(nodes.tolist()), tuple(map(len, state.new)))
        return state._replace(trace=(*state.trace, step))

    def _candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(beam, lengths) after each text's certain last token, no more than there is room for; a
        text that is over has no candidates."""
        texts = self.state.texts
        over = np.array(self.state.over)
        certain = np.array([text[-1] for text in texts], np.int32)
        if self.draft is None or self.budget == 1:
            return certain[:, None, None], (~over)[:, None].astype(np.int32)
        self.draft.observe([list(text) for text in texts])
        vocabulary = self.model.config.vocabulary
        beam, scores = draft_candidate_tokens(
            self.draft, budget=self.budget - 1, certain=certain, vocabulary=vocabulary
        )
        room = self.capacity + 1 - self._lengths()  # of the certain token and its candidates
        lengths = np.minimum(candidate_lengths(scores), room[:, None])
        return beam, np.where(over[:, None], 0, lengths)

    def _after(self, tokens: list[list[int]], cache: Cache) -> State:
        """The state after the texts have gone on with these tokens, up to where they end."""
        state = self.state
        texts, over, told = [], [], []
        for b, text in enumerate(state.texts):
            written = text[self.begin[b] :]
            new = [] if state.over[b] else tokens[b]
            end = self.ending.at(written + new, len(written))
            if end is not None:
                new = new[: end - len(written)]
            texts.append(text + new)
            over.append(state.over[b] or end is not None)
            told.append(new)
        return state._replace(texts=tuple(texts), over=tuple(over), cache=cache, new=tuple(told))

    def _lengths(self) -> Int[np.ndarray, " b"]:
        return np.array([len(text) for text in self.state.texts])
