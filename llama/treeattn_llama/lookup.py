"""A draft that copies from the text itself, without a second model."""

import numpy as np

from treeattn.checks import integer


class LookupDraft:
    """Guess that the text goes on as it did after an earlier occurrence of its last tokens.

    matched: how many last tokens must have occurred before. If they have not, nothing is guessed,
             and a step costs as much as without a draft.

    Among the earlier occurrences the draft takes the one with the longest match, and among equal
    ones the latest. The guess is as long as the budget.
    """

    def __init__(self, matched: int = 3):
        self.matched = integer("matched", matched, 1)
        self._texts: list[list[int]] = []

    def observe(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def propose(self, budget: int):
        beam = np.zeros((len(self._texts), 1, budget), np.int32)
        scores = np.full(beam.shape, -np.inf)
        for b, text in enumerate(self._texts):
            text = np.asarray(text, np.int32)
            end = self._longest_match(text)
            if end is not None:
                guess = text[end : end + budget]
                beam[b, 0, : len(guess)] = guess
                scores[b, 0, : len(guess)] = 0.0
        return beam, scores

    def _longest_match(self, text: np.ndarray) -> int | None:
        """The end of the earlier occurrence of the longest suffix that repeats; None if fewer than
        `matched` tokens repeat."""
        ends = np.arange(1, len(text))
        n = 0
        while len(ends):
            n += 1
            further = ends[ends >= n]
            further = further[text[further - n] == text[-n]]
            if n > self.matched and not len(further):
                break
            ends = further
        return int(ends[-1]) if len(ends) else None
