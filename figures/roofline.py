"""When further tokens in a step are nearly free: a roofline, for notebook 09."""

import numpy as np
from matplotlib.figure import Figure

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, new_figure

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
BANDWIDTH, FLOPS = 3.35e12, 989e12  # of an H100, by its data sheet: bytes, bfloat16 operations
# Llama 3.1 8B: weights that a step reads; layers, heads, key heads, numbers of a head.
WEIGHTS, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 7.5e9, 32, 32, 8, 128


def times_one(tokens, batch: int, context: int) -> np.ndarray:
    """The least time of steps of so many tokens of each of `batch` texts, over that of one token.

    Weights and caches are read once a step, whatever is multiplied with them. The weights'
    products and attention wait for each other, so that each takes the longer of its two times.
    """
    tokens = np.asarray(tokens, float)

    def seconds(n):
        cache = batch * context * LAYERS * 2 * KV_HEADS * HEAD_DIM
        pairs = batch * n * context * LAYERS * HEADS * HEAD_DIM
        weights = np.maximum(2 * WEIGHTS / BANDWIDTH, 2 * WEIGHTS * batch * n / FLOPS)
        return weights + np.maximum(2 * cache / BANDWIDTH, 4 * pairs / FLOPS)

    return seconds(tokens) / seconds(1.0)


@styled
def roofline(context: int = 2048) -> Figure:
    """How much longer a step of n tokens takes than one of 1 on an H100, by batch."""
    figure, ax = new_figure(5.6, 3.6)
    n = np.arange(1, 65)
    for batch, (colour, marker) in zip((1, 8, 32, 128), STYLES[::2], strict=False):
        line = times_one(n, batch, context)
        ax.plot(n, line, color=colour, marker=marker, markevery=[0, 15, 31, 63], ms=6)
        place = {"va": "center", "textcoords": "offset points", "color": colour, "fontsize": 9}
        ax.annotate(f"batch {batch}", (64, line[-1]), (6, 0), **place)
    ax.set(xscale="log", yscale="log", xlabel="tokens a text in one step", xlim=(1, 64))
    ax.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
    ax.set_yticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
    ax.minorticks_off()
    ax.set_ylabel("time over that of one token\n= tokens a step to break even")
    ax.set_title(f"H100, Llama 3.1 8B, bfloat16, {context:,} tokens of context", fontsize=10)
    return figure.describe(
        "The time of a step of n tokens over that of one token, for n from 1 to 64, both axes "
        "logarithmic, on an H100: level for one text, rising the earlier the more texts there are."
    )


FIGURES = {"speculation_roofline": roofline}
