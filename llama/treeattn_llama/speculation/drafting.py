"""Draft: what is verified at a step, as the drafts propose it and the budget chooses."""

import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Key

from treeattn.idea.arrays import Array
from treeattn_llama.sampling import Chance
from treeattn_llama.speculation.agreement import agreed, agreed_beam
from treeattn_llama.speculation.budget import Budget, best_of
from treeattn_llama.speculation.candidates import (
    Drawn,
    Seen,
    Texts,
    after_certain,
    ask,
    candidate_lengths,
    node_chances,
    ranks_of,
    side_by_side,
)
from treeattn_llama.speculation.sizes import Sizes
from treeattn_llama.speculation.united import UnitedDraft


class Proposal(NamedTuple):
    """What a draft was asked for, and what of it is verified.

    draft:   as an index into `Drafting.drafts`
    beam:    (B, m, c) its candidates; lengths (B, m): how many of each one's tokens are verified
    expected: (B,) how many of its nodes among them it expects to be accepted
    promised: how many its shape had made expect
    """

    draft: int
    beam: Int[np.ndarray, "b m c"]
    lengths: Int[np.ndarray, "b m"]
    expected: Float[np.ndarray, " b"]
    promised: float


class Candidates(NamedTuple):
    """What is verified at a step, and who proposed it.

    beam, scores: (B, M, C), the certain token in the first column
    drawn:        what the candidates were drawn from, if they were
    proposals:    of the drafts that were asked, unless they were drawn
    expected:     how many of the candidates of all texts should be accepted, by trusted chances
    """

    beam: Int[np.ndarray, "b m c"]
    scores: Float[np.ndarray, "b m c"]
    drawn: Drawn | None
    proposals: list[Proposal]
    expected: float = 0.0


