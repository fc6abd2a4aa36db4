"""Drafts that look up in the text itself, or in what the model has said: no second model.

- `SuffixDraft`: what followed the longest suffixes of the text elsewhere in it, by frequency
  (suffix decoding, https://arxiv.org/abs/2411.04975);
- `NGramDraft`: what followed the last few tokens where they occurred last (prompt lookup);
- `RecyclingDraft`: what the model last thought could follow each token, accepted or not (token
  recycling, https://arxiv.org/abs/2408.08696).
"""

from collections.abc import Iterator

import numpy as np

from treeattn_llama.speculation.best_first import best_first_tree
from treeattn_llama.speculation.candidates import Seen, Texts


class _Node:
    """A token sequence that occurred: how often, and what followed it.

    order:    how many tokens it has
    follower: the index, in the text, of what followed it where it occurred first
    children: the sequences of one token more, by that token; None while nobody has asked, of a
              sequence that occurred once: the text says it
    """

    __slots__ = ("children", "count", "follower", "order")

    def __init__(self, order: int, follower: int):
        self.order = order
        self.follower = follower
        self.count = 1
        self.children: dict[int, _Node] | None = None


def _bucket(order: int) -> int:
    """Orders that are judged alike: 1, 2, 3, 4–7, 8–15, …"""
    return order if order < 4 else 1 + order.bit_length()


class SuffixTree:
    """All sequences of up to `depth` tokens of a text that is still written, with their counts.

    The probability of the next token is a blend over the text's suffixes that occurred before, the
    longest first: with the probability that such a suffix is right, the next token is one that has
    followed it, in proportion to how often each did; otherwise the next shorter suffix decides
    (prediction by partial matching). How often suffixes of about that length and count were right
    is counted along the text.

    After "a b c a b d a b" the suffix "a b" was followed by c once and by d once: each gets half of
    the probability that suffixes of two tokens, followed twice, are right.

    Sequences that begin with one that occurred once have no nodes of their own, unless a draft has
    led there: most of a text's sequences are such.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.root = _Node(0, 0)
        self.root.children = {}
        self.tokens: list[int] = []  # the text so far
        # The nodes of the text's suffixes of 0, 1, 2, … tokens, as long as they occurred before.
        self._ends = [self.root]
        # By bucket and count, as `_orders` has them: how often such suffixes were right, and asked.
        self._right: dict[tuple[int, int], list[float]] = {}

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        self._learn(token)
        self.tokens.append(token)
        ends = [self.root]
        for node in self._ends[: self.depth]:
            children = self.children(node)
            child = children.get(token)
            if child is None:
                children[token] = _Node(node.order + 1, len(self.tokens))
            else:
                child.count += 1
                self.children(child)  # what followed it first: now something else will, too
                ends.append(child)
        self._ends = ends

    def children(self, node: _Node) -> dict[int, _Node]:
        """The sequences of one token more that occurred, by that token."""
        if node.children is not None:
            return node.children
        if node.order == self.depth or node.follower == len(self.tokens):
            return {}
        child = _Node(node.order + 1, node.follower + 1)
        node.children = {self.tokens[node.follower]: child}
        return node.children

    def suffixes(self) -> list[_Node]:
        """The text's suffixes of 0, 1, 2, … tokens that something has followed elsewhere."""
        return [node for node in self._ends if self.children(node)]

    def after(self, suffixes: list[_Node], token: int) -> list[_Node]:
        """The suffixes once the text has gone on with `token`."""
        found = (self.children(node).get(token) for node in suffixes)
        return [self.root, *(node for node in found if node is not None and self.children(node))]

    def continuations(self, suffixes: list[_Node]) -> Iterator[tuple[int, float]]:
        """(token, probability) of what may follow a text with these suffixes, as `suffixes` gives
        them; it ends after some sixteen tokens, or when less than 2 % is left for the others."""
        left = 1.0
        told: set[int] = set()
        for key, new in self._orders(suffixes, told):
            trust = self._trust(key)
            total = sum(count for _, count in new)
            for token, count in new:
                told.add(token)
                yield token, left * trust * count / total
            left *= 1 - trust
            if left < 0.02 or len(told) > 16:
                return

    def _orders(self, suffixes: list[_Node], told: set[int]):
        """(key, [(token, count), …]) for each suffix, longest first, that something has followed
        which is not in `told`: those tokens, and the key of `_right` for suffixes like it.

        Whoever iterates adds to `told` what it has used, and the shorter suffixes leave it out.
        """
        for order in range(len(suffixes) - 1, 0, -1):
            children = self.children(suffixes[order])
            if len(children) > len(told):  # a shorter suffix has seen all that a longer one has
                new = [(t, n.count) for t, n in children.items() if t not in told]
                count = sum(count for _, count in new)
                yield (_bucket(order), min(count, 3)), new

    def _trust(self, key: tuple[int, int]) -> float:
        """The probability that a suffix like this is right: as often as it was, and, as if it had
        been seen twice more, 0.6 for one token up to nearly 1 for many."""
        right, times = self._right.get(key, (0.0, 0.0))
        return (right + 2 * (key[0] + 0.5) / (key[0] + 1.5)) / (times + 2)

    def _learn(self, token: int) -> None:
        """Count which suffixes were right about the token that has come."""
        told: set[int] = set()
        for key, new in self._orders(self.suffixes(), told):
            counts = self._right.setdefault(key, [0.0, 0.0])
            told.update(t for t, _ in new)
            counts[0] += token in told
            counts[1] += 1
            if token in told or len(told) > 16:
                return


