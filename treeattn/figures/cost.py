"""Figures of notebook 06: links, rounds, and the papers' figures and tables re-derived."""

from dataclasses import replace

import numpy as np

from treeattn.cost.formulas import Workload, mem_ring, mem_tree, numel_kv
from treeattn.cost.network import collective_rounds, run
from treeattn.cost.papers import (
    FIGURE_3_CONTEXT,
    FIGURE_3_DEVICES,
    FIGURE_3_SPEEDUP,
    FIGURE_4_GAP_BYTES,
    H100_8B,
    MI300X_8B,
    RTX4090_1B,
    TABLE_1_H100,
    TABLE_1_MI300X,
    TABLE_2_RTX4090,
    common_seconds,
    fit_step,
    table_steps,
)
from treeattn.cost.schedules import schedule
from treeattn.cost.strategies import attend_seconds, decode_cost
from treeattn.cost.topology import H100, preset
from treeattn.figures.canvas import styled
from treeattn.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, new_figure

DGX = preset("dgx-h100")
PAPERS_BLOCK = Workload(640_000)  # v1 §6.3: 16 heads of 128, bfloat16
# The published shape of Llama 3.1 8B's attention.
LLAMA_8B = Workload(1, heads=32, kv_heads=8, head_dim=128, layers=32)


@styled
def links():
    """Time of one message by its size, over each link: v1's Figure 2, from data sheets."""
    figure, axes = new_figure(7.2, 3.6)
    size = np.logspace(3, 10, 200)
    for name, level, colour in (
        ("NVLink 4", DGX.levels[0], BLUE),
        ("xGMI (MI300X)", preset("mi300x").levels[0], GREEN),
        ("InfiniBand NDR", DGX.levels[1], ORANGE),
        ("PCIe 4.0 x16", preset("rtx4090").levels[0], PURPLE),
        ("100 GbE", preset("ethernet").levels[1], RED),
    ):
        label = f"{name}: {level.latency * 1e6:g} µs, {level.bandwidth / 1e9:g} GB/s"
        axes.loglog(size, level.latency + size / level.bandwidth, color=colour, label=label)
    chunk = PAPERS_BLOCK.dtype_bytes * numel_kv(PAPERS_BLOCK, 8)
    attend = attend_seconds(PAPERS_BLOCK, 80_000, 1, H100)
    axes.axvline(chunk, color=GREY, lw=0.8, ls=":")
    axes.annotate(
        "80,000 keys\nand values",
        (chunk, 1.2),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        color=GREY,
        fontsize=8.5,
    )
    axes.plot(chunk, attend, "o", color=INK, ms=5)
    axes.annotate(
        "attending\nto them:\n196 µs",
        (chunk, attend),
        xytext=(7, 2),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
    )
    axes.axvline(8320, color=GREY, lw=0.8, ls=":")
    axes.annotate(
        "a state", (8320, 1.2), xytext=(4, 0), textcoords="offset points", va="top",
        color=GREY, fontsize=8.5,
    )  # fmt: skip
    axes.set(
        xlabel="bytes of the message",
        ylabel="seconds",
        title="A chunk of the cache waits for bandwidth, a state only for latency",
        ylim=(2e-7, 2),
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.1, 0.93), labelspacing=0.25)
    return figure


