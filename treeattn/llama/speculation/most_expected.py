"""Several drafts at once: for each text, the candidates of the one that expects most of its own."""

import jax
from jaxtyping import Key

from treeattn.idea.arrays import Array
from treeattn.llama.speculation.budget import surest
from treeattn.llama.speculation.candidates import Seen, Texts, ask, of_each, ranked


class MostExpectedDraft:
    """Of several drafts, for each text and step, the one that expects the most tokens accepted.

    In `generate` each of them is timed, trusted and paused by itself (`Budget`): a slow draft that
    fails does not silence a free one.
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

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        for draft in self.drafts:
            draft.observe(texts, seen)

    def propose(self, budget: int):
        found = [ask(draft, budget)[:2] for draft in self.drafts]
        which, _ = surest([ranked(*each)[1] for each in found], budget)
        return of_each(found, which)
