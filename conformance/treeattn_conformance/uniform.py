"""A number in [0, 1) that is undecided: it is known only as far as it has been compared."""

from collections.abc import Callable

import numpy as np


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
            "rng.random(): its value is not decided. Compare it (u < x), or call rng.choice, "
            "rng.gumbel or rng.exponential for the distribution that is wanted"
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
