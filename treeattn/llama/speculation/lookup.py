"""Drafts that look up in the text itself, or in what the model has said: no second model.

- `SuffixDraft`: what followed the longest suffixes of the text elsewhere in it, by frequency
  (suffix decoding, https://arxiv.org/abs/2411.04975);
- `NGramDraft`: what followed the last few tokens where they occurred last (prompt lookup);
- `RecyclingDraft`: what the model last thought could follow each token, accepted or not (token
  recycling, https://arxiv.org/abs/2408.08696).
"""

from collections.abc import Iterator

import numpy as np

from treeattn.llama.speculation.best_first import best_first_tree
from treeattn.llama.speculation.candidates import Seen, Texts


class _Node:
    """A token sequence that occurred: what followed it, and how often."""

    __slots__ = ("children", "count")

    def __init__(self):
        self.children: dict[int, _Node] = {}
        self.count = 0


def _bucket(order: int) -> int:
    """Orders that are judged alike: 1, 2, 3, 4–7, 8–15, …"""
    return order if order < 4 else 1 + order.bit_length()


class SuffixTree:
    """All sequences of up to `depth` tokens of a growing text, with their counts.

    The probability of the next token is blended from the longest suffix that occurred before to
    the shortest: each says a token it has seen follow, by frequency, or else hands on to the next
    shorter one (prediction by partial matching). How often a suffix of that length, seen so often,
    was right is counted along the text.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.root = _Node()
        self.tokens = []
        self._ends = [self.root]  # the nodes of the text's suffixes of 0, 1, 2, … tokens
        self._right: dict[tuple[int, int], list[float]] = {}

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        self._learn(token)
        grown = [self.root]
        for node in self._ends[: self.depth]:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node()
            child.count += 1
            grown.append(child)
        self._ends = grown
        self.tokens.append(token)

    def suffixes(self) -> list[_Node]:
        """The text's suffixes of 0, 1, 2, … tokens that something has followed elsewhere."""
        return [node for node in self._ends if node.children]

    def after(self, suffixes: list[_Node], token: int) -> list[_Node]:
        """The suffixes once the text has gone on with `token`."""
        found = (node.children[token] for node in suffixes if token in node.children)
        return [self.root, *(node for node in found if node.children)]

    def continuations(self, suffixes: list[_Node]) -> Iterator[tuple[int, float]]:
        """(token, probability) of what may follow a text with these suffixes."""
        left = 1.0
        told = set()
        for key, new in self._orders(suffixes, told):
            trust = self._trust(key)
            total = sum(count for _, count in new)
            for token, count in new:
                told.add(token)
                yield token, left * trust * count / total
            left *= 1 - trust
            if left < 0.02 or len(told) > 16:
                return

    def _orders(self, suffixes, told):
        """The suffixes, longest first, that know a token not yet told: how far to trust them is
        filed under which key, and their new tokens with counts."""
        for order in range(len(suffixes) - 1, 0, -1):
            children = suffixes[order].children
            if len(children) > len(told):  # a shorter suffix has seen all that a longer one has
                new = [(t, n.count) for t, n in children.items() if t not in told]
                yield (_bucket(order), min(sum(count for _, count in new), 3)), new

    def _trust(self, key: tuple[int, int]) -> float:
        right, times = self._right.get(key, (0.0, 0.0))
        return (right + 2 * (key[0] + 0.5) / (key[0] + 1.5)) / (times + 2)

    def _learn(self, token: int) -> None:
        told: set[int] = set()
        for key, new in self._orders(self.suffixes(), told):
            counts = self._right.setdefault(key, [0.0, 0.0])
            told.update(t for t, _ in new)
            counts[0] += token in told
            counts[1] += 1
            if token in told or len(told) > 16:
                return


