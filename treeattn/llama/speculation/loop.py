"""Speculative decoding: the text that the model would write alone, in fewer calls of it.

Each step drafts candidates, packs them into a tree below the last certain token, runs the model on
all nodes in one call, and accepts the longest path that the model itself goes. The keys of the
accepted path are committed, on whatever devices their places in the cache lie; those of the others
were never written.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float, Int, Key

from treeattn.idea.arrays import Array
from treeattn.llama.model import Llama
from treeattn.llama.speculation.accept import Judge, KeyDice, descend, rejection_judge
from treeattn.llama.speculation.budget import Budget
from treeattn.llama.speculation.candidates import (
    Drawn,
    Seen,
    after_certain,
    beam_of,
    best_nodes,
    candidate_lengths,
    checked_beam,
    padded,
    path_scores,
)
from treeattn.llama.speculation.drafts import make_draft
from treeattn.llama.text import nucleus, stream
from treeattn.trees.beam import PackedBeam, pack
from treeattn.trees.token_tree import TokenTree


@dataclasses.dataclass(frozen=True)
class Step:
    """One model call after prefill. Tuples have an entry for each text, 0 where it was over.

    size:     tokens of the call for each text, with padding
    nodes:    real ones, the certain token included
    unpacked: the candidates' tokens before packing
    depth:    of the longest candidate; accepted: tokens that were
    new:      tokens that the text got, the model's own included
    """

    size: int
    nodes: tuple[int, ...]
    unpacked: tuple[int, ...]
    depth: tuple[int, ...]
    accepted: tuple[int, ...]
    new: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    tokens: the new ids, as the prompts came: a list, or a list of lists
    steps:  model calls after prefill; trace: what happened in each of them
    """

    tokens: list[int] | list[list[int]]
    steps: int
    trace: tuple[Step, ...]

    @property
    def tokens_a_step(self) -> float:
        """New tokens for each text and step, over all steps that it took part in; 1 without any."""
        taken = sum(n > 0 for step in self.trace for n in step.new)
        return sum(sum(step.new) for step in self.trace) / taken if taken else 1.0


def generate(
    model: Llama,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    draft: str | object | None = None,
    budget: int | Budget | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: Key[Array, ""] | None = None,
    stop: Sequence[int] | None = None,
    capacity: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Generation:
    """Continue a prompt, a list of token ids, or several, a list of such lists of any lengths.

    draft:  None (plain decoding), one of `DRAFTS` by name, or an object that proposes and
            observes (`Draft`)
    budget: None: adaptive, up to 16 tokens a call (`Budget`); a number: all that is drafted, up to
            so many, the certain token included; or a Budget
    The others are as in `stream`, and so is the text, for every draft: greedy, token for token;
    sampling, with the same key, draw for draw, since each position has its own key. (Candidates
    that were drawn at random, `Drawn`, are accepted by rejection: then the text has the same
    distribution.) A call of 16 tokens may round otherwise than one of 1: at a near tie, within the
    rounding of the weights' dtype, the texts may part, both being the model's.

    Candidates that go on beyond max_new_tokens, and so beyond the room in the cache, are cut off.

    Raises ValueError as `stream` does, for a draft of another vocabulary before any work, and for
    tokens or scores from a draft that are none (`draft_candidate_tokens`).
    """
    prompt_ids = prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else prompt_ids
    single = len(prompt_ids) > 0 and isinstance(prompt_ids[0], int | np.integer)
    prompts = [prompt_ids] if single else prompt_ids
    tokens, trace = [[] for _ in prompts], []
    for new, step in _run(
        model, prompts, draft, budget, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, key=key, stop=stop, capacity=capacity, progress=progress,
    ):  # fmt: skip
        for text, ids in zip(tokens, new, strict=True):
            text += ids
        trace += [] if step is None else [step]
    return Generation(tokens[0] if single else tokens, len(trace), tuple(trace))


def speculate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    draft: str | object | None = "suffix",
    budget: int | Budget | None = None,
    **options,
) -> Iterator[list[list[int]]]:
    """`stream`, several tokens at a time: for each call of the model the new ids of each prompt.

    draft, budget: as in `generate`; options: as in `stream`. A text that is over gets []. The
    first list comes from prefill. One after the other, they are the text that `stream` gives.
    """
    return (new for new, _ in _run(model, prompts, draft, budget, **options))