class Drafting:
    """The drafts of a loop (none for plain decoding), and the budget that says which of them to
    ask, and how much of what they propose to verify.

    sampled: whether tokens are drawn at random, so that drafts must not have chance of their own
    sizes:   of steps, that are compiled
    """

    def __init__(self, draft: Any, budget: Budget, vocabulary: int, sizes: Sizes, *, sampled: bool):
        self.draft = draft
        self.drafts = draft.drafts if isinstance(draft, UnitedDraft) else (draft,)
        if draft is None:
            self.drafts = ()
        self.budget = budget
        self._promised = [0.0] * len(self.drafts)  # by the shape that each was asked for last
        self.vocabulary = vocabulary
        self.sampled = sampled
        self.wants_states = getattr(draft, "states", False)
        self.wants_likely = min(getattr(draft, "likely", 0), vocabulary)
        budget.begin([type(each).__name__ for each in self.drafts], sizes.ready, sizes.wished)

    def begin(self, key: Key[Array, ""]) -> None:
        """New texts: whoever draws at random draws with this key."""
        if hasattr(self.draft, "begin"):
            self.draft.begin(key)

    def foresee(self, chance: Chance) -> None:
        """How the texts' new tokens are drawn, to who wants to know."""
        if hasattr(self.draft, "foresee"):
            self.draft.foresee(None if chance.sampling.greedy else chance)

    def observe(self, texts: Texts, seen: Seen | None) -> None:
        if self.draft is not None:
            self.draft.observe(texts, seen)

    def candidates(self, texts: Texts, room: Int[np.ndarray, " b"]) -> Candidates:
        """Candidates below each text's last token, of at most `room` tokens with it, (b,): 0 for a
        text that is over."""
        found = {}
        for i in range(len(self.drafts)):
            if agreed(self.budget.asks(i)):
                found[i] = self._ask(i, len(texts))
        chosen = self._chosen(found, room - 1)
        certain = np.array([text[-1] for text in texts])
        beam, scores = agreed_beam(*after_certain(chosen.beam, chosen.scores, certain))
        scores = np.where(np.arange(beam.shape[2]) < room[:, None, None], scores, -np.inf)
        return chosen._replace(beam=beam, scores=scores)

    def _ask(self, i: int, batch: int) -> tuple[np.ndarray, np.ndarray, Drawn | None]:
        """What draft i proposes for the texts, checked; how long it took is noted."""
        draft = self.drafts[i]
        shapes = getattr(draft, "shapes", ())
        shape = agreed(self.budget.shape(i, shapes)) if shapes else 0
        how = {"shape": shape} if shapes else {}
        began = time.perf_counter()
        found = ask(draft, self.budget.most - 1, self.vocabulary, batch, **how)
        self.budget.drafted(time.perf_counter() - began, i, shape)
        self._promised[i] = shapes[shape].gain if shapes else 0.0
        if found[2] is not None and self.sampled and not hasattr(draft, "begin"):
            raise TypeError(
                f"draft: {type(draft).__name__} draws at random, but has no method begin(key) to "
                f"take its chance from: over keys, the text would not be the model's"
            )
        return found

    def _chosen(self, found: dict, most: np.ndarray) -> Candidates:
        """Of what the drafts that were asked have proposed, what the budget chooses: of candidates
        of up to most[b] tokens, −1 for a text that is over."""
        if not found:
            none = (len(most), 0, 0)
            return Candidates(np.zeros(none, np.int32), np.zeros(none), None, [])
        drawn = found[0][2] if len(self.drafts) == 1 else None
        if drawn is not None:  # leaving out some would change how they are distributed
            scores = np.asarray(drawn.scores, np.float64)
            return Candidates(drawn.beam, scores, drawn, [])
        return self._best(found, most)

    def _best(self, found: dict, most: np.ndarray) -> Candidates:
        """The best nodes of all that was proposed, as one tree for each text."""
        going = most >= 0
        beam, scores = side_by_side([pair[:2] for pair in found.values()])
        scores = np.where(np.arange(beam.shape[2]) < most[:, None, None], scores, -np.inf)
        ends = np.cumsum([pair[0].shape[1] for pair in found.values()]).tolist()
        rows = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        node, chances = node_chances(beam, scores, rows)
        records = [self.budget.records[i] for i in found]
        pairs = zip(records, chances, strict=True)
        trusted = np.stack([record.trusted(chance) for record, chance in pairs])
        nodes = self.budget.choose(trusted[:, going], list(found)) if going.any() else 0
        surest = trusted.max(axis=0)
        expected = best_of(surest[None, going], nodes).sum()
        scores = np.where(ranks_of(node, surest) < nodes, scores, -np.inf)
        lengths = candidate_lengths(scores)
        proposals = []
        for i, mine, chance in zip(found, rows, chances, strict=True):
            kept = np.zeros(chance.shape, bool)
            real = np.arange(beam.shape[2]) < lengths[:, mine, None]
            text = np.broadcast_to(np.arange(len(beam))[:, None, None], real.shape)
            kept[text[real], node[:, mine][real]] = True
            its_own = np.where(going, (chance * kept).sum(axis=1), 0.0)
            promised = self._promised[i] * going.sum()
            its = beam[:, mine], lengths[:, mine], its_own, promised
            proposals.append(Proposal(i, *its))
        return Candidates(beam, scores, None, proposals, float(expected))

    def came_out(self, candidates: Candidates, accepted: list[list[int]]) -> None:
        """Of these candidates, these tokens of each text turned out right."""
        for draft, beam, lengths, expected, promised in candidates.proposals:
            right = sum(map(_right, beam, lengths, accepted))
            self.budget.records[draft].came_out(float(expected.sum()), right, promised)


def _right(beam: np.ndarray, lengths: np.ndarray, accepted: list[int]) -> int:
    """How many of the accepted tokens one of the candidates (m, c) begins with."""
    n = min(len(accepted), beam.shape[1])
    same = beam[:, :n] == np.array(accepted[:n], beam.dtype)
    same &= np.arange(n) < lengths[:, None]
    return int(np.cumprod(same, axis=1).sum(axis=1).max(initial=0))
