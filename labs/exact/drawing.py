"""Weights as digits to the base 256, and their sums by position: the figure of the notebook."""

from figures.canvas import styled
from figures.style import BLUE, GREY, INK, PALE, RED, Figure, new_figure

POSITIONS = range(1, -8, -1)  # the columns, from the left
LEVELS = 6


@styled
def falling_digits(keys: dict[float, dict[int, int]], larger: float) -> Figure:
    """Weights in columns and the window of a state, before and after the key `larger` comes.

    keys: the digits of each score's weight by position; the one of `larger` among them
    """
    figure, axes = new_figure(9.6, 3.0, ncols=2)
    before = {score: digits for score, digits in keys.items() if score != larger}
    _draw_table(axes[0], before, len(keys), "The window begins where the largest key does")
    _draw_table(axes[1], keys, len(keys), "A larger key: one position falls off, for all")
    return figure.describe(
        f"""Two tables of digits to the base 256, a column for each power of 256, a row for each of
        the weights of the scores {list(before)}. Left, a grey window of six columns with the sums
        {_sums(before)} under it; digits to the right of it are struck out. Right, a fifth weight,
        of score {larger:g}, begins one column further left: the window has moved there, the sums
        are {_sums(keys)}, and one more column of digits is struck out."""
    )


def _window(keys) -> range:
    top = max(map(max, keys.values()))
    return range(top, top - LEVELS, -1)


def _sums(keys) -> list[int]:
    return [sum(digits.get(place, 0) for digits in keys.values()) for place in _window(keys)]


def _draw_table(ax, keys, rows: int, title: str) -> None:
    window = _window(keys)
    bottom = -len(keys) - 0.55
    left = -window[0] - 0.5
    ax.fill_between([left, left + LEVELS], bottom - 1, 0.5, color=PALE, lw=0, zorder=0)
    for place in POSITIONS:
        ax.text(-place, 0.1, f"$256^{{{place}}}$", ha="center", va="center", color=GREY)
    for i, (score, digits) in enumerate(keys.items()):
        ax.text(-1.75, -1 - i, f"$e^{{{score:g}}}$", ha="right", va="center", color=INK)
        _draw_digits(ax, -1 - i, digits, window)
    ax.plot([-2.6, len(POSITIONS) - 1.5], [bottom, bottom], color=INK, lw=1)
    ax.text(-1.75, bottom - 0.5, "sum", ha="right", va="center", color=BLUE)
    for place, total in zip(window, _sums(keys), strict=True):
        ax.text(-place, bottom - 0.5, str(total), ha="center", va="center", color=BLUE)
    ax.set_title(title, fontsize=10)
    ax.set(xlim=(-2.7, len(POSITIONS) - 1.4), ylim=(-rows - 1.7, 0.8))
    ax.axis("off")


def _draw_digits(ax, y: float, digits: dict[int, int], window: range) -> None:
    last = min(place for place, digit in digits.items() if digit)  # zeros follow
    for place in range(max(digits), last - 1, -1):
        kept = place in window
        digit = str(digits.get(place, 0))
        ax.text(-place, y, digit, ha="center", va="center", color=INK if kept else RED)
        if not kept:
            ax.plot([-place - 0.36, -place + 0.36], [y, y], color=RED, lw=1.2)
