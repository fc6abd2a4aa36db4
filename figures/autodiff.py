"""Notebook 03: what differentiating the maximum does."""

import jax
import jax.numpy as jnp
import numpy as np

from figures.canvas import styled
from figures.sentence import VALUES, WEIGHTS, WORDS, convex_hull
from figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, Figure, new_figure
from treeattn import energy


@styled
def pivot_trap() -> Figure:
    """What Algorithm 1 differentiates to, as printed and repaired, among the five words' values."""
    q = np.ones(1, "float32")
    k = np.log(np.float32(WEIGHTS))[:, None]
    v = np.array(VALUES, "float32")
    zero = np.zeros(2, "float32")
    figure, axes = new_figure(5.6, 4.4)

    def printed(zeta):
        r = k @ q + v @ zeta
        return jnp.log(jnp.sum(jnp.exp(r - jnp.max(r))))

    wrong = jax.grad(printed)(zero)
    right = jax.grad(energy)(zero, q, k, v, scale=1.0)
    axes.fill(*convex_hull(v).T, color=PALE, zorder=0)
    axes.scatter(*v.T, color=ORANGE, s=30, zorder=3)
    for word, value in zip(WORDS, v, strict=True):
        label = f"{word} = v_argmax" if word == WORDS[np.argmax(WEIGHTS)] else word
        axes.annotate(label, value, (5, 6), textcoords="offset points", color=INK)
    for point, color, line, label, shift in (
        (right, BLUE, "-", f"attention ({right[0]:.2f}, {right[1]:.2f})", (8, -3)),
        (wrong, RED, "-", f"as printed ({wrong[0]:.2f}, −{-wrong[1]:.2f})", (8, -8)),
    ):
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2, "ls": line}
        axes.annotate("", point, (0, 0), arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0})
        axes.annotate(label, point, shift, textcoords="offset points", color=color)
    dashed = {"arrowstyle": "->", "color": GREY, "ls": "--", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", wrong, right, arrowprops=dashed)
    middle = np.add(wrong, right) / 2
    axes.annotate("− v_argmax", middle, (4, -10), textcoords="offset points", color=GREY)
    axes.axhline(0, color=INK, lw=0.4)
    axes.axvline(0, color=INK, lw=0.4)
    axes.set(xlabel="first coordinate of the value", ylabel="second coordinate", aspect="equal")
    axes.set(xlim=(-0.6, 4.8), ylim=(-1.3, 4.6))
    axes.set_title("A differentiated maximum takes v_argmax away")
    return figure.describe(
        """The plane of the values. The five words' values are dots in a grey hull. An arrow from
        the origin to (1.25, 2.25), inside the hull, is attention. The derivative of Algorithm 1
        as printed is an arrow to (0.25, −0.75), outside the hull: attention less the value of
        milk, which has the largest weight."""
    )


FIGURES = {"pivot_trap": pivot_trap}
