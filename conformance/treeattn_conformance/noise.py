"""Noise whose winner is drawn: argmax of logits + Gumbel noise, or of p / exponential noise.

With independent exponential numbers E, the index with the smallest E / w is i with probability
w_i / Σw, and −log E is Gumbel noise: argmax(log w − log E) is the same index. Where one vector of
noise decides twice, with weights w and then with others, the two winners are dependent; how, the
integral over the exponentials says exactly.
"""

import itertools

import numpy as np


class _Race:
    """One vector of exponential numbers, and what is known of it: nobody, or a winner."""

    def __init__(self, answers):
        self.answers = answers
        self.first = None  # (weights, winner) of the first race
        self.over = False

    def winner(self, weights: np.ndarray) -> int:
        if self.over:
            raise NotImplementedError("rng: one vector of noise decides more than twice")
        if self.first is None:
            found = self.answers.choose(_shares(weights))
            self.first = (weights, found)
            return found
        self.over = True
        return self.answers.choose(_second(*self.first, weights))

    def order(self, weights: np.ndarray) -> list[int]:
        """All indices, the winner first; those of weight 0 last."""
        if self.over or self.first is not None:
            raise NotImplementedError("rng: one vector of noise decides twice, and then an order")
        self.over = True
        left = np.array(weights)
        found = []
        while left.any():
            found.append(self.answers.choose(_shares(left)))
            left[found[-1]] = 0
        return found + [i for i in range(len(left)) if i not in found]


def _shares(weights: np.ndarray) -> list:
    if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise ValueError(f"rng: noise decides between weights {weights.tolist()}")
    return [x / weights.sum() for x in weights.tolist()]


def _second(w: np.ndarray, a: int, v: np.ndarray) -> list[float]:
    """The chances of each winner of a race with weights v, where a has won that with weights w."""
    _shares(v)
    both = np.array([_both(w, a, v, b) if v[b] > 0 else 0.0 for b in range(len(v))])
    return (both / both.sum()).tolist()


def _both(w, a: int, v, b: int) -> float:
    """P(E_a / w_a and E_b / v_b are the smallest of their races).

    Every E_y is at least max(s_y E_a, t_y E_b), with s = w / w_a and t = v / v_b. Given E_a and
    E_b, the others do so with probability exp(−Σ max(…)); a and b need E_b / E_a in [s_b, 1 / t_a].
    Between the ratios at which a maximum changes sides, the exponent is αE_a + βE_b.
    """
    s = w / w[a]
    t = v / v[b]
    if a == b:
        return float(1 / np.maximum(s, t).sum())
    low = s[b]
    high = 1 / t[a] if t[a] > 0 else np.inf
    others = [y for y in range(len(w)) if y not in (a, b)]
    turns = [s[y] / t[y] for y in others if t[y] > 0]
    ends = [low, *sorted(x for x in turns if low < x < high), high]
    total = 0.0
    for start, end in itertools.pairwise(ends):
        if start >= end:
            continue
        middle = start + 1 if end == np.inf else (start + end) / 2
        alpha = 1 + sum(s[y] for y in others if s[y] >= t[y] * middle)
        beta = 1 + sum(t[y] for y in others if s[y] < t[y] * middle)
        until = 0.0 if end == np.inf else 1 / (alpha + beta * end)
        total += (1 / (alpha + beta * start) - until) / beta
    return total


class Noise(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of noise (…, V), to which logits are added, or by which probabilities are divided.

    `argmax` (and `argmin`, `argsort`) along the last axis draws the index.
    """

    def __init__(self, races: np.ndarray, kind: str, weights, sign: int):
        self._races = races
        self._kind = kind  # "gumbel" or "exponential", "score" once there are weights
        self._weights = weights
        self._sign = sign  # of the score whose largest wins

    @classmethod
    def new(cls, answers, kind: str, shape: tuple) -> "Noise":
        races = np.empty(shape[:-1], object)
        for i in np.ndindex(races.shape):
            races[i] = _Race(answers)
        return cls(races, kind, np.ones(shape), 1 if kind == "gumbel" else -1)

    @property
    def shape(self) -> tuple:
        return self._weights.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i) -> "Noise":
        weights = self._weights[i]
        races = np.asarray(self._races, object)[i] if self._races.ndim else self._races
        if weights.shape[-1:] != self.shape[-1:]:
            raise NotImplementedError("rng: a part of a vector of noise")
        return Noise(np.asarray(races, object), self._kind, weights, self._sign)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if method != "__call__" or options:
            return NotImplemented
        if ufunc is np.negative:
            return self._like("score", self._weights, -self._sign)
        if len(inputs) != 2:
            raise NotImplementedError(f"rng: numpy.{ufunc.__name__} of {self._kind} noise")
        noise_first = inputs[0] is self
        other = np.asarray(inputs[1] if noise_first else inputs[0], np.float64)
        if self._kind == "gumbel" and ufunc is np.add:
            return self._like("score", self._weights * np.exp(other), 1)
        if self._kind == "gumbel" and ufunc is np.subtract and noise_first:
            return self._like("score", self._weights * np.exp(-other), 1)
        if self._kind == "exponential" and ufunc is np.true_divide:
            return self._like("score", self._weights * other, -1 if noise_first else 1)
        raise NotImplementedError(f"rng: numpy.{ufunc.__name__} of {self._kind} noise")

    def _like(self, kind: str, weights, sign: int) -> "Noise":
        if weights.shape[-1:] != self.shape[-1:]:
            raise ValueError(f"rng: noise of shape {self.shape} for {weights.shape[-1]} tokens")
        races = np.broadcast_to(self._races, weights.shape[:-1])
        return Noise(races, kind, weights, sign)

    def __array_function__(self, function, types, arguments, options):
        if function in (np.argmax, np.argmin, np.argsort):
            return getattr(self, function.__name__)(*arguments[1:], **options)
        raise NotImplementedError(f"rng: numpy.{function.__name__} of noise")

    def argmax(self, axis=-1):
        return self._first(axis, 1)

    def argmin(self, axis=-1):
        return self._first(axis, -1)

    def argsort(self, axis=-1, kind=None, stable=None):
        """Of scores whose smallest wins: the winner first."""
        self._check(axis, -1)
        return self._each(lambda race, weights: race.order(weights), (self.shape[-1],))

    def _first(self, axis, sign: int):
        self._check(axis, sign)
        found = self._each(lambda race, weights: race.winner(weights), ())
        return int(found) if found.ndim == 0 else found

    def _check(self, axis, sign: int) -> None:
        if axis not in (None, -1, len(self.shape) - 1) or (axis is None and self._races.ndim):
            raise NotImplementedError("rng: noise along another axis than the last")
        if sign != self._sign:
            raise NotImplementedError("rng: the last of a race is asked for, and not the first")

    def _each(self, ask, shape) -> np.ndarray:
        found = np.empty((*self._races.shape, *shape), int)
        for i in np.ndindex(self._races.shape):
            found[i] = ask(self._races[i], self._weights[i])
        return found
