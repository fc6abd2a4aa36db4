"""Every way that chance can fall: a function that draws random numbers, run once for each of them.

`outcomes(run)` calls run(rng) again and again, and gives each result with its exact probability.
rng looks like a `numpy.random.Generator`. What it hands out is not a number but something that is
undecided until it is asked: at each question (which token? is it below 0.3?) one answer is taken,
and the others wait for another run. Nothing is sampled, so nothing has to be averaged.
"""

from collections.abc import Callable, Iterator

import numpy as np

IMPOSSIBLE = 1e-12  # answers less probable than this come from rounding, and are not followed
ROUNDED = 1e-6  # how far from 1 probabilities may add up: those of float32 do not add up to 1


class OwnChance(Exception):
    """The same answers led to other questions: there is chance that did not come from rng."""

    mistake = "chance of its own"


class Answers:
    """The answers of one run: those that were prescribed, then the first possible ones."""

    def __init__(self, prescribed: list[int]):
        self.prescribed = prescribed
        self.taken: list[int] = []
        self.chances: list[tuple] = []  # of the answers that each question had
        self.probability = 1
        self.others: list[list[int]] = []  # to be prescribed to other runs

    def choose(self, chances) -> int:
        """An index into `chances`, which add up to 1."""
        possible = [i for i, chance in enumerate(chances) if chance > IMPOSSIBLE]
        if not possible:
            raise ValueError("rng: no possible answer, all probabilities are 0 or NaN")
        at = len(self.taken)
        if at < len(self.prescribed):
            found = self.prescribed[at]
            if found not in possible:
                raise OwnChance("the same answers led to other questions")
        else:
            found = possible[0]
            self.others += [[*self.taken, i] for i in possible[1:]]
        self.taken.append(found)
        self.chances.append(tuple(chances))
        self.probability = self.probability * chances[found]
        return found


class _Interval:
    """Where the number lies, by the comparisons so far."""

    def __init__(self, answers):
        self.answers = answers
        self.low = 0
        self.high = 1

    def below(self, threshold) -> bool:
        if threshold != threshold:
            return False  # as for any number: nothing is below NaN
        share = (threshold - self.low) / (self.high - self.low)
        share = min(max(share, 0), 1)
        yes = bool(self.answers.choose((1 - share, share)) == 1 if 0 < share < 1 else share == 1)
        if yes:
            self.high = min(self.high, threshold)
        else:
            self.low = max(self.low, threshold)
        return yes


class Uniform:
    """slope · u + shift, for an undecided u. Comparing it decides, and is remembered: a number that
    is used twice is the same number."""

    def __init__(self, answers, interval: _Interval | None = None, slope=1, shift=0):
        self._interval = _Interval(answers) if interval is None else interval
        self._slope = slope
        self._shift = shift

    def __lt__(self, other) -> bool:
        """Also for ≤, since a given number has probability 0."""
        if isinstance(other, Uniform):
            return self._below(other)
        if self._slope == 0:
            return bool(self._shift < other)
        if other != other:
            return False
        threshold = (other - self._shift) / self._slope
        return self._interval.below(threshold) == bool(self._slope > 0)

    def __gt__(self, other) -> bool:
        if isinstance(other, Uniform):
            return other < self
        return bool(other == other) and not self < other

    __le__ = __lt__
    __ge__ = __gt__
    __hash__ = object.__hash__

    def __eq__(self, other) -> bool:
        return self is other

    def _below(self, other: "Uniform") -> bool:
        if other._interval is not self._interval:
            raise NotImplementedError("rng: two random numbers are compared with each other")
        difference = other - self
        return 0 < difference

    def __add__(self, other):
        if isinstance(other, Uniform):
            if other._interval is not self._interval:
                raise NotImplementedError("rng: two random numbers are added")
            return self._new(self._slope + other._slope, self._shift + other._shift)
        return self._new(self._slope, self._shift + other)

    __radd__ = __add__

    def __mul__(self, other):
        if isinstance(other, Uniform):
            raise NotImplementedError("rng: two random numbers are multiplied")
        return self._new(self._slope * other, self._shift * other)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self * (1 / other)

    def __neg__(self):
        return self * -1

    def __sub__(self, other):
        return self + other * -1

    def __rsub__(self, other):
        return self * -1 + other

    def _new(self, slope, shift) -> "Uniform":
        return Uniform(None, self._interval, slope, shift)

    def __float__(self):
        raise TypeError(
            "rng.random(): its value is not decided. Compare it (u < x), or call rng.choice "
            "for the distribution that is wanted"
        )

    def log(self):
        float(self)