def speculate_text(
    model: Llama, prompt: Sequence[int], **options
) -> Iterator[tuple[str, Step | None]]:
    """The text that continues one prompt, in pieces as they come, and how each came about;
    `options` as in `speculate`."""
    if model.tokenizer is None:
        raise ValueError("model: this checkpoint has no tokenizer")
    draft, budget = options.pop("draft", "suffix"), options.pop("budget", None)
    ids, shown = [], ""
    for (new,), step in _run(model, [prompt], draft, budget, **options):
        ids += new
        text = model.tokenizer.decode(ids).rstrip(
            "\ufffd"
        )  # half of a character: wait for the rest
        yield text[len(shown) :], step
        shown = text
    yield model.tokenizer.decode(ids)[len(shown) :], None


def _run(model, prompts, draft, budget, **options) -> Iterator[tuple[list[list[int]], Step | None]]:
    """For each call of the model, the new ids of each prompt, and how they came about."""
    plain = stream(model, prompts, **options)  # has checked the options, and done nothing yet
    draft = make_draft(draft, model)
    if draft is None:
        return _plain(plain, len(prompts))
    if not isinstance(budget, Budget):
        budget = Budget() if budget is None else Budget(budget, adaptive=False)
    return _speculative(_Loop(model, prompts, draft, budget, **options))


def _plain(tokens: Iterator[list[int | None]], batch: int):
    for i, ids in enumerate(tokens):
        new = [[] if token is None else [token] for token in ids]
        ones = tuple(map(len, new))
        none = (0,) * batch
        yield new, Step(1, ones, ones, none, none, ones) if i else None


def _speculative(loop: "_Loop"):
    yield loop.first(), None
    while not loop.over.all():
        yield loop.step()


