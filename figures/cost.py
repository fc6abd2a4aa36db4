"""Figure of notebook 06: how long a step of decoding takes, by ring and by tree."""

from collections.abc import Callable

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREY, INK, RED, Figure, new_figure

CLUSTERS = {8: "8 GPUs, one node", 128: "128 GPUs, 16 nodes"}
MARKED = 8_000, 80_000, 5_120_000  # keys at which the ratio is written


@styled
def ring_or_tree(decode_seconds: Callable, attend_seconds: Callable) -> Figure:
    """Seconds against keys, on 8 and on 128 GPUs; at three lengths the ratio.

    decode_seconds: of (keys, GPUs), the seconds of (ring, tree)
    attend_seconds: of (keys on a GPU), the seconds in which it attends to them
    """
    keys = np.geomspace(MARKED[0], MARKED[-1], 40)
    figure, panels = new_figure(8.6, 3.9, ncols=2, sharey=True)
    said = []
    for ax, (p, title) in zip(panels, CLUSTERS.items(), strict=True):
        ring, tree = np.array([decode_seconds(n, p) for n in keys]).T
        ax.fill_between(keys, tree, ring, color=GREY, alpha=0.13, lw=0)
        ax.loglog(keys, ring, "--", color=RED, lw=2.2)
        ax.loglog(keys, tree, color=BLUE, lw=2.2)
        ax.loglog(keys, [attend_seconds(n / p) for n in keys], ":", color=INK, lw=1.2)
        for n in MARKED:
            slow, fast = decode_seconds(n, p)
            ratio = f"{float(f'{slow / fast:.2g}'):,.0f}×"
            said.append(ratio)
            between = {"arrowstyle": "<->", "color": INK, "lw": 0.9, "shrinkA": 2, "shrinkB": 2}
            ax.annotate("", (n, slow), (n, fast), arrowprops=between)
            side = {"ha": "right"} if n == MARKED[-1] else {}
            beside = n * (0.85 if side else 1.15)
            ax.text(beside, np.sqrt(slow * fast), ratio, fontweight="bold", va="center", **side)
        ax.text(keys[24], 1.6 * ring[24], "ring", color=RED, ha="right")
        ax.text(keys[24], 1.5 * tree[24], "tree", color=BLUE, ha="right")
        ax.text(4e5, 0.4 * attend_seconds(4e5 / p), "attending to\nits own keys", va="top")
        ax.set(title=title, xlabel="keys in all", xlim=(6e3, 7e6), ylim=(4e-7, 3))
        ax.minorticks_off()
        ax.set_xticks([1e4, 1e5, 1e6], ["10,000", "100,000", "1 million"])
    panels[0].set_yticks([1e-6, 1e-3, 1], ["1 µs", "1 ms", "1 s"])
    panels[0].set_ylabel("one decoding step, calculated")
    return figure.describe(
        f"""Seconds of a decoding step against the keys, both logarithmic, on 8 and on 128 GPUs. The
        ring's line is above the tree's and rises in proportion to the keys. The tree's line is flat
        until attending to a device's own keys takes longer than merging. From 8,000 over 80,000 to
        5,120,000 keys the ring takes {", ".join(said[:3])} as long on 8 GPUs, and
        {", ".join(said[3:])} on 128."""
    )
