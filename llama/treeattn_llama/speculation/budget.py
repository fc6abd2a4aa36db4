"""How many tokens one model call should verify: measured costs against chances of acceptance."""

import collections
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from treeattn.idea.arrays import integer
from treeattn_llama.speculation.candidates import Shape
from treeattn_llama.speculation.record import Record, keep, typical


class Budget:
    """The nodes of each step's tree, the certain token included.

    most:     the largest number
    adaptive: choose for each step the size with the most tokens a second: the drafts' own chances,
              corrected by how they came out lately, over the time that steps of this size took.
              Else every step takes all that is drafted, up to `most`

    Steps are padded to one of `sizes`, of those that are `ready`: each compiles once. Where drafts
    fail, the best size is 1, a plain step; a draft that costs time and is not worth it then pauses
    for 1, 2, 4, … up to 32 steps, fewer the less it costs: what takes 2 % of a step never does.
    Where there are several (`UnitedDraft`), each has a cost, a trust and pauses of its own.
    What is drawn at random (`Drawn`) may not be cut, nor left out: it is verified whole.

    Keep a Budget for several calls of `generate`, and it keeps the times that it has measured; it
    trusts each draft anew, and none pauses at the beginning of a text.
    """

    def __init__(self, most: int = 16, *, adaptive: bool = True):
        self.most = integer("budget", most, 1)
        self.adaptive = adaptive
        self.sizes = _sizes(self.most, adaptive)
        self._seconds: dict[int, list[float]] = {}  # of steps by size
        self._estimates: dict[int, float] = {}  # what `seconds` has made of them
        self._known: dict[tuple[int, str], Record] = {}
        self.begin()

    def begin(self, drafts: Sequence[str] = ("",), ready=None, wished=None) -> None:
        """New texts, and the names of the drafts that propose candidates for them.

        ready:  a set of the sizes that are compiled, one that holds `most` among them; None: all
        wished: a Counter, which counts the steps that would have been shorter with other sizes
        """
        keys = list(enumerate(drafts))
        self.records = [self._known.setdefault(key, Record()) for key in keys]
        for record in self.records:
            record.begin()
        self.ready = set(self.sizes) if ready is None else ready
        self.wished = collections.Counter() if wished is None else wished

    def size_for(self, nodes: int) -> int:
        """Of the sizes that are ready and hold so many nodes the one that takes the least time: the
        smallest, unless a larger one was measured to be faster."""
        if not self.adaptive:
            self._wish(_smallest(self.sizes, nodes))
            return _smallest(self.ready, nodes)
        return self._fastest(self.ready, nodes)

    def _fastest(self, sizes, nodes: int) -> int:
        holding = (size for size in sizes if size >= nodes)
        return min(holding, key=lambda size: (self.seconds(size), size))

    def _wish(self, size: int) -> None:
        """A step of this size would be best."""
        if size not in self.ready:
            self.wished[size] += 1

    def asks(self, draft: int = 0) -> bool:
        """Whether to ask this draft for candidates at this step."""
        return self.most > 1 and self.records[draft].asks()

    def shape(self, draft: int, shapes: Sequence[Shape]) -> int:
        """Which of its shapes to ask this draft for: the one that promises most tokens a second, by
        what it takes and how far the draft's promises have come true in these texts."""
        if not self.adaptive:
            return int(np.argmax([shape.gain for shape in shapes]))
        record = self.records[draft]

        def rate(i: int) -> float:
            size = self._fastest(self.ready, min(shapes[i].nodes + 1, self.most))
            tokens = 1 + record.level * shapes[i].gain
            return tokens / (self.seconds(size) + record.cost_of(i, shapes))

        return max(range(len(shapes)), key=rate)

    def choose(self, chances: Float[np.ndarray, "d b l"], drafts: Sequence[int] = (0,)) -> int:
        """How many nodes of the drafts' tree to verify, best first, after the certain token.

        drafts:  those that were asked at this step
        chances: of each of them, how far it is to be trusted that each node is accepted (`Record`);
                 0 for a node that is not of its own. B counts the texts that are not over, since
                 only these gain by a step
        """
        records = [self.records[i] for i in drafts]
        found = best_of(chances, self.most - 1)
        nodes = self.nodes(found)
        if self.adaptive:
            for i, record in enumerate(records):
                without = best_of(np.delete(chances, i, axis=0), self.most - 1)
                if self.rate(found, record.cost) > self.rate(without, 0.0):
                    record.paid()
                else:  # no longer than until asking in vain takes a fiftieth of the time
                    record.rest(int(min(record.cost / self.seconds(1) / 0.02, 32)))
        return nodes

    def nodes(self, chances: np.ndarray) -> int:
        """How many of these nodes (B, L) to verify; what it took to draft them is spent."""
        if not self.adaptive:
            return min(self.most - 1, _nodes_of_largest(chances))
        best = max(self._rates(chances, 0.0, self.sizes), key=lambda pair: pair[0])[1]
        self._wish(self._fastest(self.sizes, best + 1))
        return max(self._rates(chances, 0.0), key=lambda pair: pair[0])[1]

    def rate(self, chances: np.ndarray, cost: float) -> float:
        """Tokens a second of the best number of nodes."""
        return max(rate for rate, _ in self._rates(chances, cost))

    def _rates(self, chances: np.ndarray, cost: float, sizes=None) -> list[tuple[float, int]]:
        """(tokens a second, nodes) for each size (None: that is ready), the smallest first."""
        texts = len(chances)
        found = min(_nodes_of_largest(chances), self.most - 1)
        gained = np.cumsum(chances.sum(axis=0))
        rates = [(texts / (self.seconds(1) + cost), 0)]
        sizes = self.ready if sizes is None else sizes
        for size in sorted(sizes)[1:]:
            nodes = min(size - 1, found)
            if nodes > rates[-1][1]:
                tokens = texts + gained[nodes - 1]
                seconds = self.seconds(self._fastest(sizes, nodes + 1))
                rates.append((tokens / (seconds + cost), nodes))
        return rates

    def seconds(self, size: int) -> float:
        """What a step of this size takes: measured, or read off the line through those that are.

        Beyond them a token costs 3 % of a step: little, so that no size is ruled out untried.
        """
        if size not in self._estimates:
            self._estimates[size] = self._estimate(size)
        return self._estimates[size]

    def _estimate(self, size: int) -> float:
        known = {n: typical(t) for n, t in sorted(self._seconds.items()) if len(t) > 1}
        if not known:
            return 1 + 0.03 * size
        if 1 in known:  # no step is shorter, but on a busier machine, where it was measured
            known[1] = min(known.values())
        if min(known) <= size <= max(known):
            return float(np.interp(size, list(known), list(known.values())))
        nearest = max(known) if size > max(known) else min(known)
        return known[nearest] * (1 + 0.03 * size) / (1 + 0.03 * nearest)

    def measured(self, size: int) -> float | None:
        """What steps of this size took lately; None before one was measured."""
        return self.seconds(size) if len(self._seconds.get(size, ())) > 1 else None

    def took(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        keep(self._seconds.setdefault(size, []), seconds)
        self._estimates.clear()

    def drafted(self, seconds: float, draft: int = 0, shape: int = 0) -> None:
        """This draft took so long to propose a tree of this shape."""
        self.records[draft].took(seconds, shape)


def best_of(chances: Float[np.ndarray, "d b l"], budget: int) -> Float[np.ndarray, "b budget"]:
    """The `budget` largest of what any draft gives each text's nodes, falling along a row."""
    most = chances.max(axis=0, initial=0.0)
    return -np.sort(-most, axis=1)[:, :budget]


def _sizes(most: int, adaptive: bool) -> tuple[int, ...]:
    """The nodes of a step, with padding: 1, 4, 8, 16, … up to the first that holds `most`; for who
    chooses among them also those half between, 6, 12, ….

    2 is none unless it is `most`: such a step takes little less than one of 4.
    """
    powers = [1 << i for i in range(2, most.bit_length() + 1)]
    between = [3 << i for i in range(1, most.bit_length())] if adaptive else []
    larger = sorted(powers + between) if adaptive or most != 2 else [2]
    needed = [size for size in larger if size < most]
    return (1, *needed, *larger[len(needed) : len(needed) + (most > 1)])


def _smallest(sizes, nodes: int) -> int:
    """The smallest of the sizes that holds so many nodes."""
    return min(size for size in sizes if size >= nodes)


def _nodes_of_largest(chances: np.ndarray) -> int:
    """The nodes of the largest tree among (B, L)."""
    return int((chances > 0).sum(axis=1).max(initial=0))
