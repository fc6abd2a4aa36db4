"""Who sends what to whom: figures of notebooks 00 and 06, and of deeper ones."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.canvas import styled
from figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    NOTE,
    PALE,
    RED,
    SKY,
    new_figure,
)


def _arrow(ax, start, end, **style) -> None:
    arrow = {"arrowstyle": "-|>", "color": BLUE, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=arrow | style)


def llama_sends(p: int) -> tuple[float, float]:
    """Bytes that a device sends for each token of Llama 3.1 8B at 2²⁰ keys: by ring, by tree."""
    blocks, query_heads, key_heads, dim = 32, 32, 8, 128
    cache = 2**20 * blocks * key_heads * 2 * dim * 2  # in bfloat16
    state = blocks * query_heads * (dim + 2) * 4  # in float32, on 2 (p − 1) lines' ways
    return cache / p * (p - 1), state * 2 * (p - 1) / p


@styled
def ring_and_tree(p: int = 8) -> Figure:
    """Keys and values travel around a ring, states up and down a tree (2024 Figure 1b).

    The bytes that a device sends are areas: a square behind the ring, and a dot by the tree.
    """
    figure, (ring, tree) = new_figure(7.4, 3.4, ncols=2)
    angles = np.pi / 2 - 2 * np.pi * np.arange(p) / p
    x = np.cos(angles)
    y = np.sin(angles)
    for i in range(p):
        nearby = angles[i] - 2 * np.pi / p * np.array([0.27, 0.73])
        a, b = np.cos(nearby)
        c, d = np.sin(nearby)
        _arrow(ring, (a, c), (b, d), color=RED, lw=4, mutation_scale=18)
        _device(ring, x[i], y[i], i)
    by_ring, by_tree = llama_sends(p)
    ring.add_patch(Rectangle((-1.25, -1.25), 2.5, 2.5, fc=RED, alpha=0.15, lw=0))
    note = f"each arrow: a shard,\n{p - 1} times for each\nnew token"
    ring.text(0, 0, note, ha="center", va="center", fontsize=9)
    ring.set(xlim=(-1.3, 1.3), ylim=(-1.25, 1.25), aspect="equal")
    ring.set_title(f"Ring: a device sends {by_ring / 1e9:.0f} GB, the square")
    side = 2.5 * np.sqrt(by_tree / by_ring)
    dot = Rectangle((3.75, 0.65), side, side, fc=BLUE, lw=0, clip_on=False)  # in the ring's units
    to_scale = ring.annotate(
        "the dot,\nto the square's scale",
        dot.get_xy(),
        (3.75, 1.2),
        ha="center",
        va="top",
        fontsize=9,
        arrowprops={"arrowstyle": "->", "color": GREY, "shrinkB": 4},
        annotation_clip=False,
    )
    for patch in (ring.add_patch(dot), to_scale):
        patch.set_in_layout(False)
    places = list(range(p))
    level = 0
    while len(places) > 1:
        above = [sum(places[i : i + 2]) / len(places[i : i + 2]) for i in range(0, len(places), 2)]
        for i, place in enumerate(places):
            tree.plot([place, above[i // 2]], [level, level + 1], color=BLUE, lw=1.4)
        places = above
        level = level + 1
        tree.plot(
            places, [level] * len(places), "o", ms=15, mfc="white", mec=BLUE, mew=1.5, zorder=3
        )
        for i, place in enumerate(places):  # the device that merges: the first of those below
            tree.text(place, level, str(i << level), ha="center", va="center", fontsize=9, zorder=4)
    for i in range(p):
        _device(tree, i, 0, i)
    tree.text(-0.6, level + 0.1, "each line:\na state up,\nthe result down", va="top", fontsize=9)
    tree.set(xlim=(-0.7, p - 0.3), ylim=(-0.5, level + 0.3))
    tree.set_title(f"Tree: a device sends {by_tree / 1e6:.1f} MB, the dot")
    for ax in (ring, tree):
        ax.axis("off")
    return figure.describe(
        f"Left, {p} devices in a circle; thick arrows lead from each to the next, each a shard of "
        f"keys and values, in {p - 1} rounds. Right, the same devices as the leaves of a binary "
        f"tree of {level} levels, whose inner circles bear the number of the device that merges; "
        "along its thin lines states go up, and the result comes down. For each new token of "
        f"Llama 3.1 8B after 2²⁰ tokens a device sends {by_ring / 1e9:.0f} GB by the ring, a "
        f"square behind it, and {by_tree / 1e6:.1f} MB by the tree, a dot to the same scale."
    )


def _device(ax, x, y, i) -> None:
    ax.plot(x, y, "s", ms=19, mfc="white", mec=INK, mew=1.2)
    ax.text(x, y, str(i), ha="center", va="center", fontsize=9)


def butterfly_pairs(p: int) -> list[tuple[str, list[tuple[int, int]]]]:
    """The rounds of `merge_across(method="butterfly")`: (what happens, pairs (from, to)).

    Devices beyond the largest power of two hand in their states first, and get the result last.
    """
    core = 1 << (p.bit_length() - 1)
    bits = [1 << i for i in range(core.bit_length() - 1)]
    rounds = [(f"swap over {bit}", [(i, i ^ bit) for i in range(core)]) for bit in bits]
    if p > core:
        hand_in = [(i, i - core) for i in range(core, p)]
        rounds = [("hand in", hand_in), *rounds, ("hand back", [(b, a) for a, b in hand_in])]
    return rounds


@styled
def butterfly(sizes: Sequence[int] = (8, 6)) -> Figure:
    """Who sends its state to whom, round by round, and how many shards each state then holds."""
    figure, axes = new_figure(7.4, 3.4, ncols=len(sizes), squeeze=False)
    for ax, p in zip(axes[0], sizes, strict=True):
        holds = [1] * p
        rounds = butterfly_pairs(p)
        for step, (what, pairs) in enumerate(rounds):
            before = list(holds)
            for a, b in pairs:
                ax.annotate(
                    "",
                    (b, step + 0.86),
                    (a, step + 0.14),
                    arrowprops={"arrowstyle": "-|>", "color": BLUE, "lw": 1.1, "alpha": 0.8},
                )
                holds[b] = before[a] if what == "hand back" else holds[b] + before[a]
            for i in range(p):
                ax.plot([i, i], [step + 0.14, step + 0.86], color=PALE, lw=1, zorder=0)
            ax.text(p - 0.35, step + 0.5, what, va="center", color=NOTE, fontsize=9)
            _row(ax, step, before, p)
        _row(ax, len(rounds), holds, p)
        ax.set(xlim=(-0.6, p + 1.1), ylim=(len(rounds) + 0.4, -0.4), xlabel="device")
        ax.set(xticks=range(p), yticks=range(len(rounds) + 1), ylabel="after round")
        ax.set_title(f"{p} devices: {len(rounds)} rounds")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    return figure.describe(
        f"Devices in columns, rounds from top to bottom, for {' and '.join(map(str, sizes))} "
        "devices. Arrows show who sends its state to whom; a circle's number says how many shards "
        "a device's state covers, and filled circles have all. Eight devices need three rounds; "
        "six need four, since two of them hand in their states first and get the result last."
    )


def _row(ax, y: int, holds: Sequence[int], p: int) -> None:
    """A circle a device, with the number of shards its state covers; full ones filled."""
    for i, n in enumerate(holds):
        full = n == p
        ax.plot(i, y, "o", ms=15, mfc=GREEN if full else "white", mec=GREEN if full else INK)
        ax.text(i, y, str(n), ha="center", va="center", fontsize=9, color="white" if full else INK)


def _parts(ax, left: float, y: float, count: int, held: Sequence[int], color: str) -> None:
    """A state as a row of `count` boxes, of which the `held` ones are filled."""
    for part in range(count):
        fill = color if part in held else "white"
        ax.add_patch(Rectangle((left + 0.2 * part, y), 0.19, 0.34, ec=GREY, lw=0.8, fc=fill))


@styled
def tree_of_trees(nodes: int = 2, devices: int = 4) -> Figure:
    """`method="hierarchical"`: which parts of the state each device holds, stage by stage."""
    figure, ax = new_figure(7.4, 4.3)
    stages = ("its own state", "a share of its node's", "the same share of all", "all of it")
    moves = (
        "all-to-all within the node",
        "gather across the nodes",
        "all-gather within the node",
    )
    for stage, name in enumerate(stages):
        for node in range(nodes):
            for i in range(devices):
                left = node * (devices + 0.7) + i
                held = range(devices) if stage in (0, 3) else (i,)
                covers = (1, devices, devices * nodes, devices * nodes)[stage]
                _parts(ax, left, float(stage), devices, held, GREEN if stage > 1 else SKY)
                ax.text(left + 0.4, stage - 0.09, f"of {covers}", ha="center", fontsize=8)
        ax.text(-0.25, stage + 0.17, name, ha="right", va="center", fontsize=9)
    width = nodes * (devices + 0.7) - 0.7
    for stage, name in enumerate(moves):
        color = RED if stage == 1 else INK
        for node in range(nodes):
            middle = node * (devices + 0.7) + devices / 2 - 0.1
            _arrow(ax, (middle, stage + 0.4), (middle, stage + 0.78), color=color)
        if stage == 1:
            for i in range(devices):
                low = i + 0.4
                high = (nodes - 1) * (devices + 0.7) + i + 0.4
                ax.plot(
                    [low, high],
                    [stage + 0.48 + 0.07 * i] * 2,
                    color=RED,
                    lw=1,
                    ls="--",
                    marker="o",
                    ms=3,
                )
        ax.text(
            width + 0.1,
            stage + 0.6,
            name.replace(" ", "\n", 1),
            va="center",
            fontsize=9,
            color=color,
        )
    for node in range(nodes):
        left = node * (devices + 0.7)
        ax.text(left + devices / 2 - 0.1, -0.32, f"node {node}", ha="center", fontsize=9)
    ax.set(xlim=(-2.4, width + 2.3), ylim=(len(stages) - 0.5, -0.5))
    ax.set_title("A tree of trees: only a share of the state crosses between the nodes")
    ax.axis("off")
    return figure.describe(
        f"{nodes} nodes of {devices} devices, each drawn as a state of {devices} parts, in four "
        "stages from top to bottom. First each device has all parts of its own state. An "
        "all-to-all within the node leaves each device one part, of its node's shards. Dashed "
        "lines across the nodes join devices with the same part, which then covers all shards. A "
        "gather within the node gives every device all parts."
    )


FIGURES = {
    "ring_and_tree": ring_and_tree,
    "butterfly": butterfly,
    "tree_of_trees": tree_of_trees,
}
