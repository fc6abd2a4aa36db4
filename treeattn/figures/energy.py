"""Notebook 01: the energy of attention, seen."""

import jax
import jax.numpy as jnp
import numpy as np

from treeattn.figures.style import BLUE, GREY, INK, ORANGE, PALE, RED, new_figure
from treeattn.idea.energy import cumulant, energy
from treeattn.llama.model import Llama


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


TEXT = "The capital of France is Paris, and the capital of Italy is Rome. The capital of Germany is"


def real_heads(text: str = TEXT):
    """What the packaged model's query heads see at the text's last token.

    (q (layers, heads, d), k (layers, heads, n, d), v the same, tokens: n strings)
    """
    model = Llama.load(None)
    ids = model.tokenizer.encode(text)
    layers = model.layers_qkv(np.array([ids]))
    q, k, v = (np.stack(x) for x in zip(*([x[0] for x in layer] for layer in layers), strict=True))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2).swapaxes(1, 2) for x in (k, v))
    return q[:, -1], k, v, [model.tokenizer.decode([i]) for i in ids]


@jax.jit
@jax.vmap
@jax.vmap
def effective_keys_and_spread(q, k, v):
    """Of one head: exp(entropy) of its weights, and tr κ₂ / ⟨|v|²⟩, from 0 to 1.

    ⟨|v|²⟩ = |attention|² + tr κ₂: the spread is the share of the attended values that cancels.
    """
    weights = jax.nn.softmax(k @ q / jnp.sqrt(len(q)))
    variance = jnp.trace(cumulant(2, q, k, v))
    total = jnp.sum(cumulant(1, q, k, v) ** 2) + variance
    return jnp.exp(jnp.sum(jax.scipy.special.entr(weights))), variance / total


def spread_of_values(heads=None, pair=((16, 5), (26, 8))):
    """How many keys each head of a real model attends to, and how far their values agree."""
    q, k, v, tokens = real_heads() if heads is None else heads
    effective, spread = effective_keys_and_spread(q, k, v)
    mosaic = [["all", "first"], ["all", "second"]]
    figure, _ = new_figure(9.0, 4.2)
    figure.clear()
    axes = figure.subplot_mosaic(mosaic, width_ratios=[1, 1.15])
    axes["all"].scatter(effective, spread, s=14, color=GREY, alpha=0.6, lw=0)
    axes["all"].set(xscale="log", ylim=(0, 1), xlabel="effective keys, exp(entropy of the weights)")
    axes["all"].set(ylabel="tr κ₂ / ⟨|v|²⟩: the share that cancels")
    axes["all"].set_title("The weights do not tell whether values agree", loc="left")
    axes["all"].set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    for at, panel, color in zip(pair, ("first", "second"), (BLUE, RED), strict=True):
        axes["all"].plot(effective[at], spread[at], "o", color=color, ms=8)
        weights = jax.nn.softmax(k[at] @ q[at] / np.sqrt(q.shape[-1]))
        size = np.linalg.norm(v[at], axis=-1)
        here = np.arange(len(tokens))
        axes[panel].bar(here, weights, width=0.8, color=color)
        axes[panel].plot(here, size / size.max(), "_", color=INK, ms=9, mew=1.5)
        axes[panel].set_xticks([])
        axes[panel].set(ylim=(0, 1.4), yticks=[0, 0.5, 1])
        name = f"layer {at[0]}, head {at[1]}: {effective[at]:.1f} keys, {spread[at]:.0%} cancels"
        axes[panel].set_title(name, loc="left", color=color, fontsize=10)
    axes["second"].set_xticks(
        here, [t.strip() for t in tokens], rotation=60, ha="right", fontsize=8
    )
    axes["first"].plot([], [], "_", color=INK, mew=1.5, label="|v|, of the largest")
    axes["first"].bar([0], [0], color=GREY, label="attention weight")
    axes["first"].legend(fontsize=8, loc="upper right", ncols=2, frameon=False)
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
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


FIGURES = {"energy_landscape": energy_landscape, "spread_of_values": spread_of_values}
