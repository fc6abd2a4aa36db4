"""Notebook 05: Algorithm 3 on three devices, as towers that get one ruler and then one stack."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import to_rgba

from figures.canvas import styled
from figures.sentence import VALUES, WEIGHTS, WORDS
from figures.style import BLUE, GREEN, GREY, INK, NOTE, ORANGE, PALE, RED, Figure, new_figure

SHARDS = ((0, 1), (2,), (3, 4))  # words of each device
COLORS = (BLUE, ORANGE, GREEN)
FRACTIONS = {0.25: "¼", 0.5: "½", 1.0: "1"}
STEPS = (  # the title of a panel, and what the step sends
    ("1  attend: a ruler for each device", "sent: nothing"),
    ("2  pmax: one ruler for all", "sent: m, one number"),
    ("3  psum: one stack", "sent: d and n, three numbers"),
)


def _tower(ax, x: float, base: float, ruler: float, device: int, of: str = "") -> float:
    """A device's words stacked on `base`, the heaviest lowest, as multiples of `ruler`: its top.

    of: what a word's weight is divided by, if the tower shows shares
    """
    color = COLORS[device]
    for word in sorted(SHARDS[device], key=lambda word: -WEIGHTS[word]):
        height = WEIGHTS[word] / ruler
        ax.bar(x, height, 0.62, base, fc=to_rgba(color, 0.28), ec=color, lw=1.3)
        name = f"{WORDS[word]}  {WEIGHTS[word]}{of}" if of else WORDS[word]
        ax.text(x, base + height / 2, name, ha="center", va="center", fontsize=8)
        base += height
    return base


def _under(ax, x: float, name: str, what: str, color: str = INK) -> None:
    ax.text(x, -0.08, name, ha="center", va="top", fontsize=9)
    ax.text(x, -0.24, what, ha="center", va="top", fontweight="bold", color=color)


def _pair(n: np.ndarray) -> str:
    return f"({n[0]:g}, {n[1]:g})"


def draw_rulers(panels: Sequence) -> None:
    """Draw the three steps into three axes."""
    own, one, stack = panels
    weights, values = np.array(WEIGHTS, float), np.array(VALUES, float)
    ruler, base, total = weights.max(), 0.0, np.zeros(2)
    for device, shard in enumerate(map(list, SHARDS)):
        largest, d, n = weights[shard].max(), weights[shard].sum(), weights[shard] @ values[shard]
        for ax, unit in ((own, largest), (one, ruler)):
            said = f"d = {d / unit:g}\nn = {_pair(n / unit)}"
            top = _tower(ax, device, 0, unit, device)
            ax.text(device, top + 0.04, said, ha="center", va="bottom", fontsize=8.5)
        one.bar(device, d / largest, 0.62, fill=False, ec=GREY, ls=":", lw=1.1, zorder=0)
        _under(own, device, f"device {device}", f"m = log {largest:g}")
        _under(one, device, f"device {device}", f"× {FRACTIONS[largest / ruler]}")
        base = _tower(stack, 0, base, ruler, device, of="/16")
        total += n / ruler
    said = f"d = {base:g}\nn = {_pair(total)}"
    stack.text(0, base + 0.04, said, ha="center", va="bottom", fontsize=8.5)
    _under(stack, 0, "every device", f"n / d = {_pair(total / base)}", RED)
    for ax, (title, sent), width in zip(panels, STEPS, (2, 2, 0), strict=True):
        ax.set_title(title, pad=18)
        ax.text(0, 1.02, sent, transform=ax.transAxes, fontsize=9, color=RED)
        ax.set(xlim=(-0.75, width + 0.75), ylim=(-0.4, 2.4), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.axhline(0, color=INK, lw=1)
        for height in (1, 2):
            ax.axhline(height, color=PALE, lw=1, zorder=0)
            ax.text(-0.72, height, str(height), color=NOTE, fontsize=8, va="bottom")


@styled
def algorithm_3() -> Figure:
    """Local attention, the maximum over devices, and the two sums, of the five words."""
    figure, panels = new_figure(8.6, 4.2, ncols=3, width_ratios=[3, 3, 2.1])
    draw_rulers(panels)
    return figure.describe(
        """Algorithm 3 on three devices, in three panels. First each device stacks its words on its
        own ruler, whose unit is its heaviest word: heights 1.5, 1 and 1.125, nothing is sent. After
        pmax, which sends one number, all devices use the unit of the heaviest word of all, milk:
        the towers shrink to a quarter, a half and the whole of their heights. After psum, which
        sends three numbers, every device has one stack of height d = 2 with n = (2.5, 4.5), and
        n / d is the attention (1.25, 2.25)."""
    )


FIGURES = {"algorithm_3": algorithm_3}
