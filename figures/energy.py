"""Notebook 01: the energy of attention, seen."""

from pathlib import Path

import jax
import numpy as np
from matplotlib.patches import Circle

from figures.canvas import styled, write_gif
from figures.sentence import WORDS, convex_hull, running_example
from figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, Figure, new_figure
from treeattn import energy

STEP = np.log(2) / 2 * np.array([1.0, -1.0], "float32")  # this nudge multiplies by powers of two


# ---------------------------------------------------------------- the nudge


def _draw_weights(axes, weights, over=None):
    """A bar and a number for each word's weight; as a fraction, when it is one `over` something."""
    axes.barh(WORDS, weights, color=ORANGE, height=0.7)
    for a, w in enumerate(weights):
        number = f"{w:.2f}" if over is None else f"{w * over:.0f}/{over}"
        axes.text(w + 0.02, a, number, va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.15), xlabel="attention weight", xticks=[0, 0.5, 1])
    axes.tick_params(axis="y", length=0)


def _draw_words(axes, v, weights, offsets=((9, -11), (-24, -13), (8, -13), (-32, -3), (-34, 4))):
    """The values in the plane, their hull, and a disc for each word as large as its weight."""
    axes.fill(*convex_hull(v).T, color=PALE, zorder=0)
    axes.scatter(*v.T, s=12 + 500 * np.asarray(weights), color=ORANGE, alpha=0.8, lw=0, zorder=3)
    for word, value, offset in zip(WORDS, v, offsets, strict=True):
        axes.annotate(word, value, offset, textcoords="offset points", fontsize=9, zorder=5)
    axes.set(xlim=(-0.6, 4.7), ylim=(-0.7, 4.7), aspect="equal", xticks=range(5), yticks=range(5))
    axes.set(xlabel="value, coordinate 1", ylabel="coordinate 2")


def tilted(zeta):
    """(weights (5,), mean (2,)) of the five words under the source zeta (2,)."""
    q, k, v = running_example()
    weights = np.asarray(jax.nn.softmax(k @ q + v @ zeta))
    return weights, weights @ v


@styled
def nudge() -> Figure:
    """The weights of the five words and their mean, for no nudge, a step and two steps."""
    v = running_example()[2]
    figure, axes = new_figure(7.6, 5.0, nrows=2, ncols=3)
    titles = ("no nudge, ζ = 0", "ζ = ½ log 2 · (1, −1)", "ζ = log 2 · (1, −1)")
    means = [tilted(steps * STEP)[1] for steps in range(3)]
    for steps, (title, (above, below)) in enumerate(zip(titles, axes.T, strict=True)):
        weights, mean = tilted(steps * STEP)
        _draw_weights(above, weights, over=(16, 16, 37)[steps])
        above.set_title(title, fontsize=10)
        _draw_words(below, v, weights)
        below.plot(*np.array(means[: steps + 1]).T, ":", color=INK, lw=1.2, zorder=4)
        below.plot(*mean, "X", color=INK, ms=8, zorder=5)
        numbers = ", ".join(f"{x:.2f}" for x in mean)
        below.set_title(f"mean ({numbers})", fontsize=10)
        if steps:
            below.set_ylabel("")
            above.set_yticklabels([])
    return figure.describe(
        """Three columns: no nudge, a nudge towards the value of "cat", twice that nudge. Above,
        the five words' weights: milk leads with 8/16, then cat with 8/16, then cat with 32/37.
        Below, the words' values span a hull; a cross, their weighted mean, slides inside it from
        (1.25, 2.25) to (2.50, 1.25) to (3.62, 0.32), towards cat at (4, 0)."""
    )


def nudge_path() -> np.ndarray:
    """The sources of the animation (frames, 2): out to two steps, once around, and back."""
    out = np.linspace(0, 1, 7)[:, None] * 2 * STEP
    angles = np.linspace(0, 2 * np.pi, 25)[1:]
    turn = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], axis=-1)
    around = turn.reshape(-1, 2, 2) @ (2 * STEP)
    return np.concatenate([out, around, out[-2::-1]]).astype("float32")


