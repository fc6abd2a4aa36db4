"""Notebook 03: what the gradient costs, and what differentiating the maximum does."""

import jax
import jax.numpy as jnp
import numpy as np

from treeattn.cost.work import flops
from treeattn.figures.energy import convex_hull, example_head
from treeattn.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, new_figure
from treeattn.idea.energy import energy


def gradient_cost():
    """Flops of value and gradient over the value's alone, as the number of keys grows."""
    figure, axes = new_figure(6.6, 3.3)
    lengths = [64, 1024, 16384]
    for (d, dv), color in zip(((128, 32), (64, 64), (32, 128)), (GREEN, BLUE, ORANGE), strict=True):
        ratios = []
        for n in lengths:
            shapes = (dv,), (d,), (n, d), (n, dv)
            both = flops(jax.value_and_grad(energy), *shapes)
            ratios.append(both / flops(energy, *shapes))
        predicted = (d + 2 * dv) / (d + dv)
        axes.axhline(predicted, color=color, lw=0.8, ls=":")
        axes.semilogx(lengths, ratios, "o-", color=color, base=2, ms=4)
        axes.annotate(
            f"d = {d}, dv = {dv}: (d + 2dv) / (d + dv) = {predicted:.2f}", (lengths[0], predicted),
            (0, 8), textcoords="offset points", color=color, fontsize=9,
        )  # fmt: skip
    axes.axhline(1, color=GREY, lw=0.8)
    axes.set(ylim=(0.9, 2.1), xlabel="keys n", ylabel="flops(F and ∇F) / flops(F)")
    axes.set_title("The gradient costs the same small factor at every length")
    return figure


def pivot_trap():
    """What Algorithm 1 differentiates to, as printed and repaired, among the values."""
    q, k, v = example_head()
    figure, axes = new_figure(5.2, 4.0)

    def printed(zeta):
        r = k @ q / np.sqrt(2) + v @ zeta
        return jnp.log(jnp.sum(jnp.exp(r - jnp.max(r))))

    zero = np.zeros(2, "float32")
    wrong, right = jax.grad(printed)(zero), jax.grad(energy)(zero, q, k, v)
    axes.fill(*convex_hull(v).T, color=PALE, zorder=0)
    axes.scatter(*v.T, color=ORANGE, s=30, zorder=3)
    top = v[np.argmax(k @ q)]
    axes.annotate("v_argmax", top, (6, 4), textcoords="offset points", color=ORANGE)
    for point, color, label, shift in (
        (right, BLUE, "attention", (-62, 2)),
        (wrong, RED, "attention − v_argmax", (-60, -16)),
    ):
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", point, (0, 0), arrowprops=arrow)
        axes.annotate(label, point, shift, textcoords="offset points", color=color)
    axes.annotate("", wrong, right, arrowprops={"arrowstyle": "->", "color": GREY, "ls": "--"})
    axes.axhline(0, color=INK, lw=0.4)
    axes.axvline(0, color=INK, lw=0.4)
    axes.set(xlabel="first value coordinate", ylabel="second", aspect="equal")
    axes.set(xlim=(-2.6, 2.9), ylim=(-2, 2.4))
    axes.set_title("A differentiated maximum takes v_argmax away")
    return figure


FIGURES = {"gradient_cost": gradient_cost, "pivot_trap": pivot_trap}
