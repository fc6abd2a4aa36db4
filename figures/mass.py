"""A merge is a centre of mass: lse is the logarithm of a mass, out is where it lies."""

import numpy as np

from figures.canvas import styled
from figures.sentence import VALUES, WEIGHTS, WORDS, convex_hull
from figures.style import BLUE, GREY, INK, NOTE, ORANGE, PALE, RED, Figure, new_figure

# ---------------------------------------------------------------- in the plane of values

# An order of merges is a word's number, or a pair of orders.
ORDERS = {
    "a chain": ((((0, 1), 2), 3), 4),
    "two parts": (((0, 1), 2), (3, 4)),
    "other pairs": ((0, 4), ((1, 2), 3)),
}


def centre(order) -> tuple[int, np.ndarray]:
    """(mass, place) of what an order of merges has merged."""
    if isinstance(order, int):
        return WEIGHTS[order], np.array(VALUES[order], float)
    (a, x), (b, y) = map(centre, order)
    return a + b, x + b / (a + b) * (y - x)  # on the segment between, at b's share of the way


def inner(order) -> list:
    """The merges of an order, each after its children."""
    return [] if isinstance(order, int) else [*inner(order[0]), *inner(order[1]), order]


def _draw_order(ax, order) -> None:
    values = np.array(VALUES, float)
    ax.fill(*convex_hull(values).T, color=PALE, zorder=0)
    ax.scatter(*values.T, s=28 * np.array(WEIGHTS), color=ORANGE, lw=0, zorder=2)
    offsets = (-9, -17), (-8, -18), (-31, 11), (-15, 9), (-14, 16)
    for word, value, weight, offset in zip(WORDS, values, WEIGHTS, offsets, strict=True):
        ax.annotate(f"{word} {weight}", value, offset, textcoords="offset points", fontsize=9)
    for pair in inner(order):
        mass, place = centre(pair)
        ends = np.array([centre(child)[1] for child in pair])
        ax.plot(*ends.T, color=BLUE, lw=1.3, zorder=3)
        last = pair is order
        if not last:
            ax.scatter(*place, s=28 * mass, fc="white", ec=BLUE, lw=1.3, zorder=4)
            ax.annotate(str(mass), place, ha="center", va="center", fontsize=8, zorder=5)
    ax.plot(*centre(order)[1], "X", color=INK, ms=11, mec="white", zorder=6)
    ax.set(xlim=(-0.9, 4.9), ylim=(-0.9, 4.9), aspect="equal", xticks=range(5), yticks=range(5))
    ax.set(xlabel="value, coordinate 1")


@styled
def merge_mass() -> Figure:
    """Three orders of merging the five words, in the plane of their values: one cross."""
    figure, axes = new_figure(9.6, 3.9, ncols=3)
    for ax, (name, order) in zip(axes, ORDERS.items(), strict=True):
        _draw_order(ax, order)
        ax.set_title(name)
    axes[0].set_ylabel("coordinate 2")
    return figure.describe(
        """Three times the plane of values with a disc for each word, as large as its weight: the 1
        at (0, 0), cat 2 at (4, 0), drank 4 at (0, 2), warm 1 at (4, 4), milk 8 at (1, 3). Each
        merge is a circle on the segment between its two children, with the sum of their masses: in
        a chain, 3, 7 and 8; in two parts, 3, 9 and 7; along other pairs, 9, 6 and 7. All
        three end at the same cross, at (1.25, 2.25)."""
    )


# ---------------------------------------------------------------- faults, on a lever


def draw_lever(ax, masses, pivot: float, title: str, note: str, wrong: bool) -> None:
    """Masses {place: mass} under a beam from 0 to 8, a pivot where the output is said to be."""
    right = sum(place * mass for place, mass in masses.items()) / sum(masses.values())
    tilt = 0.06 * (right - pivot) if wrong else 0.0

    def height(place):
        return -tilt * (place - pivot)

    ends = np.array([-0.5, 8.5])
    ax.plot(ends, height(ends), color=INK, lw=2, zorder=2)
    for place, mass in masses.items():
        low = height(place) - 0.75
        ax.plot([place, place], [height(place), low], color=GREY, lw=1, zorder=1)
        ax.scatter(place, low, s=100 * mass, color=ORANGE, lw=0, zorder=2)
        ax.text(place, low, f"{mass:.3g}", ha="center", va="center", fontsize=9, zorder=3)
    color = RED if wrong else BLUE
    ax.plot(pivot, 0.16, "v", color=color, ms=10, zorder=4)
    ax.text(pivot, 0.42, f"{pivot:.3g}", ha="center", fontsize=10, color=color)
    ax.text(4, -1.75, note, ha="center", va="center", fontsize=9, color=NOTE)
    ax.set_title(title, fontsize=10)
    ax.set(xlim=(-1.2, 9.2), ylim=(-2.0, 0.95))
    ax.axis("off")


@styled
def levers() -> Figure:
    """Three keys at 0 and five at 8 as masses on a lever, and what five faults make of them."""
    figure, axes = new_figure(9.6, 5.2, nrows=2, ncols=3)
    base = 1 / np.log(2)
    three, five = 3**base, 5**base
    right, wrong = (False, True)
    drawn = (
        ({0: 3, 8: 5}, 5.0, "right", "8 keys, balanced at 5", right),
        ({0: three, 8: five}, 8 * five / (three + five), "base 2 as base e", "15.1 keys", right),
        ({0: 3, 8: 5}, 8 * 5 / 15, "lse + block_lse", "divided by 15: not balanced", wrong),
        ({0: 4, 5: 8}, 40 / 12, "a sink once a shard", "4 sinks at 0, not 1: 12 keys", right),
        ({0: 3, 8: 4}, 32 / 7, "a key lost by local positions", "7 keys", right),
        ({0: 3, 8: 5}, 5.0, "a shard without keys", "no mass: nowhere to hang it", right),
    )
    for ax, arguments in zip(axes.flat, drawn, strict=True):
        draw_lever(ax, *arguments)
    last = axes.flat[-1]
    last.scatter(6.2, -0.75, s=560, fc="white", ec=GREY, ls=(0, (3, 2)), zorder=2)
    last.text(6.2, -0.75, "NaN?", ha="center", va="center", fontsize=8, color=NOTE, zorder=3)
    return figure.describe(
        """Six levers, each a beam with masses under it and a pivot above. Right: masses 3 at 0 and
        5 at 8 balance at 5. Base 2 as base e: masses 4.88 and 10.2, balanced at 5.41, 15.1 keys.
        lse + block_lse: masses 3 and 5 with the pivot at 2.67; the beam tilts. A sink once a shard:
        4 at 0 and 8 at 5, balanced at 3.33, 12 keys. A key lost by local positions: 3 and 4,
        balanced at 4.57, 7 keys. A shard without keys: a dashed circle with a NaN hangs from
        nothing."""
    )


FIGURES = {"levers": levers, "merge_mass": merge_mass}