class _Loop:
    """The texts, their cache, and the steps that both take."""

    def __init__(
        self, model, prompts, draft, budget, *, max_new_tokens, temperature=0.0, top_p=1.0,
        key=None, stop=None, capacity=None, progress=lambda tokens: None,
    ):  # fmt: skip
        self.model, self.draft, self.budget, self.key = model, draft, budget, key
        self.temperature, self.top_p, self.progress = temperature, top_p, progress
        self.texts = [[int(token) for token in prompt] for prompt in prompts]
        self.begin = np.array([len(prompt) for prompt in prompts])
        self.end = self.begin + max_new_tokens
        self.capacity = capacity or max(int(self.end.max()) - 1, 1)
        if stop is None:
            stop = model.tokenizer.stop if model.tokenizer else ()
        self.stop, self.over = frozenset(stop), np.zeros(len(prompts), bool)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(text) for text in self.texts])

    def first(self) -> list[list[int]]:
        """Prefill, and the token after it."""
        cache = self.model.new_cache(len(self.texts), self.capacity)
        logits, self.cache = self.model.prefill(self.texts, cache, progress=self.progress)
        judge = self._judge(np.asarray(logits)[:, None], np.zeros((len(self.texts), 1), int))
        return self._take([[judge(b, 0)] for b in range(len(self.texts))], None)

    def step(self) -> tuple[list[list[int]], Step]:
        """Draft, pack, verify, accept."""
        beam, scores, drawn, expected = self._draft()
        began, lengths = time.perf_counter(), candidate_lengths(scores)
        packed = pack(beam, lengths)
        nodes = np.diagonal(packed.attention_mask, axis1=1, axis2=2).sum(axis=1)
        size = self.budget.padded(int(nodes.max()))
        packed = padded(packed, size)
        logits, new = self._call(packed, nodes)

        # A node stands `offset` after the certain token; the judge says what comes after it.
        judge = self._judge(logits, (self.lengths - self.begin)[:, None] + packed.position_offsets)
        counts, select, paths = np.zeros_like(nodes), np.zeros((len(beam), size), int), []
        for b, path in enumerate(packed.unpack_map):
            decide = lambda m, c, further, b=b, path=path: judge(b, path[m, c])  # noqa: E731
            if drawn is not None and self.temperature > 0:
                decide = self._rejecting(b, beam[b], drawn, path, logits)
            m, counts[b], tokens = descend(beam[b], lengths[b], decide)
            select[b, : counts[b]] = path[m, : counts[b]]
            paths.append(tokens)
        if new is not None:
            self.cache = self.model.commit(self.cache, new, select=select, counts=counts)
        tokens = self._take(paths, self._seen(packed, nodes, logits))
        self.budget.took(size, time.perf_counter() - began)
        accepted = np.maximum(counts - 1, 0)
        self.budget.came_out(expected, int(accepted.sum()))
        depth = np.maximum(lengths.max(axis=1) - 1, 0)
        found = (x.tolist() for x in (nodes, lengths.sum(axis=1), depth, accepted))
        return tokens, Step(size, *map(tuple, found), tuple(map(len, tokens)))

    def _draft(self) -> tuple[np.ndarray, np.ndarray, Drawn | None, float]:
        """(beam, scores, what it was drawn from, how many are expected to be accepted): candidates
        below each text's last token, as far as there is room."""
        batch, drawn, expected = len(self.texts), None, 0.0
        beam, scores = np.zeros((batch, 0, 0), int), np.zeros((batch, 0, 0))
        if _agreed(self.budget.drafts()):
            began = time.perf_counter()
            found = self.draft.propose(self.budget.most - 1)
            self.budget.took(0, time.perf_counter() - began)
            if isinstance(found, Drawn):  # leaving out some would change how they are distributed
                drawn, vocabulary = found, self.model.config.vocabulary
                beam, scores = checked_beam(found.beam, found.scores, vocabulary)
            else:
                beam, scores, expected = self._most_promising(found)
        certain = np.array([text[-1] for text in self.texts])
        beam, scores = _agreed_arrays(*after_certain(beam, scores, certain))
        room = np.where(self.over, 0, self.end - self.lengths)[:, None, None]
        return beam, np.where(np.arange(beam.shape[2]) < room, scores, -np.inf), drawn, expected

    def _most_promising(self, found) -> tuple[np.ndarray, np.ndarray, float]:
        """(beam, scores, expected): as much of a proposal as is worth verifying."""
        (tokens, parents, sizes), scores = best_nodes(
            found, self.budget.most - 1, self.model.config.vocabulary
        )
        chances = np.exp(path_scores(parents, scores))
        chances[self.over] = 0
        n = self.budget.choose(chances)
        tree = TokenTree(tokens[:, :n], parents[:, :n], np.minimum(sizes, n))
        return *beam_of(tree, scores[:, :n]), float(chances[:, :n].sum())

    def _call(self, packed: PackedBeam, nodes: np.ndarray):
        """(logits (b, l, vocabulary), the nodes' keys, or None where they are committed)."""
        tokens, new = packed.packed_beam, None
        if tokens.shape[1] == 1:  # a plain step
            logits, self.cache = self.model.step(tokens, self.cache, counts=nodes, last=True)
            logits = logits[:, None]
        else:
            positions = (self.lengths[:, None] - 1 + packed.position_offsets).astype(np.int32)
            logits, new = self.model.extend(
                tokens, self.cache, positions=positions, mask=packed.attention_mask
            )
        # Several simulated devices would each do all that follows.
        return (logits if self.model.mesh is None else np.asarray(logits)), new

    def _judge(self, logits, index: np.ndarray) -> Callable[[int, int], int]:
        """(b, node) -> the model's own token after the node, the text's new token `index`."""
        if self.temperature == 0:
            tokens = np.asarray(_argmax(logits))
            return lambda b, node: _agreed(int(tokens[b, node]))

        def draw(b, node):
            key = jax.random.fold_in(self.key, int(index[b, node]))
            token = _draw(logits, b, node, key, self.temperature, self.top_p, cut=self.top_p < 1)
            return _agreed(int(token))

        return draw

    def _rejecting(self, b: int, beam: np.ndarray, drawn: Drawn, path: np.ndarray, logits) -> Judge:
        """The judge of text b's candidates that were drawn; path (m, c) are their nodes."""

        def model(m, c):
            args = logits, b, path[m, c], self.temperature, self.top_p
            return np.asarray(_probabilities(*args, cut=self.top_p < 1), np.float64)

        key = jax.random.fold_in(self.key, int(self.lengths[b] - self.begin[b]))
        # Before the drawn tokens comes the certain one, which nothing was drawn from.
        distributions = np.pad(drawn.distributions[b], [(0, 0), (1, 0), (0, 0)])
        dice = KeyDice(jax.random.fold_in(key, b))
        judge = rejection_judge(beam, distributions, model, dice, drawn.replacement)
        return lambda m, c, further: _agreed(judge(m, c, further))

    def _take(self, tokens: list[list[int]], seen: Seen | None) -> list[list[int]]:
        """The texts go on with these tokens, up to the first that ends them."""
        for b, new in enumerate(tokens):
            ends = [i for i, token in enumerate(new) if token in self.stop]
            del new[ends[0] + 1 if ends else len(new) :]
            self.texts[b] += new
            self.over[b] |= bool(ends) or len(self.texts[b]) >= self.end[b]
        self.draft.observe(self.texts, seen)
        return tokens

    def _seen(self, packed: PackedBeam, nodes: np.ndarray, logits) -> Seen:
        likely = min(getattr(self.draft, "likely", 0), self.model.config.vocabulary)
        real = np.arange(packed.packed_beam.shape[1]) < nodes[:, None]
        return Seen(packed.packed_beam, real, np.asarray(_top(logits, likely)))


