"""The notebook's figures: a grid of programs, and the slots of a pipeline over time."""

from matplotlib.patches import Rectangle

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, PALE, Figure, new_figure

COLOURS = BLUE, GREEN  # dark enough for white letters


@styled
def grid(heads: int, splits: int, group: int) -> Figure:
    """A grid of programs: a row for each key head, a column for each split, then the merges."""
    figure, ax = new_figure(8.6, 2.9)
    for head in range(heads):
        y = heads - 1 - head
        ax.text(-0.3, y + 0.4, f"{group} queries,\nkey head {head}", ha="right", va="center")
        for split in range(splits):
            colour = COLOURS[head % len(COLOURS)]
            ax.add_patch(Rectangle((split, y), 0.92, 0.8, color=colour))
            ax.text(split + 0.46, y + 0.4, "state", ha="center", va="center", color="white")
        ax.annotate("", (splits + 1.1, y + 0.4), (splits, y + 0.4), arrowprops={"arrowstyle": "->"})
        ax.text(splits + 1.2, y + 0.4, f"{group} states", va="center", color=INK)
    ax.text(splits / 2, heads + 0.1, "first kernel: a program a box", ha="center", color=INK)
    ax.text(splits + 1.2, heads + 0.1, "second kernel", ha="left", color=INK)
    ax.text(splits / 2, -0.45, "keys, split by split →", ha="center", color=GREY)
    ax.set(xlim=(-2.2, splits + 3), ylim=(-0.7, heads + 0.5))
    ax.axis("off")
    return figure.describe(
        f"""A grid of boxes: {heads} rows, one for each key head with its {group} queries, and
        {splits} columns, the splits of the keys. Each box is a program of the first kernel and
        leaves a state. An arrow leads from each row to {group} states, which the second kernel
        merges."""
    )


@styled
def pipeline(blocks: int = 5, slots: int = 2) -> Figure:
    """The times at which blocks of keys are copied and multiplied, with so many slots."""
    figure, ax = new_figure(8.6, 2.2)
    copy, work = 1.6, 1.0
    done = [0.0] * slots  # when each slot has been read
    free = 0.0  # when the threads are free
    for i in range(blocks):
        slot = i % slots
        start = done[slot]
        arrived = start + copy
        began = max(arrived, free)
        free = done[slot] = began + work
        y = slots - 1 - slot
        colour = COLOURS[i % len(COLOURS)]
        _box(ax, start, y, copy, PALE, f"copy {i}", INK)
        _box(ax, began, y, work, colour, f"use {i}", "white")
    for slot in range(slots):
        y = slots - 1 - slot
        ax.text(-0.2, y + 0.4, f"slot {slot}", ha="right", va="center", color=INK)
    ax.text(free, -0.4, "time →", ha="right", color=GREY)
    ax.set(xlim=(-1, free + 0.3), ylim=(-0.6, slots))
    ax.axis("off")
    return figure.describe(
        f"""Two rows of boxes along time, one for each of {slots} slots of shared memory. In each
        row a block of keys is copied, then used, and then the next copy begins. While one slot's
        block is used, the copy into the other slot is under way."""
    )


def _box(ax, x: float, y: float, width: float, colour: str, text: str, ink: str) -> None:
    ax.add_patch(Rectangle((x, y), width - 0.05, 0.8, color=colour))
    ax.text(x + width / 2, y + 0.4, text, ha="center", va="center", color=ink)