def follow(kept: list, texts: Texts, new) -> list:
    """[(thing, tokens), …]: what is kept of each text, and the tokens that it has not seen yet.

    kept: a thing for each text, from the last call; brought up to date. Its `tokens` are those it
          was built from: where the text does not begin with them, it is replaced by `new()`

    With a thing built from [5, 6], the text [5, 6, 7] gives (that thing, [7]); the text [5, 8]
    gives (a new one, [5, 8]).
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

    longest: the tokens of the longest suffix that is looked up
    depth:   the tokens of the longest path of candidates
    """

    def __init__(self, longest: int = 24, depth: int = 24):
        self.longest = longest
        self.depth = depth
        self._trees: list[SuffixTree] = []

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        for tree, new in follow(self._trees, texts, lambda: SuffixTree(self.longest + 1)):
            for token in new:
                tree.add(int(token))

    def propose(self, budget: int):
        def continuations(state):  # a tree, and the suffixes of the path without its last token
            tree, suffixes, last = state
            suffixes = suffixes if last is None else tree.after(suffixes, last)
            for token, probability in tree.continuations(suffixes):
                yield token, probability, (tree, suffixes, token)

        states = [(tree, tree.suffixes(), None) for tree in self._trees]
        return best_first_tree(states, continuations, budget, self.depth)


class NGramDraft:
    """Prompt lookup: what followed where the longest n-gram that ends the text occurred last.

    longest: the tokens of the longest n-gram that is tried; then shorter ones, down to one token
    length:  the most tokens of a candidate
    rows:    the most candidates, one for each occurrence, the latest first; with one, a chain

    What followed the n-gram's latest occurrence but k has the probability n / (n + k + 1) for each
    token: 3/4, 3/5, 3/6, … after an n-gram of three.
    """

    def __init__(self, longest: int = 3, length: int = 10, rows: int = 1):
        self.longest = longest
        self.length = length
        self.rows = rows
        self._texts: list[np.ndarray] = []

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
        """(ends, n): the largest n for which the text's last n tokens occurred before, and where
        their latest occurrences end; ([], 0) if there is none."""
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            ends = np.flatnonzero((windows == text[-n:]).all(axis=1)) + n
            if len(ends):
                return ends[: -self.rows - 1 : -1].tolist(), n
        return [], 0


class RecyclingDraft:
    """Token recycling: for each token the ones that the model last found likeliest after it.

    likely: how many tokens are kept for each
    depth:  the tokens of the longest path of candidates

    The token kept as the r-th likeliest gets, as its probability, how often the r-th turned out to
    be the likeliest when the model was next asked about the same token.
    """

    def __init__(self, likely: int = 8, depth: int = 6):
        self.likely = likely
        self.depth = depth
        self._after: dict[int, list[int]] = {}
        self._last: list[int] = []
        self._right = 0.5 ** np.arange(1, likely + 1)  # by rank, as if there had been one time
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
