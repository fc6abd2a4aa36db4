"""Notebook 02: Γ is a mountain pass, and F* is the height of its ridge."""

import jax
import numpy as np
from matplotlib.tri import TriAnalyzer, Triangulation

from figures.canvas import styled
from figures.sentence import VALUES, WEIGHTS, WORDS, convex_hull, running_example
from figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, Figure, new_figure
from treeattn import energy

# Of the values the second coordinate alone, so that Γ(ζ, z) is a surface over a sheet of paper.
X = np.array(VALUES, float)[:, 1]
ATTENTION, LOWEST = 2.25, -np.log(16)


def ridge(zeta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """F(ζ), and its slope: the z for which this ζ is best."""
    terms = np.array(WEIGHTS) * np.exp(np.multiply.outer(zeta, X))
    return np.log(terms.sum(-1)), (terms * X).sum(-1) / terms.sum(-1)


def _pass(axes) -> None:
    """Γ from above: level lines, its ridge, and the ways from attention."""
    zeta, z = np.linspace(-2.2, 2.2, 201), np.linspace(-0.4, 4.6, 201)
    f, best = ridge(zeta)
    height = z[:, None] * zeta - f
    levels = [-8, -7, -6, -5, -4, -3.3, LOWEST, -2.3, -1.6, -1, 0, 1]
    shades = {"cmap": "Greys_r", "vmin": -18, "vmax": 2}
    axes.contourf(zeta, z, height.clip(-12, 8), [-12, *levels, 8], **shades)
    axes.contour(zeta, z, height, levels, colors=GREY, linewidths=0.7, linestyles="solid")
    axes.plot(zeta, best, color=BLUE, lw=2.4)
    for ends in ((0.42, 0.5), (-0.62, -0.7)):
        arrow(axes, BLUE, *zip(ends, ridge(np.array(ends))[1], strict=True))
    for side in (-1, 1):
        arrow(axes, RED, (0.1 * side, ATTENTION), (side, ATTENTION))
    notes = [(-1.06, ATTENTION, "down", RED), (1.36, ATTENTION, "down", RED)]
    notes += [(0.56, 3.42, "up", BLUE), (-0.78, 0.56, "up", BLUE), (2.1, 4.3, "the ridge", BLUE)]
    notes += [(-1.4, 4.3, "Γ → −∞", INK), (2.1, -0.15, "Γ → −∞", INK)]
    notes += [(-0.5, 3.15, "attention", INK)]
    for x, y, words, color in notes:
        axes.text(x, y, words, color=color, ha="right", va="center")
    axes.plot([-0.5, -0.05], [3.05, 2.3], color=INK, lw=0.8)
    axes.plot([1.75, 1.9], [4.15, ridge(1.9)[1]], color=BLUE, lw=0.8)
    axes.plot(0, ATTENTION, "X", color=INK, ms=10, zorder=6)
    axes.set(xlabel="ζ, the source", ylabel="z, a candidate for the output")
    axes.set_title("Γ is a mountain pass …")


def arrow(axes, color, start, end) -> None:
    look = {"arrowstyle": "-|>", "color": color, "lw": 2, "mutation_scale": 16}
    axes.annotate("", end, start, arrowprops=look)


@styled
def saddle_map() -> Figure:
    """Γ as a mountain pass, and beside it the profile of its ridge, which is F*."""
    shape = {"ncols": 2, "sharey": True, "gridspec_kw": {"width_ratios": [1.7, 1]}}
    figure, (left, right) = new_figure(8.4, 4.2, **shape)
    _pass(left)
    zeta = np.linspace(-16, 16, 3001)
    f, z = ridge(zeta)
    right.plot(z * zeta - f, z, color=BLUE, lw=2.4)
    right.plot(LOWEST, ATTENTION, "X", color=INK, ms=10)
    right.text(LOWEST + 0.2, ATTENTION, "−log 16", va="center")
    right.axhspan(0, 4, color=PALE, alpha=0.3, lw=0)
    for edge in ((-0.4, 0), (4, 4.6)):
        right.axhspan(*edge, color=PALE, lw=0)
        right.text(-1.3, sum(edge) / 2, "outside: F* = ∞", ha="center", va="center", fontsize=9)
    for value, words in ((0, "the, cat"), (2, "drank"), (3, "milk"), (4, "warm")):
        right.axhline(value, color=GREY, lw=0.7, ls=":", zorder=0)
        right.text(0.45, value, words, fontsize=9, ha="right", va="top" if value == 4 else "bottom")
    right.set(xlabel="F*(z), the height of the ridge", xlim=(-3.1, 0.5), ylim=(-0.4, 4.6))
    right.set_title("… its ridge lowest at attention")
    return figure.describe(
        """Left, a map of Γ over the source ζ and the candidate z, for one coordinate of five words.
        From attention, at ζ = 0 and z = 2.25, the way to the left and to the right leads down; the
        way along the ridge, a rising curve, leads up on both sides. Right, the height of the ridge
        for every z from 0 to 4: lowest at attention, −log 16, and infinite outside."""
    )


@styled
def dual_over_the_hull() -> Figure:
    """F*(z) for z in the plane: level lines in the hull, heights at the words, its minimum."""
    q, k, v = running_example()
    angles = np.linspace(0, 2 * np.pi, 480, endpoint=False)
    rays = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    zeta = (np.geomspace(0.02, 30, 90)[:, None, None] * rays).reshape(-1, 2).astype("float32")
    f, z = jax.vmap(lambda a: jax.value_and_grad(energy)(a, q, k, v, scale=1.0))(zeta)
    dual = np.sum(z * zeta, axis=1) - f
    _, first = np.unique(np.round(z, 3), axis=0, return_index=True)  # many end in the corners

    figure, axes = new_figure(5.6, 4.6)
    axes.fill(*convex_hull(v).T, color=PALE, zorder=0)
    triangles = Triangulation(*np.asarray(z)[first].T)
    # Along the hull's edge triangles are slivers, and a line drawn across them runs where F* has
    # no such level.
    triangles.set_mask(TriAnalyzer(triangles).get_flat_tri_mask(0.01))
    lines = axes.tricontour(
        triangles,
        np.asarray(dual)[first],
        colors=BLUE,
        levels=[-2.7, -2.5, -2, -1.5, -1, -0.5],
        linewidths=1.2,
        linestyles="solid",
    )
    places = [(1.6, 1.9), (2, 1.5), (2.5, 0.75), (3.7, 1.6), (3.8, 0.2), (3.9, 3.7)]
    places += [(0.35, 0.75), (0.4, 0.3), (0.2, 0.1)]  # the same levels, at the lower left
    axes.clabel(lines, fmt=lambda x: f"{x:.1f}".replace("-", "−"), fontsize=8, manual=places)
    shifts = ((10, -13), (-6, -14), (-56, 7), (-16, 8), (-40, 9))
    heights = ("0", "−log 2", "−log 4", "0", "−log 8")
    for word, value, height, shift in zip(WORDS, v, heights, shifts, strict=True):
        axes.plot(*value, "o", color=ORANGE, ms=6)
        axes.annotate(f"{word}: {height}", value, shift, textcoords="offset points", fontsize=9)
    axes.plot(1.25, 2.25, "X", color=RED, ms=9, zorder=5)
    axes.annotate(
        "attention: −log 16",
        (1.25, 2.25),
        (1.6, 4.2),
        color=RED,
        zorder=5,
        arrowprops={"arrowstyle": "-", "color": RED, "lw": 0.8},
    )
    axes.set(xlim=(-0.9, 4.8), ylim=(-0.6, 4.6), aspect="equal", xticks=range(5), yticks=range(5))
    axes.set(xlabel="z, coordinate 1", ylabel="z, coordinate 2")
    axes.set_title("F* over the hull of the five values")
    return figure.describe(
        """Level lines of F* over the hull of the five words' values: a bowl whose lowest point,
        −log 16, is attention at (1.25, 2.25). At the corners it is minus the logarithm of the
        word's own term: 0 at "the" and "warm", −log 2 at "cat", −log 4 at "drank" and −log 8
        at "milk"."""
    )


FIGURES = {"saddle_map": saddle_map, "dual_over_the_hull": dual_over_the_hull}
