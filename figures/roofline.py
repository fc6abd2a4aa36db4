"""When further tokens in a step are nearly free: figures of notebooks 07 and 09."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from labs.cost import DEVICES, MACHINES, MODELS, Device, Model, verify_work
from figures.canvas import styled
from figures.measured import measured
from figures.style import (
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


SMOLLM2 = Model(
    "SmolLM2-135M",
    layers=30,
    width=576,
    heads=9,
    kv_heads=3,
    hidden=1536,
    vocabulary=49152,
    head_dim=64,
)


def two_cores() -> Device:
    """These notebooks' machine, with 24 GB."""
    peak, bandwidth = MACHINES["CPU"]
    return Device("two CPU cores", memory_bytes=24e9, memory_bandwidth=bandwidth, flops=peak)


def times_one(
    model: Model, device: Device, batch: int, context: int, most: int, dtype: str
) -> np.ndarray:
    """The roofline of steps of 1, 2, …, `most` tokens of each text, over that of 1."""
    work = [verify_work(model, n, batch, context, dtype=dtype) for n in range(1, most + 1)]
    seconds = np.array([x.seconds(device) for x in work])
    return seconds / seconds[0]


@styled
def roofline(results: Mapping | None = None, context: int = 2048) -> Figure:
    """How much longer a step of n tokens takes than one of 1: on two CPU cores and on an H100.

    results: what benchmarks/ridge.py wrote; a checkout's when None, ValueError if none.
    context: of the texts on the H100
    """
    rows = (measured("ridge") if results is None else results)["steps"]
    figure, (left, right) = new_figure(8.4, 3.7, ncols=2, sharey=True)
    alone = [row for row in rows if row["batch"] == 1]
    for row, color in zip((alone[0], alone[-1]), (BLUE, RED), strict=True):
        _measured_beside_roofline(left, row, color)
    left.legend(fontsize=8.5, loc="upper left")
    left.set_title("Two CPU cores, SmolLM2-135M, float32, 1 text", fontsize=10)
    for batch, (color, marker) in zip((1, 8, 32, 128), STYLES[::2], strict=False):
        line = times_one(MODELS["llama-3.1-8b"], DEVICES["H100"], batch, context, 64, "bfloat16")
        n = np.arange(1, 65)
        right.plot(n, line, color=color, marker=marker, markevery=[0, 15, 31, 63], ms=6)
        right.annotate(
            f"batch {batch}",
            (64, line[-1]),
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
        "Verifying is nearly free while reading takes longer than the products",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        "The time of a step of n tokens over that of one token, for n from 1 to 64, both axes "
        "logarithmic. Left, two CPU cores: after 256 tokens of context the roofline is level up to "
        "12 tokens, after 16,384 it rises from 4 on; measured points lie above both. Right, an "
        "H100, a line for each batch size: level for batch 1, rising earlier the larger the batch."
    )


def _measured_beside_roofline(ax, row: Mapping, color: str) -> None:
    """A row of benchmarks/ridge.py as points, and what the roofline says as a line."""
    line = times_one(SMOLLM2, two_cores(), row["batch"], row["context"], 64, "float32")
    ax.plot(np.arange(1, 65), line, color=color, lw=2)
    ms = np.array(list(row["ms"].values()))
    label = f"after {row['context']:,}: roofline, and measured"
    ax.plot([int(n) for n in row["ms"]], ms / ms[0], "o--", color=color, ms=6, label=label)


FIGURES = {"speculation_roofline": roofline}
