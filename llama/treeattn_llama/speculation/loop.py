"""The loop that writes text: draft, pack, verify, accept, commit; without a draft, plain decoding.

Each step drafts candidates (`drafting`), packs them into a tree below the last certain token and
runs the model on all nodes in one call (`verify`), and accepts the longest path that the model
itself goes (`accept`, `reject`). The keys of the accepted path are committed, on whatever
devices their places in the cache lie; those of the others were never written.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from treeattn.idea.arrays import integer
from treeattn_llama import prefill
from treeattn_llama.inputs import Prompts, prompt_lists, stop_ids
from treeattn_llama.model import Llama
from treeattn_llama.placement import check_texts
from treeattn_llama.sampling import Chance, Sampling
from treeattn_llama.speculation.accept import Judge, descend
from treeattn_llama.speculation.agreement import agreed
from treeattn_llama.speculation.budget import Budget
from treeattn_llama.speculation.candidates import Seen
from treeattn_llama.speculation.certificate import Certificate
from treeattn_llama.speculation.drafting import Candidates, Drafting
from treeattn_llama.speculation.reject import judge_of_drawn
from treeattn_llama.speculation.sizes import compile_step, sizes_of
from treeattn_llama.speculation.verify import (
    Step,
    Tree,
    at_hand,
    likeliest_tokens,
    tree_of,
    what_the_model_says,
)

CHUNK = 1024  # tokens of a prompt that are read at once, where it is not read whole
DRAFTS_CHANCE = 2**32 - 1  # the key's number for drafts: those below it are the new tokens'


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be written: the prompts, how tokens are drawn, and when a text is over.

    prompts:  lists of token ids; max_new_tokens of each
    stop:     ids after which a text is over; capacity: of the cache, in tokens
    progress: called during prefill with the number of tokens done, those of equal prompts once
    """

    prompts: list[list[int]]
    sampling: Sampling
    max_new_tokens: int
    stop: frozenset[int]
    capacity: int
    progress: Callable[[int], None]

    @staticmethod
    def checked(model: Llama, prompts: Prompts, *, max_new_tokens, stop, capacity, **others):
        """A Task, or the error that says which argument is wrong. What is None gets its default:
        the checkpoint's end tokens, a cache of what prompts and new tokens need (rounded)."""
        prompts = prompt_lists(prompts)
        check_texts("prompts", model.place, len(prompts))
        max_new_tokens = integer("max_new_tokens", max_new_tokens, 1)
        needed = max(map(len, prompts)) + max_new_tokens - 1
        if capacity is None:
            capacity = rounded_capacity(needed, model.config.context)
        capacity = integer("capacity", capacity, 1)
        if needed > capacity:
            raise ValueError(
                f"capacity: the longest prompt and max_new_tokens need {needed}, got {capacity}"
            )
        stop = stop_ids(stop, model.tokenizer.stop if model.tokenizer else frozenset())
        return Task(prompts, max_new_tokens=max_new_tokens, stop=stop, capacity=capacity, **others)


