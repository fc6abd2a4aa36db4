"""The plane of values: the five words as masses, the right cross, and the reader's."""

import textwrap

import numpy as np

from figures.canvas import styled
from figures.sentence import VALUES, WEIGHTS, WORDS, convex_hull
from figures.style import BLUE, GREEN, INK, ORANGE, PALE, RED, Figure, new_figure

SCORES = np.log(np.array(WEIGHTS, "float32"))
PLACES = np.array(VALUES, "float32")
LOW, HIGH = -1.1, 5.1  # of the plane that is shown


def located(mass, n) -> tuple[float, np.ndarray]:
    """(mass, place) of sums that a reader's function gave."""
    with np.errstate(all="ignore"):
        mass, n = np.float64(mass), np.asarray(n, np.float64)
        return float(mass), n / mass


def draw_plane(ax, masses, *, merges=(), right, yours) -> str:
    """Draw on `ax`, and say it in words.

    masses: of the five words; merges: pairs of places that the reader's function joined; right and
    yours: (mass, place), mass None if none was asked for, or None where there is no result to show.
    """
    ax.fill(*convex_hull(PLACES.astype(float)).T, color=PALE, zorder=0)
    ax.scatter(*PLACES.T, s=450 * np.array(masses) / sum(masses), color=ORANGE, lw=0, zorder=2)
    offsets = (-9, -17), (-8, -18), (-38, 11), (-15, 9), (-14, 16)
    for word, place, mass, offset in zip(WORDS, PLACES, masses, offsets, strict=True):
        ax.annotate(f"{word} {mass:g}", place, offset, textcoords="offset points", fontsize=9)
    for ends in merges:
        ax.plot(*np.array(ends).T, color=BLUE, lw=1.3, zorder=3)
    ax.set(xlim=(LOW, HIGH), ylim=(LOW, HIGH), aspect="equal", xticks=range(5), yticks=range(5))
    ax.set(xlabel="value, coordinate 1", ylabel="coordinate 2")
    said = []
    for name, result, marker, color in (("right", right, "X", GREEN), ("yours", yours, "P", RED)):
        if result is not None:
            said.append(mark(ax, name, *result, marker=marker, color=color))
    legend = ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    legend.set_title(None)
    return "; ".join(said)


def mark(ax, name, mass, place, *, marker, color) -> str:
    """One cross, moved to the frame if it lies outside, with its name in the legend."""
    finite = np.isfinite(place).all()
    where = f"at ({place[0]:.4g}, {place[1]:.4g})" if finite else "nowhere: NaN or ∞"
    label = f"{name}: {where}" if mass is None else f"{name}: mass {mass:.4g}, {where}"
    size = 13 if name == "right" else 9
    shown = np.clip(place, LOW, HIGH) if finite else np.full(2, np.nan)
    outside = finite and not np.allclose(shown, place)
    ax.plot(*shown, marker, color=color, ms=size, mec="white", ls="", zorder=6, label=label)
    if outside:
        ax.annotate("outside", shown, (-4, 9), textcoords="offset points", color=INK, fontsize=8)
    return label + (", outside the picture" if outside else "")


@styled
def plane(sentence: str, masses=WEIGHTS, **shown) -> Figure:
    """The picture of a verdict about one attention."""
    figure, ax = new_figure(7.6, 3.9)
    said = draw_plane(ax, masses, **shown)
    title(figure, sentence)
    return figure.describe(f"{sentence}. The plane of values with the five words. {said}")


def title(figure: Figure, sentence: str) -> None:
    """The sentence above a picture, in lines that fit, red unless it is "right"."""
    width = int(12 * figure.get_figwidth())
    lines = [part for line in sentence.splitlines() for part in textwrap.wrap(line, width)]
    color = GREEN if sentence == "right" else RED
    figure.suptitle("\n".join(lines), x=0.01, ha="left", color=color, fontsize=11)