def array_of(make: Callable, size):
    """make(), or an array (dtype object) of as many as `size` says."""
    if size is None:
        return make()
    found = np.empty(size, object)
    for i in np.ndindex(found.shape):
        found[i] = make()
    return found


class Source:
    """What `outcomes` hands to a function in place of a `numpy.random.Generator`.

    random, uniform       a number that may be compared, added to and multiplied (`Uniform`)
    choice, integers      an index, a token
    at(*key)              the stream of numbers that belongs to a key, from its beginning
    """

    def __init__(self, answers: Answers, streams: dict | None = None, key: tuple = ()):
        self._answers = answers
        self._streams = {} if streams is None else streams
        self._key = key
        self._drawn = 0

    def at(self, *key) -> "Source":
        """The numbers of this key, from the first one on: the same key, the same numbers."""
        return Source(self._answers, self._streams, (*self._key, *key))

    def _next(self, make: Callable):
        """The stream's next number: a new one, or the one that was there for this key before."""
        place = (self._key, self._drawn)
        self._drawn += 1
        if not self._key:
            return make()
        if place not in self._streams:
            self._streams[place] = make()
        return self._streams[place]

    def random(self, size=None):
        """In [0, 1); an array of them, whose dtype is object, where a size is given."""
        return array_of(lambda: self._next(lambda: Uniform(self._answers)), size)

    def uniform(self, low=0.0, high=1.0, size=None):
        return array_of(lambda: self.random() * (high - low) + low, size)

    def integers(self, low, high=None):
        low, high = (0, low) if high is None else (low, high)
        return low + self.choice(high - low)

    def choice(self, a, size=None, replace=True, p=None):
        """As NumPy's: of a, or of range(a), with probabilities p that add up to 1."""
        values = range(a) if isinstance(a, int | np.integer) else list(a)
        left = [1 / len(values)] * len(values) if p is None else list(np.asarray(p))
        if len(left) != len(values):
            raise ValueError(f"p: expected {len(values)} probabilities, got {len(left)}")
        if not all(x >= 0 for x in left) or not abs(sum(left) - 1) <= ROUNDED:
            raise ValueError(f"p: expected probabilities that add up to 1, got {left}")
        found = []
        for _ in range(int(np.prod(() if size is None else size))):
            i = self._index([x / sum(left) for x in left])
            found.append(values[i])
            if not replace:
                left[i] = left[i] * 0
        return found[0] if size is None else np.reshape(np.array(found), size)

    def _index(self, chances: list) -> int:
        if not self._key:
            return self._answers.choose(chances)
        number = self.random()  # which may have been looked at before
        up_to = np.cumsum(np.array(chances, object))
        return next((i for i, x in enumerate(up_to[:-1]) if number < x), len(chances) - 1)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"rng.{name} is not one of {', '.join(OFFERED)}")


OFFERED = tuple(name for name in vars(Source) if not name.startswith("_"))


def outcomes(run: Callable, *, most: int = 200_000) -> Iterator[tuple]:
    """(run(rng), its probability) for each way that chance can fall in it.

        >>> [x for x, _ in outcomes(lambda rng: rng.random() < 0.25)]
        [False, True]

    Probabilities are exact: Fractions where those that run asks with are, else float64. Raises
    RuntimeError beyond `most` runs, and OwnChance where the same answers lead to other questions.
    """
    waiting = [([], [])]
    runs = 0
    while waiting:
        prescribed, chances = waiting.pop()
        answers = Answers(prescribed)
        result = run(Source(answers))
        runs += 1
        if runs > most:
            raise RuntimeError(f"more than {most} outcomes: ask about fewer tokens")
        if len(answers.taken) < len(prescribed) or answers.chances[: len(chances)] != chances:
            raise OwnChance("the same answers led to other questions")
        for other in answers.others:
            waiting.append((other, answers.chances[: len(other)]))
        yield result, answers.probability


def law(run: Callable, **options) -> dict:
    """{result: probability} of a function whose results can be keys, such as tuples of tokens."""
    found: dict = {}
    for result, probability in outcomes(run, **options):
        found[result] = found.get(result, 0) + probability
    return found
