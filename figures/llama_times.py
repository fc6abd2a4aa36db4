"""Times of a Llama by tree and by ring: figures of notebook 08 and the README."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from figures.canvas import styled
from figures.measured import measured
from figures.printed import TABLE_1_H100, TABLE_1_MI300X, TABLE_2_RTX4090
from figures.style import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, new_figure

# 2025 Tables 1 and 2, with the markers of their points.
PAPER = {
    "8 × H100, Llama 3.1 8B": (TABLE_1_H100, BLUE, "o"),
    "4 × MI300X, Llama 3.1 8B": (TABLE_1_MI300X, GREEN, "^"),
    "2 × RTX 4090, Llama 3.2 1B": (TABLE_2_RTX4090, PURPLE, "D"),
}


LOOKS = (
    {"color": GREEN, "hatch": "..", "label": "tree, weights sharded"},
    {"color": BLUE, "label": "tree"},
    {"color": ORANGE, "hatch": "//", "label": "ring"},
)


@styled
def decode_times(results: Mapping | None = None) -> Figure:
    """Milliseconds of a decoding step by context and number of simulated devices.

    results: what benchmarks/llama.py wrote; a checkout's when None, ValueError where there is none.
    """
    rows = (results or measured("llama"))["devices"]
    counts = sorted({r["devices"] for r in rows})
    figure, axes = new_figure(8.0, 3.2, ncols=len(counts), sharey=True)
    for ax, p in zip(axes, counts, strict=True):
        mine = [r for r in rows if r["devices"] == p]
        x, tree, ring = (np.array(y) for y in (range(len(mine)), *_both(mine)))
        sharded = [min(v for k, v in r.items() if k.startswith("sharded")) for r in mine]
        one = [r["one device"] for r in mine]
        for shift, times, look in zip((-0.27, 0, 0.27), (sharded, tree, ring), LOOKS, strict=True):
            ax.bar(x + shift, times, 0.26, edgecolor="white", **look)
        for i, here in enumerate(one):
            ax.plot([i - 0.42, i + 0.42], [here, here], color=INK, lw=1.5)
        ax.plot([], [], color=INK, lw=1.5, label="one device alone")
        for i, ratio in enumerate(ring / tree):
            ax.text(i + 0.27, ring[i] * 1.02, f"×{ratio:.1f}", ha="center", fontsize=8)
        ax.set_xticks(x, [f"{r['context'] // 1024}k" for r in mine])
        ax.set_xlabel("context")
        ax.set_title(f"{p} devices", fontsize=9, loc="left")
    axes[0].set_ylabel("milliseconds a token")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.suptitle(
        "Decoding a token: the ring's extra work grows with context and devices",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        f"Bars of milliseconds a token for {', '.join(map(str, counts))} simulated devices, by "
        "context: tree with weights sharded beside the cache (dotted), tree, and ring (hatched). "
        "The ring takes longest everywhere, and its ratio to the tree, written above it, grows "
        "with the devices and with the context; a line marks the time of one device alone."
    )


def _both(rows) -> tuple[list[float], list[float]]:
    return [r["tree"] for r in rows], [r["ring"] for r in rows]


@styled
def tree_against_ring(results: Mapping | None = None) -> Figure:
    """The ring's time over the tree's, for a prompt and some tokens: here, and as printed.

    results: as for `decode_times`.
    """
    rows = (results or measured("llama"))["table"]
    figure, ax = new_figure(7.2, 3.9)
    tree, ring = map(np.array, _both(rows))
    _ratios(
        ax,
        [r["context"] for r in rows],
        ring / tree,
        None,
        ORANGE,
        "s",
        "measured here: 8 simulated\ndevices, SmolLM2 135M",
    )
    for name, (table, color, marker) in PAPER.items():
        ratios, errors = zip(*(r.ratio for r in table), strict=True)
        _ratios(ax, [r.context for r in table], ratios, errors, color, marker, name)
    ax.axhline(1, color=INK, lw=1)
    ax.grid(axis="y", color=PALE)
    ax.text(400, 0.72, "as fast as each other", fontsize=9, color=INK)
    ax.set(
        xscale="log",
        xlim=(380, 2.2e6),
        ylim=(0, 6.4),
        xlabel="tokens in the prompt",
        ylabel="ring's time / tree's time",
    )
    ticks = (500, 2000, 8000, 32_000, 128_000)
    ax.set_xticks(ticks, ["0.5k", "2k", "8k", "32k", "128k"])
    ax.minorticks_off()
    ax.set_title("A prompt and some tokens: how much longer with the ring?")
    return figure.describe(
        "The ring's time over the tree's, by the length of the prompt. Measured here, from half a "
        f"thousand to two thousand tokens: between {min(_all(rows)):.1f} and "
        f"{max(_all(rows)):.1f}. As the paper's tables print them, from 32 to 256 thousand tokens: "
        "between 2.3 and 5.4, with error bars, and no common trend."
    )


def _all(rows) -> list[float]:
    return [r["ring"] / r["tree"] for r in rows]


def _ratios(ax, contexts, ratios, spread, color, marker, name) -> None:
    ax.errorbar(contexts, ratios, spread, color=color, marker=marker, ms=6, lw=1.4, capsize=3)
    ax.annotate(
        name,
        (contexts[-1], ratios[-1]),
        (10, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=color,
    )


FIGURES = {
    "llama_decode_times": decode_times,
    "llama_tree_against_ring": tree_against_ring,
}
