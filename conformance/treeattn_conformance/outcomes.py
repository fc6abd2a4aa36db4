"""The exact distribution of a random function: run once for each outcome of its random numbers.

`law(run)` calls run(rng) again and again, and adds up each result's exact probability. rng looks
like a `numpy.random.Generator`, but its numbers are undecided until the function asks about them.
At each question (which token? is it below 0.3?) the run takes one answer, and later runs take the
other answers. Nothing is sampled, so nothing has to be averaged.
"""

import itertools
from collections.abc import Callable

import numpy as np

IMPOSSIBLE = 1e-12  # answers less probable than this come from rounding, and are not followed
ROUNDED = 1e-6  # how far from 1 a sum of probabilities may be, because float32 rounds


class OwnChance(Exception):
    """The same answers led to other questions, so some randomness did not come from rng."""

    mistakes = ("chance of its own",)

    def __init__(self):
        super().__init__("the same answers led to other questions")


class Answers:
    """The answers of one run: first the given answers, then the first possible answer each time."""

    def __init__(self, told: list[tuple]):
        self.told = told  # (chances, answer) of the first questions
        self.taken: list[tuple] = []
        self.others: list[list[tuple]] = []  # given answers of later runs
        self.probability = 1

    def choose(self, chances: tuple) -> int:
        """An index into `chances`, which add up to 1."""
        place = len(self.taken)
        if place < len(self.told):
            before, answer = self.told[place]
            if before != chances:
                raise OwnChance
        else:
            answer, *others = [i for i, chance in enumerate(chances) if chance > IMPOSSIBLE]
            self.others += [[*self.taken, (chances, i)] for i in others]
        self.taken.append((chances, answer))
        self.probability = self.probability * chances[answer]
        return answer


class Uniform:
    """slope · u + shift, for an undecided u. Each comparison narrows u, and later ones respect it,
    so a number that is used twice is the same number."""

    def __init__(self, answers: Answers, between: list | None = None, slope=1, shift=0):
        self._answers = answers
        self._between = [0, 1] if between is None else between  # where u is, by what is decided
        self._slope = slope
        self._shift = shift

    def __lt__(self, other) -> bool:
        """< and ≤ are the same, because u equals a given number with probability 0."""
        if other is self:
            return False
        if isinstance(other, Uniform):
            raise NotImplementedError("rng: two random numbers are compared with each other")
        if other != other:
            return False  # no number is below NaN
        if self._slope == 0:
            return bool(self._shift < other)
        low, high = self._between
        threshold = min(max((other - self._shift) / self._slope, low), high)
        share = (threshold - low) / (high - low)
        decided = share in (0, 1)
        below = share == 1 if decided else self._answers.choose((1 - share, share)) == 1
        self._between[int(below)] = threshold
        return bool(below == (self._slope > 0))

    def __gt__(self, other) -> bool:
        return bool(other == other) and not self < other

    __le__ = __lt__
    __ge__ = __gt__

    def __add__(self, other):
        return Uniform(self._answers, self._between, self._slope, self._shift + other)

    def __mul__(self, other):
        return Uniform(self._answers, self._between, self._slope * other, self._shift * other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __truediv__(self, other):
        return self * (1 / other)

    def __neg__(self):
        return self * -1

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    def __float__(self):
        raise TypeError(
            "rng.random(): its value is not decided. Compare it (u < x), or call rng.choice "
            "for the distribution that is wanted"
        )

    log = __float__


class Source:
    """The rng of a function that `law` runs, in place of a `numpy.random.Generator`.

    random, uniform       a number that may be compared, added to and multiplied (`Uniform`)
    choice, integers      an index, a token
    at(*key)              the stream of numbers that belongs to a key, from its beginning
    """

    def __init__(self, answers: Answers, numbers: dict, key: tuple = ()):
        self._answers = answers
        self._numbers = numbers
        self._key = key
        self._drawn = 0

    def at(self, *key) -> "Source":
        """The numbers of this key, from its first on. The same key gives the same numbers."""
        return Source(self._answers, self._numbers, (*self._key, *key))

    def _number(self) -> Uniform:
        if not self._key:
            return Uniform(self._answers)
        self._drawn += 1
        return self._numbers.setdefault((self._key, self._drawn), Uniform(self._answers))

    def random(self, size=None):
        """A number in [0, 1), or an array of this size, with dtype object."""
        if size is None:
            return self._number()
        found = np.empty(size, object)
        for i in np.ndindex(found.shape):
            found[i] = self._number()
        return found

    def uniform(self, low=0.0, high=1.0, size=None):
        return self.random(size) * (high - low) + low

    def integers(self, low, high=None):
        low, high = (0, low) if high is None else (low, high)
        return low + self.choice(high - low)

    def choice(self, a, size=None, replace=True, p=None):
        """As in NumPy: from a, or from range(a), with probabilities p that add up to 1."""
        values = range(a) if isinstance(a, int | np.integer) else list(a)
        left = [1 / len(values)] * len(values) if p is None else np.asarray(p).tolist()
        if len(left) != len(values):
            raise ValueError(f"p: expected {len(values)} probabilities, got {len(left)}")
        if not all(x >= 0 for x in left) or not abs(sum(left) - 1) <= ROUNDED:
            raise ValueError(f"p: expected probabilities that add up to 1, got {left}")
        found = []
        for _ in range(1 if size is None else int(np.prod(size))):
            total, number = sum(left), self._number()
            if not total:
                raise ValueError(
                    f"p: expected more probabilities above 0 for {size} choices, got {p}"
                )
            up_to = enumerate(itertools.accumulate(left[:-1]))
            i = next((i for i, x in up_to if number < x / total), len(left) - 1)
            found.append(values[i])
            if not replace:
                left[i] = left[i] * 0
        return found[0] if size is None else np.reshape(np.array(found), size)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"rng.{name} is not one of {', '.join(OFFERED)}")


OFFERED = tuple(name for name in vars(Source) if not name.startswith("_"))


def law(run: Callable, *, most: int = 200_000) -> dict:
    """{result: probability} of a function. Its results are hashable, such as tuples of tokens.

        >>> law(lambda rng: rng.random() < 0.25)
        {False: 0.75, True: 0.25}

    The probabilities are exact Fractions if `run` passes Fractions to rng, else float64. Raises
    RuntimeError after `most` runs, and OwnChance if the same answers lead to other questions.
    """
    found: dict = {}
    waiting: list[list] = [[]]
    runs = 0
    while waiting:
        answers = Answers(waiting.pop())
        result = run(Source(answers, {}))
        runs += 1
        if runs > most:
            raise RuntimeError(f"more than {most} outcomes: ask about fewer tokens")
        if len(answers.taken) < len(answers.told):
            raise OwnChance
        waiting += answers.others
        found[result] = found.get(result, 0) + answers.probability
    return found
