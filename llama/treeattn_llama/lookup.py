"""A draft that looks up in the text itself: no second model."""

import numpy as np

from treeattn_llama.arguments import integer


class LookupDraft:
    """Guess that the text goes on as it did where it last went like this.

    matched: so many last tokens have to have occurred before; otherwise nothing is guessed, and a
             step costs what it costs without a draft

    Of all earlier occurrences of the last `matched` tokens, the one is taken before which most of
    the text is the same, too; of equal ones, the latest. The guess is as long as the budget.
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
        """Where the earlier occurrence of the longest repeated suffix ends; None where fewer than
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