def rounded_capacity(tokens: int, context: int) -> int:
    """A cache's room for so many tokens, or more: each room compiles a step's programs anew, and a
    few rooms serve texts of all lengths. What is not in use of them is not read.

    A power of two from 128 to 1,024, then a multiple of a quarter of the one below; no more than
    the model's `context`, unless it is asked for: 130 tokens get 256, 3,000 get 3,072.
    """
    power = 1 << (tokens - 1).bit_length()
    step = power if power <= 1024 else power // 8
    return max(tokens, min(max(128, step * -(-tokens // step)), context))


class Loop:
    """An iterator over the calls of the model: for each, the new ids of each text (a list of lists,
    [] where it is over).

    texts: prompts and what was written so far; trace: a `Step` for each call after prefill, and
    certificates: a `Certificate`, if they were asked for
    """

    def __init__(
        self, model: Llama, task: Task, draft: Any, budget: Budget | None, certify: bool = False
    ):
        sampling = task.sampling
        self.model = model
        self.task = task
        self.sizes = sizes_of(model, len(task.prompts), task.capacity)
        self.budget = self.sizes.budget if budget is None else budget
        vocabulary = model.config.vocabulary
        self.drafting = Drafting(
            draft, self.budget, vocabulary, self.sizes, sampled=not sampling.greedy
        )
        self.texts = [list(prompt) for prompt in task.prompts]
        self.begin = self.lengths
        self.end = self.begin + task.max_new_tokens
        self.over = np.zeros(len(self.texts), bool)
        self.cache = None
        self.sizes.texts += 1
        self.trace: list[Step] = []
        self.certify = certify
        self.certificates: list[Certificate] = []
        chance = jax.random.key(0) if sampling.key is None else sampling.key  # greedy has none
        self.drafting.begin(jax.random.fold_in(chance, DRAFTS_CHANCE))

    @property
    def lengths(self) -> Int[np.ndarray, " b"]:
        return np.array([len(text) for text in self.texts])

    def __iter__(self) -> "Loop":
        return self

    def __next__(self) -> list[list[int]]:
        if self.cache is None:
            return self._prefill()
        if self.over.all():
            raise StopIteration
        return self._step()

    def _prefill(self) -> list[list[int]]:
        """Read the prompts, and write the token after each. On one device, equal prompts are read
        once, and the keys copied to every text of the group."""
        batch = len(self.texts)
        self._make_ready()
        prompts = [list(text) for text in dict.fromkeys(map(tuple, self.texts))]
        if len(prompts) < batch and self.model.mesh is not None:
            prompts = self.texts
        cache = self.model.new_cache(len(prompts), self.task.capacity)
        logits, cache, states = self._read(prompts, cache)
        if len(prompts) < batch:
            group = np.array([prompts.index(text) for text in self.texts])
            logits, cache, states = jax.tree.map(lambda x: x[group], (logits, cache, states))
        self.cache = cache
        of_one = jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype)
        self.drafting.foresee(Chance(self.task.sampling, self.begin, of_one))
        first = np.zeros((batch, 1), int)
        says = what_the_model_says(self.task.sampling, at_hand(logits)[:, None], first)
        seen = None
        if states is not None:
            none = np.zeros((batch, 0), np.int32)
            likely = np.zeros((batch, 0, self.drafting.wants_likely), int)
            seen = Seen(none, none.astype(bool), likely, np.asarray(states))
        return self._take([[says(b, 0)] for b in range(batch)], seen)

    def _read(self, prompts: list[list[int]], cache):
        """(logits, cache) of the prompts, and each one's last state, or None if nobody asks."""
        progress = self.task.progress
        if not self.drafting.wants_states:
            return *self.model.prefill(prompts, cache, progress=progress), None
        return prefill.run(self.model, prompts, cache, CHUNK, progress, with_states=True)

    def _make_ready(self) -> None:
        """Compile what steps with candidates need."""
        if not self.drafting.drafts:
            return
        batch = len(self.texts)
        due = self.sizes.due(self.budget.sizes)
        same = agreed(np.array([size in due for size in self.budget.sizes]))
        for size in np.array(self.budget.sizes)[same.astype(bool)].tolist():
            logits = at_hand(compile_step(self.model, batch, self.task.capacity, size))
            what_the_model_says(self.task.sampling, logits, np.zeros((batch, size), int))(0, 0)
            if self.drafting.wants_likely:
                likeliest_tokens(logits, self.drafting.wants_likely)
            self.sizes.ready.add(size)

    def _step(self) -> list[list[int]]:
        """Draft, pack, verify, accept, commit."""
        if self.sizes.texts == 1:  # the first texts may wait for what all others will have
            self._make_ready()
        room = np.where(self.over, 0, self.end - self.lengths)
        asked = time.perf_counter()
        candidates = self.drafting.candidates(self.texts, room)
        began = time.perf_counter()
        size_for = lambda nodes: agreed(self.budget.size_for(nodes))  # noqa: E731
        tree = tree_of(candidates.beam, candidates.scores, size_for)
        logits, keys, states = self._verify(tree)
        paths, select, counts = self._accept(candidates, tree, logits)
        accepted = np.maximum(counts - 1, 0)
        if keys is not None:
            self.cache = self.model.commit(self.cache, keys, select=select, counts=counts)
        right = [path[:count] for path, count in zip(paths, accepted.tolist(), strict=True)]
        new = self._take(paths, self._seen(tree, logits, states, select, counts))
        measured = [self.budget.measured(size) for size in (tree.size, 1)]
        self.budget.took(tree.size, time.perf_counter() - began)
        if self.certify:
            planned = None if measured[0] is None else measured[0] + began - asked
            planned = None if candidates.drawn is not None else planned
            came = sum(map(len, new)), time.perf_counter() - asked
            expected = (room > 0).sum() + candidates.expected
            one = Certificate(float(expected), planned, measured[1], *came)
            self.certificates.append(one)
        self.drafting.came_out(candidates, right)
        depth = np.maximum(tree.lengths.max(axis=1) - 1, 0)
        by_text = (tree.nodes, tree.unpacked, depth, accepted, map(len, new))
        self.trace.append(Step(tree.size, *(tuple(map(int, x)) for x in by_text)))
        return new

    def _verify(self, tree: Tree):
        """(logits (b, l, vocabulary), the nodes' keys, or None where they are in the cache already,
        and the nodes' states (b, l, d), or None where the draft does not ask for them)."""
        packed = tree.packed
        wanted = self.drafting.wants_states
        if tree.size == 1 and not wanted:  # the certain tokens only: one call writes their keys
            logits, self.cache = self.model.step(
                packed.packed_beam, self.cache, counts=tree.nodes, last=True
            )
            return at_hand(logits)[:, None], None, None
        positions = (self.lengths[:, None] - 1 + packed.position_offsets).astype(np.int32)
        where = {"positions": positions, "mask": packed.attention_mask}
        if tree.size == 1 and tree.nodes.all():
            where = {}  # the next token of each text: by the program of a plain step
        states, keys = self.model.states(packed.packed_beam, self.cache, **where)
        # Several simulated devices would each do what follows.
        logits = at_hand(self.model.read_out(states))
        return logits, keys, states if wanted else None

    def _accept(self, candidates: Candidates, tree: Tree, logits):
        """(paths, select (b, l), counts (b,)): the tokens that each text goes on with, and the
        nodes whose keys belong in the cache, the first counts[b] of row select[b]."""
        counts = np.zeros_like(tree.nodes)
        select = np.zeros((len(counts), tree.size), int)
        paths = []
        judges = self._judges(candidates, tree, logits)
        for b, judge in enumerate(judges):
            m, counts[b], tokens = descend(candidates.beam[b], tree.lengths[b], judge)
            select[b, : counts[b]] = tree.packed.unpack_map[b, m, : counts[b]]
            paths.append(tokens)
        return paths, select, counts

    def _judges(self, candidates: Candidates, tree: Tree, logits) -> list[Judge]:
        """For each text, who says what comes after a candidate's token."""
        sampling = self.task.sampling
        # What a node `offset` after the certain token is followed by is new token `index`.
        index = (self.lengths - self.begin)[:, None] + tree.packed.position_offsets
        paths = tree.packed.unpack_map
        if candidates.drawn is None or sampling.greedy:
            says = what_the_model_says(sampling, logits, index)
            return [lambda m, c, _, b=b: says(b, paths[b, m, c]) for b in range(len(paths))]

        def judge(b: int) -> Judge:
            next_one = int(index[b, 0])
            of_text = candidates.beam[b], candidates.drawn, paths[b]
            decide = judge_of_drawn(sampling, logits, b, next_one, *of_text)
            return lambda *at: agreed(decide(*at))

        return [judge(b) for b in range(len(paths))]

    def _take(self, tokens: list[list[int]], seen: Seen | None) -> list[list[int]]:
        """The texts go on with these tokens, up to the first that ends them."""
        for b, new in enumerate(tokens):
            ends = [i for i, token in enumerate(new) if token in self.task.stop]
            del new[ends[0] + 1 if ends else len(new) :]
            self.texts[b] += new
            self.over[b] |= bool(ends) or len(self.texts[b]) >= self.end[b]
        self.drafting.observe(self.texts, seen)
        return tokens

    def _seen(self, tree: Tree, logits, states, select, counts) -> Seen:
        """What the draft is shown of this call."""
        tokens = tree.packed.packed_beam
        real = np.arange(tree.size) < tree.nodes[:, None]
        likely = np.zeros((*real.shape, 0), int)
        if self.drafting.wants_likely:
            likely = np.asarray(likeliest_tokens(logits, self.drafting.wants_likely))
        if states is not None:  # at the last accepted node of each text
            texts = np.arange(len(tokens))
            states = np.asarray(states)[texts, select[texts, counts - 1]]
        return Seen(tokens, real, likely, states)
