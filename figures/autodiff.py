"""Notebook 03: passes over the keys, and a maximum that is differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.patches import Rectangle

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
        label = f"{word}, the winner" if word == WORDS[np.argmax(WEIGHTS)] else word
        shift = (-24, 6) if word == "the" else (5, 6)  # beside the arrows, which start there
        axes.annotate(label, value, shift, textcoords="offset points", color=INK)
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
    axes.annotate("− milk", middle, (4, -10), textcoords="offset points", color=GREY)
    axes.axhline(0, color=INK, lw=0.4)
    axes.axvline(0, color=INK, lw=0.4)
    axes.set(xlabel="first coordinate of the value", ylabel="second coordinate", aspect="equal")
    axes.set(xlim=(-0.6, 4.8), ylim=(-1.3, 4.6))
    axes.set_title("The maximum's derivative is the winner's value")
    return figure.describe(
        """The plane of the values. The five words' values are dots in a grey hull. An arrow from
        the origin to (1.25, 2.25), inside the hull, is attention. The derivative of Algorithm 1
        as printed is an arrow to (0.25, −0.75), outside the hull: attention less the value of
        milk, which has the largest weight."""
    )


PASSES = {  # program -> (what a pass carries, whether it runs backwards), in turn
    "three: safe softmax": [("m", False), ("d", False), ("out", False)],
    "two: reverse mode": [("m, d", False), ("out", True)],
    "one: forward mode": [("m, d, n", False)],
}


@styled
def passes(keys: int = 8) -> Figure:
    """How often three programs for attention read the keys, and what each pass carries along."""
    figure, axes = new_figure(7.4, 2.7, ncols=len(PASSES), sharey=True)
    rows = max(map(len, PASSES.values()))
    for ax, (title, carried) in zip(axes, PASSES.items(), strict=True):
        ax.set_title(title)
        for key in range(keys):
            ax.add_patch(Rectangle((key + 0.1, -0.35), 0.8, 0.7, fc=PALE, ec=GREY, lw=1))
        for row, (what, backwards) in enumerate(carried, 1):
            start, end = (keys, 0) if backwards else (0, keys)
            color = RED if backwards else BLUE
            arrow = {"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (end, row), (start, row), arrowprops=arrow)
            ax.text(keys / 2, row - 0.12, what, ha="center", va="bottom", color=color)
        ax.set(xlim=(-0.3, keys + 0.3), ylim=(rows + 0.4, -0.6), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    axes[0].text(0, -0.42, "the keys", va="bottom", fontsize=8, color=GREY)
    return figure.describe(
        """Three panels, each with a row of keys and an arrow for each pass over them. Safe softmax
        takes three: one for the maximum m, one for the denominator d, one for the output. Reverse
        mode takes two: m and d on the way forwards, the output on the way back. Forward mode takes
        one, which carries m, d and the numerator n."""
    )


FIGURES = {"passes": passes, "pivot_trap": pivot_trap}
