"""Figures of notebook 06: links, and messages with time on them."""

from collections.abc import Mapping, Sequence

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, Figure, new_figure

# Name, latency in seconds (assumed), bytes per second in one direction (data sheets).
LINKS = (
    ("NVLink 4", 0.6e-6, 450e9, BLUE, "-"),
    ("xGMI (MI300X)", 0.6e-6, 64e9, GREEN, "--"),
    ("InfiniBand NDR", 5e-6, 50e9, ORANGE, "-"),
    ("PCIe 4.0 x16", 1e-6, 31.5e9, PURPLE, "-."),
    ("100 GbE", 30e-6, 12.5e9, RED, ":"),
)
CHUNK = 80_000 * 2 * 2048 * 2  # bytes: 80,000 keys and values of 16 heads of 128, in bfloat16
STATE = 4 * (2048 + 2 * 16)  # bytes: what Algorithm 3 merges of one token, in float32
ATTENDING = CHUNK / 3.35e12  # seconds in which an H100 reads that chunk


@styled
def links() -> Figure:
    """Time of one message by its size, over each link: 2024 Figure 2, with assumed latencies."""
    figure, axes = new_figure(7.0, 3.7)
    size = np.logspace(3, 10, 200)
    for name, latency, bandwidth, colour, dashes in LINKS:
        label = f"{name}: {latency * 1e6:g} µs (assumed), {bandwidth / 1e9:g} GB/s"
        axes.loglog(size, latency + size / bandwidth, dashes, color=colour, label=label)
    small = {"textcoords": "offset points", "va": "top", "fontsize": 8.5}
    notes = ((CHUNK, "80,000 keys\nand values", -4, "right"), (STATE, "a state", 4, "left"))
    for x, text, dx, ha in notes:
        axes.axvline(x, color=GREY, lw=0.8, ls=":")
        axes.annotate(text, (x, 1.2), xytext=(dx, 0), ha=ha, color=GREY, **small)
    axes.plot(CHUNK, ATTENDING, "o", color=INK, ms=5)
    text = f"attending\nto them:\n{1e6 * ATTENDING:.0f} µs"
    axes.annotate(text, (CHUNK, ATTENDING), xytext=(7, 2), **small)
    axes.set(
        xlabel="bytes of the message",
        ylabel="seconds",
        title="A chunk of the cache waits for bandwidth, a state only for latency",
        ylim=(2e-7, 2),
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.12, 0.93), labelspacing=0.25)
    return figure.describe(
        """Seconds of one message against its bytes, both logarithmic, for five links. Each curve is
        flat up to some ten kilobytes and then rises in proportion. A state of 8 kB lies on the flat
        part; 655 MB of keys and values on the rising one, where each link takes longer than the
        196 microseconds of attending to them."""
    )


@styled
def messages(panels: Mapping[str, Sequence[tuple]], node_size: int) -> Figure:
    """Who sends to whom, and when: a line from each message's sender and start to its receiver and
    arrival, dashed between nodes; before the first start a grey block, the launches.

    panels: of four, name -> (sender, receiver, start, arrival) of each message, in seconds
    """
    figure, axes = new_figure(8.6, 4.6, nrows=2, ncols=2, sharex=True, sharey=True)
    said = []
    for ax, (name, sent) in zip(axes.flat, panels.items(), strict=True):
        ax.axvspan(0, 1e6 * sent[0][2], color=PALE)
        end = 1e6 * max(arrival for *_, arrival in sent)
        for a, b, start, arrival in sent:
            far = a // node_size != b // node_size
            look = (
                {"color": ORANGE, "ls": "--", "lw": 1.4, "zorder": 3}
                if far
                else {"color": BLUE, "lw": 0.9}
            )
            ax.plot([1e6 * start, 1e6 * arrival], [a, b], **look)
        ax.set(title=f"{name}: {end:.0f} µs", xlim=(0, None))
        said.append(f"{name} ends after {end:.0f} microseconds")
    for ax in axes[:, 0]:
        ax.set_ylabel("device")
    for ax in axes[-1]:
        ax.set_xlabel("µs")
    return figure.describe(
        "After a grey block of launches, lines from sender and start to receiver and arrival, "
        "dashed where they cross between nodes; all panels have the same time axis. "
        f"{'; '.join(said)}. The ring's lines wind around all devices, a tree's meet."
    )


FIGURES = {"cost_links": links}