def follow(kept: list, texts: Texts, new) -> list:
    """For each text what was built from its beginning, `kept[b]`, else `new()`; and its new tokens.

    A thing that is kept has the `tokens` it was built from.
    """
    kept += [new() for _ in range(len(texts) - len(kept))]
    del kept[len(texts) :]
    pairs = []
    for b, text in enumerate(texts):
        done = kept[b].tokens
        if len(text) < len(done) or list(text[: len(done)]) != done:
            kept[b] = new()
        pairs.append((kept[b], text[len(kept[b].tokens) :]))
    return pairs


class SuffixDraft:
    """Suffix decoding: a tree of the continuations that the text itself makes likely.

    longest: the longest suffix that is told from others; depth: the longest path of candidates
    """

    def __init__(self, longest: int = 24, depth: int = 24):
        self.longest = longest
        self.depth = depth
        self._trees = []

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        for tree, new in follow(self._trees, texts, lambda: SuffixTree(self.longest + 1)):
            for token in new:
                tree.add(int(token))

    def propose(self, budget: int):
        def continuations(state):
            tree, suffixes, token = state
            suffixes = suffixes if token is None else tree.after(suffixes, token)
            for token, probability in tree.continuations(suffixes):
                yield token, probability, (tree, suffixes, token)

        states = [(tree, tree.suffixes(), None) for tree in self._trees]
        return best_first_tree(states, continuations, budget, self.depth)


class NGramDraft:
    """Prompt lookup: what followed where the longest n-gram that ends the text occurred last.

    longest: of the n-grams that are tried, down to one token; length: of a candidate
    rows:    how many occurrences, the latest first; with one, the candidates are a chain

    The k-th continuation's tokens get the probability n / (n + k + 1), n the n-gram's length.
    """

    def __init__(self, longest: int = 3, length: int = 10, rows: int = 1):
        self.longest = longest
        self.length = length
        self.rows = rows
        self._texts = []

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        self._texts = [np.asarray(text, np.int32) for text in texts]

    def propose(self, budget: int):
        beam = np.zeros((len(self._texts), self.rows, self.length), np.int32)
        scores = np.full(beam.shape, -np.inf)
        for b, text in enumerate(self._texts):
            ends, n = self._occurrences(text)
            for k, end in enumerate(ends):
                found = text[end : end + self.length]
                beam[b, k, : len(found)] = found
                scores[b, k, : len(found)] = np.log(n / (n + k + 1))
        return beam, scores

    def _occurrences(self, text: np.ndarray) -> tuple[list[int], int]:
        """Where the latest occurrences of the text's last n tokens end, and the largest such n."""
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            ends = np.flatnonzero((windows == text[-n:]).all(axis=1)) + n
            if len(ends):
                return ends[: -self.rows - 1 : -1].tolist(), n
        return [], 0


class RecyclingDraft:
    """Token recycling: for each token the ones that the model last found likeliest after it.

    likely: how many of them are kept; depth: the longest path of candidates

    A rank's probability is how often the token of that rank turned out to be the likeliest when
    the model was next asked.
    """

    def __init__(self, likely: int = 8, depth: int = 6):
        self.likely = likely
        self.depth = depth
        self._after: dict[int, list[int]] = {}
        self._last: list[int] = []
        self._right = 0.5 ** np.arange(1, likely + 1)
        self._times = 1.0

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        self._last = [int(text[-1]) for text in texts]
        if seen is None:
            return
        for token, likely in zip(
            seen.tokens[seen.real].tolist(), seen.likely[seen.real].tolist(), strict=True
        ):
            before = self._after.get(token)
            if before is not None:
                self._times += 1
                if likely[0] in before:
                    self._right[before.index(likely[0])] += 1
            self._after[token] = likely

    def propose(self, budget: int):
        chances = (self._right / self._times).tolist()

        def continuations(token):
            after = self._after.get(token, ())
            return [(t, chance, t) for t, chance in zip(after, chances, strict=False)]

        return best_first_tree(self._last, continuations, budget, self.depth)
