"""Several drafts at once: the candidates of all of them in one tree."""

import jax
from jaxtyping import Key

from treeattn.idea.arrays import Array
from treeattn_llama.sampling import Chance
from treeattn_llama.speculation.candidates import Seen, Texts, ask, side_by_side


class UnitedDraft:
    """What any of several drafts proposes: packing makes one tree of it, in which a beginning that
    two have in common is there once.

    In `generate` each of them is timed, trusted and paused by itself (`Budget`): a slow draft that
    fails does not silence a free one, and a node has the chance that the surest of them gives it,
    corrected by how its chances came out.
    """

    def __init__(self, *drafts):
        if not drafts:
            raise ValueError("drafts: expected at least one, got none")
        self.drafts = drafts
        self.likely = max(getattr(draft, "likely", 0) for draft in drafts)
        self.states = any(getattr(draft, "states", False) for draft in drafts)

    def begin(self, key: Key[Array, ""]) -> None:
        for i, draft in enumerate(self.drafts):
            if hasattr(draft, "begin"):
                draft.begin(jax.random.fold_in(key, i))

    def foresee(self, chance: Chance | None) -> None:
        for draft in self.drafts:
            if hasattr(draft, "foresee"):
                draft.foresee(chance)

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        for draft in self.drafts:
            draft.observe(texts, seen)

    def propose(self, budget: int):
        return side_by_side([ask(draft, budget)[:2] for draft in self.drafts])
