"""Weights as digits to the base 256, and their sums, position by position (notebook 05b)."""

import jax.numpy as jnp
import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREY, INK, PALE, RED, Figure, new_figure
from treeattn.kernel.digits import LEVELS, PER_NAT, level_digits, place_word, power_of, word_of

SCORES = 3.0, 0.5, -8.0, -20.0
LARGER = 9.0
POSITIONS = range(1, -8, -1)  # the columns, from the left


def digits_of(score: float) -> dict[int, int]:
    """The digits of e^score by position, as `ExactState` has them: six from its own index."""
    index, eighths, factor = power_of(jnp.float32(score) * np.float32(PER_NAT))
    word = word_of(factor, eighths.astype(jnp.int32))
    digits = level_digits(*place_word(word, jnp.int32(0)))
    return {int(index) - i: int(digit) for i, digit in enumerate(digits)}


def window_of(scores) -> range:
    """The positions that a state of these keys keeps, the highest first."""
    index = max(max(digits_of(score)) for score in scores)
    return range(index, index - LEVELS, -1)


def sums_of(scores) -> dict[int, int]:
    """The sums of the digits at the positions that are kept."""
    keys = [digits_of(score) for score in scores]
    return {place: sum(key.get(place, 0) for key in keys) for place in window_of(scores)}


def _draw_row(ax, y: float, score: float, window: range) -> None:
    ax.text(-1.75, y, f"$e^{{{score:g}}}$", ha="right", va="center", color=INK)
    found = digits_of(score)
    last = min(place for place, digit in found.items() if digit)  # zeros follow
    for place, digit in found.items():
        if place < last:
            continue
        kept = place in window
        ax.text(-place, y, str(digit), ha="center", va="center", color=INK if kept else RED)
        if not kept:
            ax.plot([-place - 0.36, -place + 0.36], [y, y], color=RED, lw=1.2)


def _draw_window(ax, scores, title: str) -> None:
    window = window_of(scores)
    bottom = -len(scores) - 0.55
    left = -window[0] - 0.5
    ax.fill_between([left, left + LEVELS], bottom - 1, 0.5, color=PALE, lw=0, zorder=0)
    for place in POSITIONS:
        ax.text(-place, 0.1, f"$256^{{{place}}}$", ha="center", va="center", color=GREY)
    for i, score in enumerate(scores):
        _draw_row(ax, -1.0 - i, score, window)
    ax.plot([-2.6, len(POSITIONS) - 1.5], [bottom, bottom], color=INK, lw=1)
    ax.text(-1.75, bottom - 0.5, "sum", ha="right", va="center", color=BLUE)
    for place, total in sums_of(scores).items():
        ax.text(-place, bottom - 0.5, str(total), ha="center", va="center", color=BLUE)
    ax.set_title(title, fontsize=10)
    ax.set(xlim=(-2.7, len(POSITIONS) - 1.4), ylim=(-len(SCORES) - 2.7, 0.8))
    ax.axis("off")


@styled
def falling_digits() -> Figure:
    """Four weights in columns, the window of six positions, and a larger key that moves it."""
    figure, axes = new_figure(9.6, 3.0, ncols=2)
    _draw_window(axes[0], SCORES, "Four keys: the window begins where the largest does")
    _draw_window(axes[1], (*SCORES, LARGER), "A larger key: one position falls off, for all")
    before = sums_of(SCORES)
    after = sums_of((*SCORES, LARGER))
    return figure.describe(
        f"""Two tables of digits to the base 256, a column for each power of 256, a row for each of
        the weights e^3, e^0.5, e^−8 and e^−20, which begin at positions 0, 0, −2 and −4. Left, a
        window of six columns, 0 to −5, with the sums {list(before.values())} under it; digits of
        the smallest weight to the right of it are struck out. Right, a fifth weight, e^9, begins at
        position 1: the window is 1 to −4, the sums are {list(after.values())}, and the digits
        at position −5 are struck out as well."""
    )


FIGURES = {"falling_digits": falling_digits}
