"""When further tokens in a step are nearly free: figures of notebooks 07 and 09."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from treeattn.cost.roofline import MACHINES, step_seconds
from treeattn.figures.canvas import styled
from treeattn.figures.measured import measured
from treeattn.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    new_figure,
)

STYLES = (
    (BLUE, "o"),
    (SKY, "s"),
    (ORANGE, "^"),
    (GREEN, "D"),
    (PURPLE, "v"),
    (RED, "P"),
    (GREY, "X"),
    (INK, "*"),
)


@styled
def roofline(steps: Mapping[int, float] | None = None, context: int = 2048) -> Figure:
    """How much longer a step of n tokens takes than one of 1: on two CPU cores and on an H100.

    steps: {tokens: milliseconds} as benchmarks/speculative.py measured them, drawn beside the CPU's
    """
    n = np.arange(1, 65)
    figure, (left, right) = new_figure(8.4, 3.7, ncols=2, sharey=True)
    small = {"parameters": 134.5e6, "weight_bytes": 4 * 134.5e6, "cache_bytes": context * 46080.0}
    peak, bandwidth = MACHINES["CPU"]
    line = step_seconds(n, 1, **small, peak=peak, bandwidth=bandwidth)
    left.plot(n, line / line[0], color=BLUE, lw=2)
    left.text(24, line[23] / line[0] * 0.8, "roofline", color=BLUE, ha="left", va="top")
    if steps:
        x = sorted(int(key) for key in steps)
        y = [steps[str(key)] if str(key) in steps else steps[key] for key in x]
        left.plot(x, np.array(y) / y[0], "o--", color=RED, ms=6)
        left.text(x[2], y[2] / y[0] * 1.15, "measured", color=RED, ha="right", va="bottom")
    left.set_title("Two CPU cores, SmolLM2-135M, float32, batch 1", fontsize=10)
    large = {"parameters": 8.03e9, "weight_bytes": 16.06e9, "cache_bytes": context * 131072.0}
    peak, bandwidth = MACHINES["H100"]
    for batch, (color, marker) in zip((1, 8, 32, 128), STYLES[::2], strict=False):
        line = step_seconds(n, batch, **large, peak=peak, bandwidth=bandwidth)
        right.plot(n, line / line[0], color=color, marker=marker, markevery=[0, 15, 31, 63], ms=6)
        right.annotate(
            f"batch {batch}",
            (64, line[-1] / line[0]),
            (6, 0),
            va="center",
            textcoords="offset points",
            color=color,
            fontsize=9,
        )
    right.set_title(f"H100, Llama-3.1-8B, bfloat16, {context:,} tokens of context", fontsize=10)
    for ax in (left, right):
        ax.axvline(16, color=GREY, lw=0.8, ls=":")
        ax.set(xscale="log", yscale="log", xlabel="tokens a text in one step", xlim=(1, 64))
        ax.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
        ax.set_yticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
        ax.minorticks_off()
    left.set_ylabel("time over that of one token\n= tokens a step to break even")
    figure.suptitle(
        "Verifying is nearly free while reading the weights takes longer than the products",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        "The time of a step of n tokens over that of one token, for n from 1 to 64, both axes "
        "logarithmic. Left, two CPU cores: the roofline is level up to 12 tokens and then rises; "
        "measured points lie above it up to the bend. Right, an H100, a line for each batch size: "
        "level for batch 1, and rising from fewer tokens on the larger the batch is."
    )


def measured_roofline() -> Figure:
    """`roofline` with the steps that benchmarks/speculative.py measured."""
    steps = measured("speculative").get("steps", {})
    return roofline({int(tokens): ms for tokens, ms in steps.items()})


FIGURES = {
    "speculation_roofline": measured_roofline,
}
