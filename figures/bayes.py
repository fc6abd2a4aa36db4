"""Notebook 02: Γ is a saddle, and what is minimized and maximized instead."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.tri import TriAnalyzer, Triangulation

from figures.canvas import styled
from figures.sentence import WORDS, convex_hull, running_example
from figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, Figure, new_figure
from treeattn import attention_from_energy, energy, log_likelihood


def example_line():
    """The five words with their values' second coordinate alone, so that Γ(ζ, z) is a surface."""
    q, k, v = running_example()
    return q, k, v[:, 1:]


def gamma(zeta, z):
    """Γ at numbers ζ and z."""
    return log_likelihood(zeta[None], z[None], *example_line(), scale=1.0)


def _variance() -> float:
    """Of the values under the attention weights, the Hessian of F at 0."""
    q, k, v = example_line()
    return float(jax.hessian(energy)(jnp.zeros(1), q, k, v, scale=1.0)[0, 0])


@styled
def gamma_saddle() -> Figure:
    """Γ along the two lines through its stationary point on which it curves up and down by 2."""
    attention = attention_from_energy(*example_line(), scale=1.0).item()
    figure, axes = new_figure(5.6, 3.6)
    c = _variance()
    t = np.linspace(-1.8, 1.8, 73, dtype="float32")
    for slope, sign, color, dashes in ((c / 2 + 1, "+", BLUE, "-"), (c / 2 - 1, "−", RED, "--")):
        heights = jax.vmap(gamma)(t, attention + slope * t)
        axes.plot(t, heights, dashes, color=color, label=f"z = z* + (c/2 {sign} 1) ζ")
    axes.plot(0, gamma(jnp.zeros(()), jnp.asarray(attention)), "X", color=INK, ms=8, zorder=5)
    axes.set(xlabel="ζ", ylabel="Γ", title="Γ along two lines through (0, attention)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure.describe(
        """Γ along two lines through its stationary point, where it is −log 16. On one line it is
        lowest there, on the other highest: a saddle."""
    )


@styled
def legendre_dual() -> Figure:
    """F and its dual F*: attention is the slope of one at 0, and the lowest point of the other."""
    q, k, v = example_line()
    figure, (left, right) = new_figure(7.6, 3.7, ncols=2)
    zeta = np.linspace(-14, 14, 1401, dtype="float32")
    f, z = jax.vmap(lambda a: jax.value_and_grad(energy)(a[None], q, k, v, scale=1.0))(zeta)
    f = np.asarray(f)
    z = np.asarray(z)[:, 0]
    attention = z[700]
    lowest = -f[700]

    shown = abs(zeta) <= 2
    left.plot(zeta[shown], f[shown], color=BLUE)
    left.plot(zeta[shown], f[700] + attention * zeta[shown], "--", color=RED, lw=1)
    left.plot(0, f[700], "X", color=RED, ms=8)
    left.annotate(
        "F(0) = log 16,\nslope 2.25 = attention",
        (0, f[700]),
        (14, -26),
        textcoords="offset points",
        color=RED,
    )
    left.set(xlabel="ζ", ylabel="F(ζ)", title="Attention: the slope of F at 0 …")

    right.plot(z, z * zeta - f, color=BLUE)
    right.plot(attention, lowest, "X", color=RED, ms=8)
    right.annotate(
        "F*(2.25) = −log 16", (attention, lowest), (-50, -18), textcoords="offset points", color=RED
    )
    for value, words in ((0, "the, cat"), (2, "drank"), (3, "milk"), (4, "warm")):
        right.axvline(value, color=GREY, lw=0.7, ls=":")
        right.text(value, 0.35, words, ha="center", fontsize=8)
    for value, height, label, shift in ((0, -np.log(3), "−log 3", (7, -2)), (4, 0, "0", (-12, -3))):
        right.plot(value, height, "o", color=BLUE, ms=5)
        right.annotate(label, (value, height), shift, textcoords="offset points")
    for edge in ((-0.8, 0), (4, 4.8)):
        right.axvspan(*edge, color=PALE, lw=0)
        right.text(sum(edge) / 2, -1.5, "∞", ha="center", color=INK)
    right.set(xlim=(-0.8, 4.8), ylim=(-3.3, 0.6), xlabel="z", ylabel="F*(z)")
    right.set_title("… and the minimum of its dual F*")
    return figure.describe(
        """Left: F over one coordinate of ζ, convex, with its tangent at 0, where F is log 16 and
        the slope is attention, 2.25. Right: the dual F* over z from 0 to 4, the range of the five
        words' values; it is infinite outside, −log 3 and 0 at the ends, and lowest at 2.25, where
        it is −log 16."""
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


FIGURES = {
    "gamma_saddle": gamma_saddle,
    "legendre_dual": legendre_dual,
    "dual_over_the_hull": dual_over_the_hull,
}
