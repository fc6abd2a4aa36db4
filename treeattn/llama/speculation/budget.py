"""How many tokens one model call should verify: measured costs against chances of acceptance."""

import statistics

import numpy as np


class Budget:
    """The nodes of each step's tree, the certain token included.

    most:     the largest number
    adaptive: choose for each step the size with the most tokens a second: the draft's own chances,
              corrected by how they came out lately, over the time that steps of this size took.
              Else every step takes all that is drafted, up to `most`

    Steps are padded to one of `sizes`, each of which compiles once. Where drafts fail, the best
    size is 1, a plain step; a draft that costs time then pauses for 1, 2, 4, … up to 32 steps.
    Keep a Budget for several calls of `generate`, and it keeps what it has measured.
    """

    def __init__(self, most: int = 16, *, adaptive: bool = True):
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"budget: expected at least 1 token a step, got {most!r}")
        self.most, self.adaptive = most, adaptive
        steps = range(2 if adaptive else 0, (most - 1).bit_length() + 1)
        self.sizes = (1, *(1 << i for i in steps if i)) if most > 1 else (1,)
        self._seconds: dict[int, list[float]] = {}  # of steps by size; 0 is drafting
        self._expected, self._accepted = 1.0, 1.0
        self._pause, self._waiting = 1, 0

    def padded(self, nodes: int) -> int:
        """The smallest size that holds so many nodes."""
        return next(size for size in self.sizes if size >= nodes)

    def drafts(self) -> bool:
        """Whether to draft for this step at all."""
        self._waiting -= 1
        return self.most > 1 and self._waiting < 0

    def choose(self, chances: np.ndarray) -> int:
        """How many nodes of each text's tree to verify, best first, after its certain token.

        chances: (B, L) the draft's own estimate that a node is accepted, falling along a row
        """
        found = int((chances > 0).sum(axis=1).max(initial=0))
        if not self.adaptive:
            return min(self.most - 1, found)
        gained = np.cumsum(np.minimum(self.trust * chances, 1).sum(axis=0))
        best, most_a_second = 0, len(chances) / self.seconds(1)
        for size in self.sizes[1:]:
            nodes = min(size - 1, found, self.most - 1)
            if nodes > best:
                seconds = self.seconds(size) + _typical(self._seconds.get(0, []), 0.0)
                a_second = (len(chances) + gained[nodes - 1]) / seconds
                if a_second > most_a_second:
                    best, most_a_second = nodes, a_second
        self._rest(best)
        return best

    @property
    def trust(self) -> float:
        """Accepted nodes over those that the drafts' chances made expect, lately."""
        return (self._accepted + 0.5) / (self._expected + 0.5)

    def seconds(self, size: int) -> float:
        """What a step of this size takes: measured, or read off the line through those that are.

        Beyond them a token costs 3 % of a step: little, so that no size is ruled out untried.
        """
        known = {n: _typical(t) for n, t in sorted(self._seconds.items()) if n and len(t) > 1}
        if not known:
            return 1 + 0.03 * size
        if min(known) <= size <= max(known):
            return float(np.interp(size, list(known), list(known.values())))
        nearest = max(known) if size > max(known) else min(known)
        return known[nearest] * (1 + 0.03 * size) / (1 + 0.03 * nearest)

    def took(self, size: int, seconds: float) -> None:
        """A step of this size took so long; 0: drafting did."""
        times = self._seconds.setdefault(size, [])
        times.append(seconds)
        del times[1:-8]

    def came_out(self, expected: float, accepted: int) -> None:
        """Of nodes whose chances add up to `expected`, so many turned out right."""
        self._expected = 0.95 * self._expected + expected
        self._accepted = 0.95 * self._accepted + accepted

    def _rest(self, best: int) -> None:
        if best:
            self._pause = 1
        elif _typical(self._seconds.get(0, []), 0.0) > 0.02 * self.seconds(1):
            self._waiting, self._pause = self._pause, min(2 * self._pause, 32)


def _typical(times: list[float], default: float | None = None) -> float:
    """The median without the first time, in which something was compiled."""
    return statistics.median(times[1:]) if len(times) > 1 or default is None else default