def _agreed(x):
    """An int or bool that all processes agree on: the first one's. Rounding and clocks differ."""
    if jax.process_count() == 1:
        return x
    return type(x)(multihost_utils.broadcast_one_to_all(np.int32(x)))


def _agreed_arrays(beam: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first process's candidates, in all of them."""
    if jax.process_count() == 1:
        return beam, scores
    rows, width = multihost_utils.broadcast_one_to_all(np.array(beam.shape[1:], np.int32))
    grown = np.zeros((len(beam), rows, width), np.int32), np.zeros((len(beam), rows, width))
    if beam.shape == grown[0].shape:
        grown = beam, scores
    return tuple(np.asarray(x) for x in multihost_utils.broadcast_one_to_all(grown))


@jax.jit
def likeliest(
    logits: Float[Array, "*b vocabulary"],
) -> tuple[Int[Array, "*b"], Float[Array, "*b"]]:
    """(tokens, scores): the likeliest token of each distribution, and its log-probability."""
    token = jnp.argmax(logits, axis=-1)
    top = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, top - jax.nn.logsumexp(logits, axis=-1)


_argmax = jax.jit(functools.partial(jnp.argmax, axis=-1))


@functools.partial(jax.jit, static_argnames="k")
def _top(logits, k):
    return jax.lax.top_k(logits, k)[1]


def _cut(logits, b, node, temperature, top_p, cut):
    logits = logits[b, node] / temperature
    return nucleus(logits, top_p) if cut else logits


@functools.partial(jax.jit, static_argnames="cut")
def _draw(logits, b, node, key, temperature, top_p, *, cut):
    """What `treeattn.llama.text.sample` draws for text b of the batch with this key."""
    row = _cut(logits, b, node, temperature, top_p, cut)
    all_texts = jnp.zeros((len(logits), len(row)), row.dtype).at[b].set(row)
    return jax.random.categorical(key, all_texts, axis=-1)[b]


@functools.partial(jax.jit, static_argnames="cut")
def _probabilities(logits, b, node, temperature, top_p, *, cut):
    return jax.nn.softmax(_cut(logits, b, node, temperature, top_p, cut))
