"""What one draft is worth, lately: the time it takes, how its chances came out, its pauses."""

from collections.abc import Sequence

import numpy as np

from treeattn_llama.speculation.candidates import Shape

SHRUNK = 4.0  # steps for which a draft counts as gaining what it did elsewhere


class Record:
    """A draft's costs, which outlive a text; and what came of it in the texts of now."""

    def __init__(self):
        self.seconds: dict[int, list[float]] = {}  # by shape
        self.begin()

    def begin(self) -> None:
        """For new texts: no pause, and as much trust as the draft has in itself."""
        self._expected = 1.0
        self._accepted = 1.0
        self._promised = 0.0
        self._gained = 0.0
        self._last = 0  # the shape that it was asked for last
        self._pause = 1
        self._waiting = 0

    @property
    def cost(self) -> float:
        """Seconds that it takes to propose, in its last shape; 0 before anything is known."""
        return typical(self.seconds.get(self._last, []), 0.0)

    def cost_of(self, shape: int, shapes: Sequence[Shape]) -> float:
        """Seconds that this shape takes: measured, or in proportion to one that was."""
        known = [i for i, times in self.seconds.items() if len(times) > 1]
        if not known:
            return 0.0
        like = shape if shape in known else known[0]
        return typical(self.seconds[like], 0.0) * shapes[shape].work / shapes[like].work

    @property
    def trust(self) -> float:
        """Accepted nodes over those that the draft's chances made expect."""
        return (self._accepted + 0.5) / (self._expected + 0.5)

    @property
    def level(self) -> float:
        """Accepted nodes over those that its shapes had promised (`Shape.gain`)."""
        return (self._gained + SHRUNK) / (self._promised + SHRUNK)

    def trusted(self, chances: np.ndarray) -> np.ndarray:
        """What its chances are worth, by how they came out."""
        return np.minimum(self.trust * chances, 1)

    def took(self, seconds: float, shape: int = 0) -> None:
        """It took so long to propose a tree of this shape."""
        self._last = shape
        keep(self.seconds.setdefault(shape, []), seconds)

    def came_out(self, expected: float, accepted: int, promised: float = 0.0) -> None:
        """Of nodes whose chances add up to `expected`, so many turned out right; its shape's gain
        had promised so many."""
        self._expected = 0.95 * self._expected + expected
        self._accepted = 0.95 * self._accepted + accepted
        self._promised = 0.95 * self._promised + promised
        self._gained = 0.95 * self._gained + (accepted if promised else 0)

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


def keep(times: list[float], seconds: float) -> None:
    """The first time, and the last eight."""
    times.append(seconds)
    del times[1:-8]


def typical(times: list[float], default: float | None = None) -> float:
    """The shortest, without the first time, in which something was compiled: what else a machine
    does only ever adds to a time, and would make one size or draft look worse than the others."""
    return min(times[1:]) if len(times) > 1 or default is None else default
