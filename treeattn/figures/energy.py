"""Notebook 01: the energy of attention, seen."""

import jax
import jax.numpy as jnp
import numpy as np

from treeattn.energy import energy
from treeattn.figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, new_figure


def example_head():
    """(q, k, v) of six keys and values in the plane: small enough to draw."""
    q = np.array([1.0, 0.5], "float32")
    k = np.array([[2.2, 0], [0.4, 2], [-1, 1], [-1, -1.4], [0.5, -1], [0.3, 0.4]], "float32")
    v = np.array([[2, 0.6], [0.8, 2], [-1.4, 1.5], [-1.8, -0.7], [0.3, -1.6], [0.2, 0.5]])
    return q, k, v.astype("float32")


def energy_landscape():
    """F(ζ) with its gradient field's source, and where the gradient lands among the values."""
    q, k, v = example_head()
    figure, (left, right) = new_figure(8.6, 4.1, ncols=2)
    side = np.linspace(-3, 3, 121, dtype="float32")
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    f, gradients = jax.vmap(jax.vmap(lambda z: jax.value_and_grad(energy)(z, q, k, v)))(grid)

    lines = left.contour(side, side, f, levels=np.arange(1, 9), colors=GREY, linewidths=0.8)
    left.clabel(lines, fmt="%d", fontsize=8)
    left.set(xlabel="ζ₁", ylabel="ζ₂", aspect="equal", title="F(ζ) is a convex bowl")
    z = np.asarray(gradients[60, 60])  # ζ = 0
    right.fill(*convex_hull(v).T, color=PALE, zorder=0)

    # Rings of sources, and where the gradient sends each.
    angles = jnp.linspace(0, 2 * jnp.pi, 181)
    circle = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    for radius, alpha in ((0.5, 1.0), (1, 0.75), (2, 0.5), (3, 0.3)):
        ring = radius * circle
        image = jax.vmap(lambda zeta: jax.grad(energy)(zeta, q, k, v))(ring)
        left.plot(*ring.T, color=BLUE, alpha=alpha, lw=1.4)
        right.plot(*image.T, color=BLUE, alpha=alpha, lw=1.4)
        label = {"fontsize": 8, "color": BLUE, "ha": "center", "va": "center"}
        left.text(*ring[145], f"|ζ| = {radius}", bbox={"fc": "white", "lw": 0, "pad": 1}, **label)
    arrow = {"arrowstyle": "-|>", "color": RED, "lw": 2, "shrinkA": 0, "shrinkB": 0}
    left.annotate("", z, (0, 0), arrowprops=arrow)
    left.annotate("∇F(0)", z, (5, 1), textcoords="offset points", color=RED)

    weights = np.asarray(jax.nn.softmax(k @ q / np.sqrt(2)))
    right.scatter(*v.T, s=20 + 900 * weights, color=ORANGE, alpha=0.8, lw=0, zorder=3)
    offsets = [(-6, 16), (13, 2), (-12, 10), (-8, -16), (8, -12), (-46, -3)]
    for a, (value, w) in enumerate(zip(v, weights, strict=True)):
        right.annotate(
            f"v{'₁₂₃₄₅₆'[a]}, {w:.2f}", value, offsets[a], textcoords="offset points", fontsize=8
        )
    right.plot(*z, "o", color=RED, ms=6, zorder=4)
    right.annotate("attention", z, (6, -12), textcoords="offset points", color=RED)
    right.set(xlabel="first value coordinate", ylabel="second", aspect="equal")
    right.set(
        xlim=(-2.4, 2.6), ylim=(-2.3, 2.7), title="∇F sends every source inside the values' hull"
    )
    for axes in (left, right):
        axes.axhline(0, color=INK, lw=0.4, zorder=1)
        axes.axvline(0, color=INK, lw=0.4, zorder=1)
    return figure


def convex_hull(points: np.ndarray) -> np.ndarray:
    """The corners of the points' convex hull, in turn: gift wrapping."""
    hull, here = [], min(range(len(points)), key=lambda a: tuple(points[a]))
    while here not in hull:
        hull.append(here)
        ahead = (here + 1) % len(points)
        for other in range(len(points)):
            x, y = points[ahead] - points[here], points[other] - points[here]
            if x[0] * y[1] - x[1] * y[0] < 0:
                ahead = other
        here = ahead
    return points[hull]


FIGURES = {"energy_landscape": energy_landscape}
