"""Every way that chance can fall: a function that draws random numbers, run once for each of them.

`law(run)` calls run(rng) again and again. What rng hands out is undecided until it is asked: at
each question (which token? is it below 1/3?) one answer is taken, and the others wait for another
run. Nothing is sampled, so nothing has to be averaged; with Fractions probabilities are exact.
"""

from collections.abc import Callable
from typing import Self

IMPOSSIBLE = 1e-12  # answers less probable than this come from rounding, and are not followed


class Chance:
    """What `law` hands to a function in place of a `numpy.random.Generator`: two of its methods."""

    def __init__(self, told: list[int]):
        self.told = told  # the answers to the first questions
        self.taken: list[int] = []  # the answers of this run
        self.others: list[list[int]] = []  # to be told to other runs
        self.probability = 1

    def choice(self, n: int, p) -> int:
        """An index below n, with probabilities p that add up to 1."""
        if len(p) != n or abs(sum(p) - 1) > 1e-6:
            raise ValueError(f"p: expected {n} probabilities that add up to 1, got {list(p)}")
        possible = [i for i in range(n) if p[i] > IMPOSSIBLE]
        asked = len(self.taken)
        if asked < len(self.told):
            answer = self.told[asked]
        else:
            answer = possible[0]
            self.others += [[*self.taken, i] for i in possible[1:]]
        self.taken.append(answer)
        self.probability = self.probability * p[answer]
        return answer

    def random(self) -> "Undecided":
        """A number in [0, 1) that may be compared with another, once."""
        return Undecided(self)


class Undecided:
    """u of `u < x`. Asked twice the answers would have to agree, so it is not."""

    def __init__(self, chance: Chance):
        self.chance: Chance | None = chance

    def __lt__(self: Self, x) -> bool:
        if self.chance is None:
            raise NotImplementedError("rng.random(): compared twice; draw a number for each")
        chance, self.chance = self.chance, None
        x = min(max(x, 0), 1)
        return chance.choice(2, (1 - x, x)) == 1


def law(run: Callable, *, most: int = 200_000) -> dict:
    """{result: probability} of run(rng), whose results can be keys, such as tuples of tokens.

        >>> law(lambda rng: rng.random() < Fraction(1, 4))
        {False: Fraction(3, 4), True: Fraction(1, 4)}

    Raises RuntimeError beyond `most` ways.
    """
    found: dict = {}
    waiting: list[list[int]] = [[]]
    runs = 0
    while waiting:
        runs += 1
        if runs > most:
            raise RuntimeError(f"more than {most} outcomes: ask about fewer tokens")
        rng = Chance(waiting.pop())
        result = run(rng)
        found[result] = found.get(result, 0) + rng.probability
        waiting += rng.others
    return found
