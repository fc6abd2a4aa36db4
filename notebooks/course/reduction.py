"""04's task: reduce many states by an associative operation, in few rounds."""

from functools import partial

import numpy as np

from course.plane import PLACES, draw_plane, located, title
from course.verdict import Mistake, call, verdict
from figures.canvas import styled
from figures.sentence import WEIGHTS
from figures.style import BLUE, GREY, INK, Figure, new_figure

GIVEN = "a list of {} states, and op, which joins two of them"


def watched(op, states):
    """`op`, which complains after ten calls a state."""
    calls = [0]

    def counted(a, b):
        calls[0] += 1
        if calls[0] > 10 * len(states) + 10:
            raise Mistake("it never ends: the list of states never shrinks to one")
        return op(a, b)

    return counted


def on_the_plane(mine) -> dict:
    """What `mine` joins of the five words' masses, as pairs of places, and what comes out."""
    merges = []

    def lever(a, b):
        merges.append((a[1], b[1]))
        mass = a[0] + b[0]
        return mass, a[1] + b[0] / mass * (b[1] - a[1])

    states = list(zip(WEIGHTS, PLACES.astype(float), strict=True))
    mass, place = call(mine, states, watched(lever, states), given=GIVEN.format(5))
    return {"merges": merges, "yours": located(mass, mass * np.asarray(place))}


@styled
def picture(sentence: str, letters: str, rounds: dict, merges, yours) -> Figure:
    """The joins of letters, round by round, and the same function's merges of the five words."""
    figure, (left, right) = new_figure(9.6, 4.0, ncols=2)
    place = {letter: (x, 0) for x, letter in enumerate(letters)}
    for letter, at in place.items():
        left.text(*at, letter, ha="center", va="center", fontsize=10)
    for number, joined in sorted(rounds.items()):
        for word, a, b in joined:
            # Over the middle of its letters, unless another letter stands there.
            columns = [letters.index(letter) for letter in word]
            at = np.mean(columns) if word in letters else columns[0], number
            for part in (a, b):
                ends = np.array([place.get(part, at), at])
                left.plot(*ends.T, color=GREY, lw=1, zorder=1)
            place[word] = at
            box = {"boxstyle": "round,pad=0.2", "fc": "white", "ec": BLUE}
            left.text(*at, word, ha="center", va="center", fontsize=8, color=INK, bbox=box)
    left.set(xlim=(-0.7, len(letters) - 0.3), ylim=(-0.4, max(rounds, default=0) + 0.5))
    left.set(xticks=(), yticks=range(max(rounds, default=0) + 1), ylabel="round")
    left.spines[:].set_visible(False)
    title(figure, sentence.splitlines()[0])
    said = draw_plane(
        right, WEIGHTS, merges=merges, right=(16, np.array([1.25, 2.25])), yours=yours
    )
    return figure.describe(f"{sentence}. Left, what each round joins; right, the plane. {said}")


@verdict
def check_reduction(mine):
    """The first mistake of a reduction, by name, and its merges, round by round."""
    for n in (1, 2, 3, 5, 6, 8, 13):
        letters, rounds = "abcdefghijklm"[:n], {}

        def op(a, b, rounds=rounds):
            joined, depth = a[0] + b[0], max(a[1], b[1]) + 1
            rounds.setdefault(depth, []).append((joined, a[0], b[0]))
            return joined, depth

        states = [(letter, 0) for letter in letters]
        found = call(mine, list(states), watched(op, states), given=GIVEN.format(n))
        if not isinstance(found, tuple) or [*map(type, found)] != [str, int]:
            if n > 1 and not rounds:
                raise Mistake("op was never called")
            if isinstance(found, list) and len(found) != 1:
                raise Mistake("not one state: repeat the rounds")
            raise Mistake(f"it returned {type(found).__name__}, not one state")
        joined, depth = found
        enough, merges = (n - 1).bit_length(), sum(map(len, rounds.values()))
        mistakes = {
            "a state is left out": set(joined) != set(letters),
            "a state counts twice": len(joined) > n,
            "another order, and op need not commute": joined != letters,
            f"a chain: {depth} rounds, {enough} are enough": depth == n - 1 > enough,
            f"{depth} rounds, {enough} are enough": depth > enough,
            f"{merges} merges, {n - 1} are enough": merges >= n,
        }
        drawn = partial(picture, letters=letters, rounds=rounds)
        if any(mistakes.values()):
            first = next(name for name, made in mistakes.items() if made)
            joins = [f"round {r}: {' '.join(j[0] for j in rounds[r])}" for r in sorted(rounds)]
            sentence = "\n".join([f"{first}, for {letters}", *joins])
            try:
                drawn = partial(drawn, **on_the_plane(mine))
            except Mistake:  # it joins letters only
                drawn = None
            raise Mistake(sentence, drawn)
        if n == 5:
            shown = drawn
    return partial(shown, **on_the_plane(mine))
