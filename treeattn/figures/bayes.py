"""Notebook 02: Γ is a saddle, and what is minimized and maximized instead."""

import jax
import jax.numpy as jnp
import numpy as np

from treeattn.figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, new_figure
from treeattn.idea.energy import attention_from_energy, energy, log_likelihood


def example_line():
    """(q, k, v) of four keys whose values are numbers, so that Γ(ζ, z) is a surface."""
    q = np.array([1.0, -0.5], "float32")
    k = np.array([[1.2, 0.4], [-0.6, 0.3], [0.2, -1.0], [-0.5, -0.8]], "float32")
    return q, k, np.array([[1.6], [-1.2], [0.4], [-2.0]], "float32")


@jax.jit
def follow(start, signs, dt=0.01):
    """The flow (ζ, z)' = (sign_ζ ∂Γ/∂ζ, sign_z ∂Γ/∂z) from `start` (2,), by midpoint steps: (t, 2).

    A sign of 1 climbs, −1 descends. A path that has left the picture stays where it left.
    """
    q, k, v = example_line()

    def velocity(x):
        return signs * jax.grad(lambda x: log_likelihood(x[:1], x[1:], q, k, v))(x)

    def step(x, _):
        ahead = x + dt * velocity(x + dt / 2 * velocity(x))
        x = jnp.where(jnp.all(jnp.abs(x) < 4), ahead, x)
        return x, x

    path = jax.lax.scan(step, start, length=3000)[1]
    return jnp.concatenate([start[None], path])


def gamma_saddle():
    """Γ(ζ, z) as a surface, and the three gradient flows on its level lines."""
    q, k, v = example_line()
    figure, axes = new_figure(8.4, 3.8, ncols=2)
    axes[0].remove()
    surface, flat = figure.add_subplot(1, 2, 1, projection="3d"), axes[1]
    side = np.linspace(-3, 3, 61, dtype="float32")
    zeta, z = np.meshgrid(side, side)
    gamma = jax.vmap(
        jax.vmap(lambda a, b: log_likelihood(a[None], b[None], q, k, v))
    )(zeta, z)  # fmt: skip
    attention = attention_from_energy(q, k, v).item()
    value = log_likelihood(jnp.zeros(1), jnp.full(1, attention), q, k, v).item()

    surface.plot_surface(zeta, z, gamma, cmap="Blues", alpha=0.8, lw=0, rstride=4, cstride=4)
    # Through the stationary point: Γ bends down one way, and up another.
    t = np.linspace(-1, 1, 41, dtype="float32")
    for direction, color in (((1.0, -1.6), RED), ((1.9, 2.7), ORANGE)):
        x, y = direction[0] * t, attention + direction[1] * t
        keep = abs(y) < 3
        x, y = x[keep], y[keep]
        heights = [log_likelihood(a[None], b[None], q, k, v) for a, b in zip(x, y, strict=True)]
        surface.plot(x, y, np.array(heights) + 0.2, color=color, lw=2.5, zorder=5)
    surface.scatter(0, attention, value + 0.1, color=INK, s=30, zorder=6)
    surface.set(xlabel="ζ", ylabel="z", title="Γ = zζ − F(ζ): up one way, down the other")
    surface.set_zlabel("Γ")
    surface.view_init(elev=28, azim=12)

    flat.contour(
        side, side, gamma, levels=np.arange(-10, 8), colors=GREY, linewidths=0.5, linestyles="solid"
    )
    flows = [
        ("min over both", (-1, -1), RED, [(0.05, -0.4), (-0.05, 0.9), (-2, -2), (2, 2.4)]),
        ("max over both", (1, 1), ORANGE, [(0.3, 0.0), (-0.3, 0.4), (2.2, -2.4), (-2, 2)]),
        ("min over z, max over ζ", (-1, 1), BLUE, [(2.5, 2.5), (-2.5, -2)]),
    ]
    for label, (sign_z, sign_zeta), color, starts in flows:
        signs = jnp.array([sign_zeta, sign_z], jnp.float32)
        for start in starts:
            path = np.asarray(follow(jnp.array(start, jnp.float32), signs))
            flat.plot(*path.T, color=color, lw=1.5, label=label if start == starts[0] else None)
            where = np.argmax(np.cumsum(np.hypot(*np.diff(path, axis=0).T)) > 0.7)
            arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.5}
            flat.annotate("", path[where + 8], path[where], arrowprops=arrow)
    flat.plot(0, attention, "o", color=INK, ms=6, zorder=5)
    flat.annotate("(0, attention)", (0, attention), (8, -14), textcoords="offset points")
    flat.set(xlim=(-3, 3), ylim=(-3, 3), xlabel="ζ", ylabel="z", aspect="equal")
    flat.set_title("Only min over z, max over ζ arrives")
    flat.legend(loc="upper left", fontsize=8, frameon=True, framealpha=0.9, edgecolor="white")
    return figure


def legendre_dual():
    """F and its dual F*: attention is the slope of one at 0, and the lowest point of the other."""
    q, k, v = example_line()
    figure, (left, right) = new_figure(8.6, 3.6, ncols=2)
    zeta = np.linspace(-14, 14, 1401, dtype="float32")
    f, z = jax.vmap(lambda a: jax.value_and_grad(energy)(a[None], q, k, v))(zeta)
    f, z = np.asarray(f), np.asarray(z)[:, 0]
    attention, lowest = z[700], -f[700]

    shown = abs(zeta) <= 3
    left.plot(zeta[shown], f[shown], color=BLUE)
    left.plot(zeta[shown], f[700] + attention * zeta[shown], color=RED, lw=1)
    left.plot(0, f[700], "o", color=RED)
    left.annotate(
        f"slope {attention:.2f} = attention", (0, f[700]), (14, -14), textcoords="offset points",
        color=RED,
    )  # fmt: skip
    left.set(xlabel="ζ", ylabel="F(ζ)", title="Attention is the slope of F at 0 …")

    right.plot(z, z * zeta - f, color=BLUE)
    right.plot(attention, lowest, "o", color=RED)
    right.annotate(
        f"{attention:.2f}, where F* = −F(0)", (attention, lowest), (-40, -18),
        textcoords="offset points", color=RED,
    )  # fmt: skip
    scores = k @ q / np.sqrt(len(q))
    for value in v[:, 0]:
        right.axvline(value, color=GREY, lw=0.7, ls=":")
    ends = [int(np.argmin(v)), int(np.argmax(v))]
    right.plot(v[ends, 0], -scores[ends], "o", color=BLUE, ms=5)
    for a, shift in zip(ends, ((8, 2), (-42, 4)), strict=True):
        right.annotate(f"−s{'₁₂₃₄'[a]}", (v[a, 0], -scores[a]), shift, textcoords="offset points")
    for edge in ((-2.6, -2.0), (1.6, 2.2)):
        right.axvspan(*edge, color=PALE, lw=0)
        right.text(sum(edge) / 2, -0.6, "∞", ha="center", color=GREY)
    right.set(xlim=(-2.6, 2.2), xlabel="z  (dotted: the values)", ylabel="F*(z)")
    right.set(ylim=(lowest - 0.3, max(-scores) + 0.3), title="… and the minimum of its dual F*")
    return figure


FIGURES = {"gamma_saddle": gamma_saddle, "legendre_dual": legendre_dual}