@styled
def rounds(p: int = 16, message_bytes: int = 8320):
    """Who sends to whom, and when, on two nodes of eight: lines from start to arrival."""
    kinds = ("tree-allreduce", "hierarchical-allreduce", "butterfly")
    figure, panels = new_figure(8.4, 3.3, ncols=3, sharex=True, sharey=True)
    for axes, kind in zip(panels, kinds, strict=True):
        end = 0.0
        for sent, start, arrival in run(schedule(kind, p, message_bytes, DGX), p, DGX):
            far = DGX.level_of(sent.source, sent.target) == 1
            for colour, chosen in ((BLUE, ~far), (ORANGE, far)):
                axes.plot(
                    np.stack([start[chosen], arrival[chosen]]) * 1e6,
                    np.stack([sent.source[chosen], sent.target[chosen]]),
                    color=colour,
                    lw=0.9,
                )
            end = max(end, arrival.max())
        axes.set_title(f"{kind}:\n{collective_rounds(kind, p, 8)} rounds, {end * 1e6:.1f} µs")
        axes.axhline(7.5, color=GREY, lw=0.7, ls=":")
        axes.set_xlabel("µs")
    panels[0].set_yticks([0, 4, 7, 8, 12, 15])
    panels[0].set_ylabel("device (node 0 below the line)")
    figure.suptitle(
        "One state of 8 kB over two nodes: crossing between them (orange) takes most of the time",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    return figure


@styled
def speedups():
    """v1's Figure 3: ring's time over tree's, by the model and with a constant on both."""
    figure, (left, right) = new_figure(8.0, 3.5, ncols=2, sharey=True)
    block = replace(PAPERS_BLOCK, context=FIGURE_3_CONTEXT)
    constant = common_seconds(block, FIGURE_3_DEVICES, DGX, FIGURE_3_SPEEDUP)

    def ratio(p: int, context: int, c: float) -> float:
        w = Workload(context)
        ring, tree = (decode_cost(s, w, p, DGX).seconds for s in ("ring", "tree-allreduce"))
        return (ring + c) / (tree + c)

    contexts = [80_000 * 2**k for k in range(8)]
    for p, colour in ((8, SKY), (64, GREEN), (128, BLUE)):
        for c, style in ((0.0, "-"), (constant, "--")):
            left.loglog(contexts, [ratio(p, n, c) for n in contexts], style, color=colour)
        left.annotate(
            f"{p} GPUs", (contexts[-1], ratio(p, contexts[-1], 0.0)),
            xytext=(-2, -13 if p == 64 else 5), textcoords="offset points", ha="right",
            color=colour, fontsize=9,
        )  # fmt: skip
    devices = [8 * 2**k for k in range(5)]
    right.loglog(devices, [ratio(p, FIGURE_3_CONTEXT, 0.0) for p in devices], color=BLUE)
    right.loglog(devices, [ratio(p, FIGURE_3_CONTEXT, constant) for p in devices], "--", color=BLUE)
    right.annotate("model", (16, 2600), color=BLUE, fontsize=9)
    right.annotate(
        f"model, {constant * 1e3:.0f} ms more\nfor either", (9, 9), color=BLUE, fontsize=9
    )
    for axes in (left, right):
        x = FIGURE_3_CONTEXT if axes is left else FIGURE_3_DEVICES
        axes.plot(x, FIGURE_3_SPEEDUP, "*", color=RED, ms=12, clip_on=False)
        axes.axhline(1, color=GREY, lw=0.7)
    right.annotate(
        "printed: ×8", (FIGURE_3_DEVICES, FIGURE_3_SPEEDUP), xytext=(-4, -16),
        textcoords="offset points", ha="right", color=RED, fontsize=9,
    )  # fmt: skip
    left.set(xlabel="keys in the cache", ylabel="ring's time / tree's", title="(a) by context")
    right.set(xlabel="GPUs", title=f"(b) by GPUs, {FIGURE_3_CONTEXT / 1e6:.2f}M keys")
    right.set_xticks(devices, [str(p) for p in devices])
    right.minorticks_off()
    figure.suptitle(
        "Data sheets promise a ratio of thousands; the printed ×8 needs 0.12 s that both pay",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    return figure


@styled
def memory_gap():
    """v1's Figure 4: peak memory of one block on each of two devices, ring and tree."""
    figure, axes = new_figure(7.0, 3.4)
    contexts = np.arange(1, 9) * 16_000
    for hidden, colour in ((2048, BLUE), (4096, ORANGE)):
        block = [Workload(int(n), heads=hidden // 128) for n in contexts]
        ring, tree = ([2 * f(w, 2) / 1e6 for w in block] for f in (mem_ring, mem_tree))
        axes.plot(
            contexts, ring, color=colour, lw=4, alpha=0.4, label=f"ring, hidden size {hidden}"
        )
        axes.plot(contexts, tree, "--", color=colour, label=f"tree, hidden size {hidden}")
        axes.annotate(
            "", (contexts[-1], ring[-1]), (contexts[-1], tree[-1]),
            arrowprops={"arrowstyle": "<->", "color": colour},
        )  # fmt: skip
        axes.annotate(
            f"{ring[-1] - tree[-1]:.1f} MB\n(printed: {FIGURE_4_GAP_BYTES[hidden] / 1e6:.0f})",
            (contexts[-1], (ring[-1] + tree[-1]) / 2), xytext=(6, 0), textcoords="offset points",
            va="center", color=colour, fontsize=9,
        )  # fmt: skip
    axes.set(
        xlabel="keys in the cache (half of them on each device)",
        ylabel="MB on a device",
        title="The gap is one chunk of keys and values: it doubles with the hidden size",
        xlim=(contexts[0], contexts[-1] * 1.17),
        ylim=(0, None),
    )
    axes.legend(fontsize=8.5)
    return figure


@styled
def table_gaps():
    """v2's Tables 1 and 2: ring's time less tree's, against the bytes that the ring moved."""
    figure, axes = new_figure(7.4, 3.8)
    for name, rows, setting, fixed, colour in (
        ("2 × RTX 4090, PCIe", TABLE_2_RTX4090, RTX4090_1B, False, PURPLE),
        ("4 × MI300X, xGMI", TABLE_1_MI300X, MI300X_8B, False, GREEN),
        ("8 × H100, NVLink", TABLE_1_H100, H100_8B, True, BLUE),
    ):
        moved = [table_steps(setting, row.context) for row in rows]
        total = [m.steps * m.step_bytes for m in moved]
        gap, error = zip(*[row.gap for row in rows], strict=True)
        fit = fit_step(rows, setting, fixed=fixed)
        label = f"{name}: {fit.bandwidth / 1e9:.3g} GB/s"
        if fixed:
            label += f" and {fit.step_seconds * 1e6:.0f} µs a step"
        axes.errorbar(total, gap, error, fmt="o", color=colour, ms=5, capsize=2)
        line = np.geomspace(total[0] / 1.4, total[-1] * 1.4, 50)
        axes.plot(
            line,
            line / fit.bandwidth + moved[0].steps * fit.step_seconds,
            color=colour,
            lw=1,
            label=label,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes that the ring moves from each device in ten tokens",
        ylabel="ring's seconds less tree's",
        title="Tables 1 and 2: the gap is the time to move the cache, key heads repeated",
    )
    axes.legend(fontsize=8.5, loc="lower right")
    return figure


@styled
def grouped_queries(p: int = 8, context: int = 640_000):
    """Bytes that each device sends for a token, by key heads: ring's shrink, the tree's do not."""
    figure, axes = new_figure(6.6, 3.2)
    kv_heads = [32, 16, 8, 4, 2, 1]
    block = [replace(LLAMA_8B, context=context, kv_heads=n, layers=1) for n in kv_heads]
    for name, strategy, colour in (
        ("ring", "ring", ORANGE),
        ("tree (ring Allreduce)", "ring-allreduce", BLUE),
    ):
        sent = [decode_cost(strategy, w, p, DGX).sent_bytes for w in block]
        axes.semilogy(range(len(kv_heads)), sent, "o-", color=colour, label=name)
        for i, value in enumerate(sent):
            text = f"{value / 1e9:.2g} GB" if value > 1e8 else f"{value / 1e3:.3g} kB"
            axes.annotate(
                text, (i, value), xytext=(0, 7), textcoords="offset points", ha="center",
                fontsize=8.5, color=colour,
            )  # fmt: skip
    axes.set_xticks(range(len(kv_heads)), [str(n) for n in kv_heads])
    axes.set(
        xlabel=f"key heads, for 32 query heads of 128 ({context:,} keys on {p} devices)",
        ylabel="bytes sent by a device",
        title="Sharing key heads helps only the ring, and not enough",
        ylim=(1e4, 2e11),
    )
    axes.legend(fontsize=8.5, loc="center right")
    return figure


FIGURES = {
    "cost-links": links,
    "cost-rounds": rounds,
    "cost-speedups": speedups,
    "cost-memory": memory_gap,
    "cost-tables": table_gaps,
    "cost-grouped-queries": grouped_queries,
}
