"""How many tokens one model call should verify: measured costs against chances of acceptance."""

import collections
import statistics
from collections.abc import Sequence

import numpy as np

from treeattn.idea.arrays import integer


class Record:
    """What one draft is worth, lately: the time it takes, how its chances came out, its pauses."""

    def __init__(self):
        self.seconds: list[float] = []
        self.begin()

    def begin(self) -> None:
        """For new texts: no pause, and as much trust as the draft has in itself."""
        self._expected = 1.0
        self._accepted = 1.0
        self._pause = 1
        self._waiting = 0

    @property
    def cost(self) -> float:
        """Seconds that it takes to propose; 0 before anything is known."""
        return _typical(self.seconds, 0.0)

    @property
    def trust(self) -> float:
        """Accepted nodes over those that the draft's chances made expect."""
        return (self._accepted + 0.5) / (self._expected + 0.5)

    def came_out(self, expected: float, accepted: int) -> None:
        """Of nodes whose chances add up to `expected`, so many turned out right."""
        self._expected = 0.95 * self._expected + expected
        self._accepted = 0.95 * self._accepted + accepted

    def asks(self) -> bool:
        """Whether to ask for candidates at this step."""
        self._waiting -= 1
        return self._waiting < 0

    def paid(self) -> None:
        """It was worth its time."""
        self._pause = 1

    def rest(self, longest: int) -> None:
        """It was not: it pauses, for twice as long each time, up to `longest` steps."""
        self._waiting = min(self._pause, longest)
        self._pause = min(2 * self._pause, 32)


class Budget:
    """The nodes of each step's tree, the certain token included.

    most:     the largest number
    adaptive: choose for each step the size with the most tokens a second: the drafts' own chances,
              corrected by how they came out lately, over the time that steps of this size took.
              Else every step takes all that is drafted, up to `most`

    Steps are padded to one of `sizes`, of those that are `ready`: each compiles once. Where drafts
    fail, the best size is 1, a plain step; a draft that costs time and is not worth it then pauses
    for 1, 2, 4, … up to 32 steps, fewer the less it costs: what takes 2 % of a step never does.
    Where there are several (`MostExpectedDraft`), each has a cost, a trust and pauses of its own.
    What is drawn at random (`Drawn`) may not be cut, nor left out: it is verified whole.

    Keep a Budget for several calls of `generate`, and it keeps the times that it has measured; it
    trusts each draft anew, and none pauses at the beginning of a text.
    """

    def __init__(self, most: int = 16, *, adaptive: bool = True):
        self.most = integer("budget", most, 1)
        self.adaptive = adaptive
        self.sizes = _sizes(self.most, adaptive)
        self._seconds: dict[int, list[float]] = {}  # of steps by size
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
        """The smallest size that is ready and holds so many nodes."""
        if not self.adaptive:
            self._wish(_smallest(self.sizes, nodes))
        return _smallest(self.ready, nodes)

    def _wish(self, size: int) -> None:
        """A step of this size would be best."""
        if size not in self.ready:
            self.wished[size] += 1

    def asks(self, draft: int = 0) -> bool:
        """Whether to ask this draft for candidates at this step."""
        return self.most > 1 and self.records[draft].asks()

    def choose(
        self, chances: Sequence[np.ndarray], drafts: Sequence[int] = (0,)
    ) -> tuple[np.ndarray, int]:
        """(which (B,), nodes): whose candidates to verify for each text, as an index into `drafts`,
        and how many nodes of their tree, best first, after the certain token.

        drafts:  those that were asked at this step
        chances: of each of them (B, L), its own estimate that a node is accepted, falling along a
                 row; B counts the texts that are not over, since only these gain by a step
        """
        records = [self.records[i] for i in drafts]
        trusted = [np.minimum(r.trust * x, 1) for r, x in zip(records, chances, strict=True)]
        which, found = surest(trusted, self.most - 1)
        cost = sum(record.cost for record in records)
        nodes = self.nodes(found, cost)
        if self.adaptive:
            for i, record in enumerate(records):
                others = [*trusted[:i], *trusted[i + 1 :], np.zeros((len(found), 0))]
                without = surest(others, self.most - 1)[1]
                if self.rate(found, record.cost) > self.rate(without, 0.0):
                    record.paid()
                else:  # no longer than until asking in vain takes a fiftieth of the time
                    record.rest(int(min(record.cost / self.seconds(1) / 0.02, 32)))
        return which, nodes

    def nodes(self, chances: np.ndarray, cost: float) -> int:
        """How many of these nodes (B, L) to verify, where drafting has cost so many seconds."""
        if not self.adaptive:
            return min(self.most - 1, _nodes_of_largest(chances))
        best = max(self._rates(chances, cost, self.sizes), key=lambda pair: pair[0])[1]
        self._wish(_smallest(self.sizes, best + 1))
        return max(self._rates(chances, cost), key=lambda pair: pair[0])[1]

    def rate(self, chances: np.ndarray, cost: float) -> float:
        """Tokens a second of the best number of nodes."""
        return max(rate for rate, _ in self._rates(chances, cost))

    def _rates(self, chances: np.ndarray, cost: float, sizes=None) -> list[tuple[float, int]]:
        """(tokens a second, nodes) for each size (None: that is ready), the smallest first."""
        texts = len(chances)
        found = min(_nodes_of_largest(chances), self.most - 1)
        gained = np.cumsum(chances.sum(axis=0))
        rates = [(texts / (self.seconds(1) + cost), 0)]
        for size in sorted(self.ready if sizes is None else sizes)[1:]:
            nodes = min(size - 1, found)
            if nodes > rates[-1][1]:
                tokens = texts + gained[nodes - 1]
                rates.append((tokens / (self.seconds(size) + cost), nodes))
        return rates

    def seconds(self, size: int) -> float:
        """What a step of this size takes: measured, or read off the line through those that are.

        Beyond them a token costs 3 % of a step: little, so that no size is ruled out untried.
        """
        known = {n: _typical(t) for n, t in sorted(self._seconds.items()) if len(t) > 1}
        if not known:
            return 1 + 0.03 * size
        if min(known) <= size <= max(known):
            return float(np.interp(size, list(known), list(known.values())))
        nearest = max(known) if size > max(known) else min(known)
        return known[nearest] * (1 + 0.03 * size) / (1 + 0.03 * nearest)

    def took(self, size: int, seconds: float) -> None:
        """A step of this size took so long."""
        _keep(self._seconds.setdefault(size, []), seconds)

    def drafted(self, seconds: float, draft: int = 0) -> None:
        """This draft took so long to propose."""
        _keep(self.records[draft].seconds, seconds)


def surest(chances: Sequence[np.ndarray], budget: int) -> tuple[np.ndarray, np.ndarray]:
    """(which (B,), chances (B, L)): for each text the draft that expects the most tokens accepted
    among its `budget` best, and its chances. Those of each draft are (B, L), falling along a row.
    """
    cut = [x[:, :budget] for x in chances]
    longest = max(x.shape[1] for x in cut)
    same = np.stack([np.pad(x, [(0, 0), (0, longest - x.shape[1])]) for x in cut])
    which = same.sum(axis=2).argmax(axis=0)
    return which, same[which, np.arange(same.shape[1])]


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


def _keep(times: list[float], seconds: float) -> None:
    """The first time, and the last eight."""
    times.append(seconds)
    del times[1:-8]


def _typical(times: list[float], default: float | None = None) -> float:
    """The median without the first time, in which something was compiled."""
    return statistics.median(times[1:]) if len(times) > 1 or default is None else default