@styled
def nudge_frame(frame: int = 6) -> Figure:
    """One frame of the animation: the source, the weights, and the way of their mean."""
    path = nudge_path()
    figure, (source, bars, plane) = new_figure(7.6, 2.9, ncols=3, width_ratios=[1, 1, 1.25])
    zeta = path[frame]
    source.add_patch(Circle((0, 0), 2 * np.linalg.norm(STEP), fill=False, color=GREY, ls=":"))
    arrow = {"arrowstyle": "-|>", "color": BLUE, "lw": 2, "shrinkA": 0, "shrinkB": 0}
    if np.any(zeta):
        source.annotate("", zeta, (0, 0), arrowprops=arrow)
    source.plot(0, 0, "o", color=BLUE, ms=4)
    source.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal", xticks=[-1, 0, 1])
    source.set(xlabel="ζ₁", ylabel="ζ₂", yticks=[-1, 0, 1], title="the nudge ζ")
    weights, mean = tilted(zeta)
    _draw_weights(bars, weights)
    bars.set_title("the weights tilt")
    _draw_words(plane, running_example()[2], weights)
    way = np.array([tilted(z)[1] for z in path[: frame + 1]])
    plane.plot(*way.T, ":", color=INK, lw=1.2, zorder=4)
    plane.plot(*mean, "X", color=INK, ms=8, zorder=5)
    plane.set_title("their mean slides in the hull")
    return figure


def write_nudge_gif(path: str | Path) -> None:
    """The frames of `nudge_frame` as an animation that repeats."""
    last = len(nudge_path()) - 1
    milliseconds = [1500 if i in (0, 6, last) else 200 for i in range(last + 1)]
    write_gif(path, map(nudge_frame, range(last + 1)), milliseconds, colours=64, dpi=80)


# ---------------------------------------------------------------- the landscape


@styled
def energy_landscape() -> Figure:
    """F(ζ), a ring of sources on it, and where its gradient sends the ring among the values."""
    q, k, v = running_example()
    figure, (left, right) = new_figure(7.6, 4.0, ncols=2)
    side = np.linspace(-1.3, 1.3, 105, dtype="float32")
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    gradient = jax.vmap(jax.grad(lambda zeta: energy(zeta, q, k, v, scale=1.0)))
    f = jax.vmap(jax.vmap(lambda zeta: energy(zeta, q, k, v, scale=1.0)))(grid)
    lines = left.contour(side, side, f, levels=np.arange(1, 11), colors=GREY, linewidths=0.8)
    left.clabel(lines, fmt="%d", fontsize=8)
    weights, attention = tilted(np.zeros(2, "float32"))
    beside_the_ring = ((9, -11), (-24, -13), (-22, -17), (-32, -3), (-34, 4))
    _draw_words(right, v, weights, offsets=beside_the_ring)

    angles = np.linspace(0, 2 * np.pi, 181)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype("float32")
    for axes, ring, at in ((left, circle, 135), (right, gradient(circle), 8)):
        axes.plot(*np.asarray(ring).T, color=BLUE, lw=1.4, zorder=2)
        box = {"fc": "white", "lw": 0, "pad": 1, "alpha": 0.85}
        font = {"color": BLUE, "fontsize": 8, "ha": "center", "va": "center"}
        axes.text(*ring[at], "|ζ| = 1", bbox=box, zorder=4, **font)
    arrow = {"arrowstyle": "-|>", "color": RED, "lw": 2, "shrinkA": 0, "shrinkB": 0}
    left.annotate("", attention / 3, (0, 0), arrowprops=arrow)
    left.set(
        xlabel="ζ₁",
        ylabel="ζ₂",
        aspect="equal",
        title="Level lines of F; the arrow is ∇F(0)/3",
    )
    right.plot(*attention, "X", color=RED, ms=8, zorder=5)
    right.annotate(
        "∇F(0) = attention",
        attention,
        (2.0, 4.25),
        color=RED,
        fontsize=9,
        ha="center",
        arrowprops={"arrowstyle": "-", "color": RED, "lw": 0.8},
        zorder=5,
    )
    right.set_title("∇F sends the ring into the hull")
    return figure.describe(
        """Left: level lines of F over the plane of sources, a convex slope that rises fastest to
        the upper right, with a ring of sources of length 1 around the origin and an arrow, a
        third of the gradient there. Right: the five words' values and their hull; the gradient
        sends the ring to a closed curve inside the hull, and the origin to attention at (1.25,
        2.25)."""
    )


FIGURES = {
    "nudge": nudge,
    "energy_landscape": energy_landscape,
}
ANIMATIONS = {"nudge": write_nudge_gif}
