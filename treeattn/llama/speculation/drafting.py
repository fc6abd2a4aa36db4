"""Draft: what is verified at a step, as the drafts propose it and the budget chooses."""

import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Key

from treeattn.idea.arrays import Array
from treeattn.llama.speculation.agreement import agreed, agreed_beam
from treeattn.llama.speculation.budget import Budget
from treeattn.llama.speculation.candidates import (
    Drawn,
    Seen,
    Texts,
    after_certain,
    ask,
    of_each,
    ranked,
)
from treeattn.llama.speculation.most_expected import MostExpectedDraft
from treeattn.llama.speculation.sizes import Sizes


class Candidates(NamedTuple):
    """What is verified at a step, and who proposed it.

    beam, scores: (B, M, C), the certain token in the first column
    drawn:        what the candidates were drawn from, if they were
    draft:        (B,) whose candidates each text has, as an index into `Drafting.drafts`
    expected:     (B,) how many of them that draft expects to be accepted
    """

    beam: Int[np.ndarray, "b m c"]
    scores: Float[np.ndarray, "b m c"]
    drawn: Drawn | None
    draft: Int[np.ndarray, " b"]
    expected: Float[np.ndarray, " b"]


class Drafting:
    """The drafts of a loop (none for plain decoding), and the budget that says which of them to
    ask, and how much of what they propose to verify.

    sampled: whether tokens are drawn at random, so that drafts must not have chance of their own
    sizes:   of steps, that are compiled
    """

    def __init__(self, draft: Any, budget: Budget, vocabulary: int, sizes: Sizes, *, sampled: bool):
        self.draft = draft
        self.drafts = draft.drafts if isinstance(draft, MostExpectedDraft) else (draft,)
        if draft is None:
            self.drafts = ()
        self.budget = budget
        self.vocabulary = vocabulary
        self.sampled = sampled
        self.wants_states = getattr(draft, "states", False)
        self.wants_likely = min(getattr(draft, "likely", 0), vocabulary)
        budget.begin([type(each).__name__ for each in self.drafts], sizes.ready, sizes.wished)

    def begin(self, key: Key[Array, ""]) -> None:
        """New texts: whoever draws at random draws with this key."""
        if hasattr(self.draft, "begin"):
            self.draft.begin(key)

    def observe(self, texts: Texts, seen: Seen | None) -> None:
        if self.draft is not None:
            self.draft.observe(texts, seen)

    def candidates(
        self, texts: Texts, going: Bool[np.ndarray, " b"], room: Int[np.ndarray, " b"]
    ) -> Candidates:
        """Candidates below each text's last token, of at most `room` tokens with it.

        going: which texts are not over. Text b has room[b] more tokens, 0 where it is over
        """
        found = {}
        for i in range(len(self.drafts)):
            if agreed(self.budget.asks(i)):
                found[i] = self._ask(i, len(texts))
        chosen = self._chosen(found, going)
        certain = np.array([text[-1] for text in texts])
        beam, scores = agreed_beam(*after_certain(chosen.beam, chosen.scores, certain))
        scores = np.where(np.arange(beam.shape[2]) < room[:, None, None], scores, -np.inf)
        return chosen._replace(beam=beam, scores=scores)

    def _ask(self, i: int, batch: int) -> tuple[np.ndarray, np.ndarray, Drawn | None]:
        """What draft i proposes for the texts, checked; how long it took is noted."""
        draft = self.drafts[i]
        began = time.perf_counter()
        found = ask(draft, self.budget.most - 1, self.vocabulary, batch)
        self.budget.drafted(time.perf_counter() - began, i)
        if found[2] is not None and self.sampled and not hasattr(draft, "begin"):
            raise TypeError(
                f"draft: {type(draft).__name__} draws at random, but has no method begin(key) to "
                f"take its chance from: over keys, the text would not be the model's"
            )
        return found

    def _chosen(self, found: dict, going: np.ndarray) -> Candidates:
        """Of what the drafts that were asked have proposed, what the budget chooses."""
        nobody = np.zeros(len(going), int)
        nothing = np.zeros(len(going))
        if not found:
            none = (len(going), 0, 0)
            return Candidates(np.zeros(none, np.int32), np.zeros(none), None, nobody, nothing)
        drawn = found[0][2] if len(self.drafts) == 1 else None
        if drawn is not None:  # leaving out some would change how they are distributed
            scores = np.asarray(drawn.scores, np.float64)
            return Candidates(drawn.beam, scores, drawn, nobody, nothing)
        return self._best(found, going)

    def _best(self, found: dict, going: np.ndarray) -> Candidates:
        """For each text the draft that expects most, and the best nodes of its candidates."""
        asked = list(found)
        ranks = []
        chances = []
        for beam, scores, _ in found.values():
            rank, chance = ranked(beam, scores)
            ranks.append(rank)
            chances.append(chance)
        which = np.zeros(len(going), int)
        which[going], nodes = self.budget.choose([x[going] for x in chances], asked)
        kept = []
        for (beam, scores, _), rank in zip(found.values(), ranks, strict=True):
            kept.append((beam, np.where(rank < nodes, scores, -np.inf)))
        beam, scores = of_each(kept, which)
        each = np.stack([x[:, :nodes].sum(axis=1) for x in chances])
        expected = np.where(going, each[which, np.arange(len(which))], 0.0)
        return Candidates(beam, scores, None, np.array(asked)[which], expected)

    def came_out(self, candidates: Candidates, accepted: Int[np.ndarray, " b"]) -> None:
        """Of these candidates so many of each text turned out right."""
        for i, record in enumerate(self.budget.records):
            its = candidates.draft == i
            record.came_out(float(candidates.expected[its].sum()), int(accepted[its].sum()))
