"""Figures of notebook 06: links, rounds, the papers' figures re-derived, and what lies beyond."""

import functools
from dataclasses import replace

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from PIL import Image

from treeattn.closed_forms import collective_rounds, collective_seconds
from treeattn.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RC,
    RED,
    SKY,
    new_figure,
)
from treeattn.formulas import Workload, mem_ring, mem_tree, numel_kv
from treeattn.network import run, schedule
from treeattn.printed import (
    FIGURE_3_CONTEXT,
    FIGURE_3_DEVICES,
    FIGURE_3_SPEEDUP,
    FIGURE_4_GAP_BYTES,
    TABLE_1_H100,
    TABLE_1_MI300X,
    TABLE_2_RTX4090,
)
from treeattn.reconcile import (
    H100_8B,
    MI300X_8B,
    RTX4090_1B,
    common_seconds,
    fit_step,
    table_steps,
)
from treeattn.strategies import attend_seconds, decode_cost
from treeattn.topology import H100, Level, Topology, preset


class PaletteCanvas(FigureCanvasAgg):
    """Writes PNGs of at most 256 colours, a third as large: notebooks store many."""

    def print_png(self, file, **_):
        """As Agg's own, with a palette."""
        self.draw()
        picture = Image.fromarray(np.asarray(self.buffer_rgba())).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(file, format="png", optimize=True)


def styled(draw):
    """`draw` in the shared style throughout (titles and legends take it when they are made)."""

    @functools.wraps(draw)
    def wrapper(*args, **kwargs):
        with matplotlib.rc_context(RC):
            figure = draw(*args, **kwargs)
        PaletteCanvas(figure)
        return figure

    return wrapper


DGX = preset("dgx-h100")
PAPERS_BLOCK = Workload(640_000)  # v1 §6.3: 16 heads of 128, bfloat16


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


LINE_COLOURS = {
    "gather": GREEN,
    "butterfly": BLUE,
    "tree-allreduce": SKY,
    "hierarchical-allreduce": ORANGE,
    "ring-allreduce": RED,
}


def merge_seconds(kind: str, p: int, state_bytes: float, topology: Topology, parts: int = 2):
    """Seconds to merge states of that size, launches included, as `treeattn.tree` does it.

    kind: "gather", "butterfly", or an Allreduce, of which there are `parts`.
    """
    if kind == "gather":
        return topology.launch + collective_seconds("all-gather", p, state_bytes, topology)
    launches = collective_rounds(kind, p) if kind == "butterfly" else parts
    seconds = collective_seconds(kind, p, state_bytes, topology)
    if kind != "butterfly":  # the later parts are empty messages as far as time goes
        seconds += (parts - 1) * collective_seconds(kind, p, 0, topology)
    return launches * topology.launch + seconds


@styled
def fastest_merge():
    """Which way of merging states is fastest, by the devices and the bytes of a state."""
    figure, (left, right) = new_figure(8.4, 3.7, ncols=2, sharey=True)
    sizes, devices = np.logspace(3, 9, 61), 2 ** np.arange(1, 13)
    kinds = list(LINE_COLOURS)
    for axes, topology in ((left, DGX), (right, preset("ethernet"))):
        best = np.array(
            [
                [
                    np.argmin([merge_seconds(k, int(p), float(m), topology) for k in kinds])
                    for m in sizes
                ]
                for p in devices
            ]
        )
        _regions(axes, sizes, devices, best, [LINE_COLOURS[k] for k in kinds])
        axes.set_title(topology.name, fontsize=10)
        axes.set_xlabel("bytes of a state")
        axes.axvline(8320, color=INK, lw=0.8, ls=":")
    left.set_ylabel("devices")
    left.annotate("papers' block", (8320, 2), xytext=(3, 4), textcoords="offset points", fontsize=8)
    _colour_legend(figure, LINE_COLOURS)
    figure.suptitle(
        "Few bytes: few rounds and launches win. Many: the Allreduce that sends least",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    return figure


def _regions(axes, x, y, index, colours):
    """Cells of a log-log plane in the colours of their indices."""
    edges = [np.sqrt(np.r_[v[0] ** 2 / v[1], v] * np.r_[v, v[-1] ** 2 / v[-2]]) for v in (x, y)]
    norm = BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours))
    axes.pcolormesh(*edges, index, cmap=ListedColormap(colours), norm=norm, rasterized=True)
    axes.set(xscale="log", yscale="log")
    axes.set_yscale("log", base=2)
    axes.set_yticks(y[1::2], [str(v) for v in y[1::2]])
    axes.minorticks_off()


def _colour_legend(figure, colours: dict[str, str]):
    handles = [Patch(color=c, label=name) for name, c in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colours), fontsize=8.5)


@styled
def launch_crossing():
    """Butterfly against two and three Allreduces, by what a launch costs."""
    figure, panels = new_figure(8.0, 3.5, ncols=2, sharey=True)
    launch = np.logspace(-7, -4, 100)
    for axes, p in zip(panels, (8, 128), strict=True):
        for name, kind, parts, colour in (
            ("butterfly", "butterfly", 1, BLUE),
            ("two Allreduces (tree), as compiled", "tree-allreduce", 2, ORANGE),
            ("three, as written", "tree-allreduce", 3, RED),
        ):
            seconds = [
                merge_seconds(kind, p, 8320, replace(DGX, launch=float(x)), parts) for x in launch
            ]
            axes.loglog(launch * 1e6, np.array(seconds) * 1e6, color=colour, label=name)
            if kind == "butterfly":
                butterfly = np.array(seconds)
            else:
                _mark_crossings(axes, launch * 1e6, butterfly * 1e6, np.array(seconds) * 1e6)
        axes.axvline(DGX.launch * 1e6, color=GREY, lw=0.8)
        axes.set(xlabel="µs to launch a collective", title=f"{p} GPUs", ylim=(1, 1000))
    panels[0].annotate(
        "NCCL's\nown figure", (DGX.launch * 1e6, 1.4), xytext=(4, 0), textcoords="offset points",
        color=GREY, fontsize=8.5,
    )  # fmt: skip
    panels[0].set_ylabel("µs to merge a state")
    panels[0].legend(fontsize=8.5)
    figure.suptitle(
        "A butterfly has half an Allreduce's rounds, but each of them is a launch",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    return figure


@styled
def latency_or_bandwidth(p: int = 8, context: int = 640_000):
    """Ring's time over the butterfly's, by the latency and the bandwidth of the only links."""
    figure, axes = new_figure(6.6, 4.2)
    latency, bandwidth = np.logspace(-7, -3, 41), np.logspace(9, 12, 41)
    w = Workload(context)

    def ratio(a: float, b: float) -> float:
        topology = Topology("one level", H100, (Level("link", p, a, b),), DGX.launch)
        ring, tree = (decode_cost(s, w, p, topology).seconds for s in ("ring", "butterfly"))
        return ring / tree

    grid = np.array([[ratio(float(a), float(b)) for b in bandwidth] for a in latency])
    filled = axes.contourf(
        bandwidth / 1e9, latency * 1e6, np.log10(grid), levels=np.arange(0.75, 4.51, 0.25),
        cmap="cividis",
    )  # fmt: skip
    for name, level in (
        ("NVLink 4", DGX.levels[0]),
        ("InfiniBand NDR", DGX.levels[1]),
        ("xGMI", preset("mi300x").levels[0]),
        ("PCIe 4.0", preset("rtx4090").levels[0]),
        ("100 GbE", preset("ethernet").levels[1]),
    ):
        axes.plot(level.bandwidth / 1e9, level.latency * 1e6, "o", color=ORANGE, ms=5)
        x, y = level.bandwidth / 1e9, level.latency * 1e6
        axes.annotate(
            f"{name}: ×{ratio(level.latency, level.bandwidth):.0f}", (x, y),
            xytext=(-6 if name == "NVLink 4" else 6, -11 if name == "xGMI" else 4),
            textcoords="offset points", color="white", fontsize=9,
            ha="right" if name == "NVLink 4" else "left",
        )  # fmt: skip
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth, GB/s",
        ylabel="latency, µs",
        title=f"How many times slower than a butterfly a ring is ({p} H100s, {context:,} keys)",
    )
    bar = figure.colorbar(filled, ax=axes, ticks=[1, 2, 3, 4])
    bar.ax.set_yticklabels(["×10", "×100", "×1000", "×10⁴"])
    return figure


@styled
def prefill_crossing(p: int = 128, context: int = 1_048_576):
    """Time by the number of new queries: a ring that overlaps, against merging their states."""
    figure, (left, right) = new_figure(8.0, 3.5, ncols=2, sharey=True)
    queries = 2 ** np.arange(0, 21)
    for axes, kv_heads in ((left, 16), (right, 2)):
        block = [Workload(context, queries=int(n), kv_heads=kv_heads) for n in queries]
        for name, strategy, overlap, colour in (
            ("ring, overlapping", "ring", True, ORANGE),
            ("butterfly", "butterfly", False, BLUE),
            ("tree by hierarchical Allreduce", "hierarchical-allreduce", False, GREEN),
        ):
            seconds = [decode_cost(strategy, w, p, DGX, overlap=overlap).seconds for w in block]
            axes.loglog(queries, seconds, color=colour, label=name)
            if strategy == "ring":
                ring = np.array(seconds)
            else:
                _mark_crossings(axes, queries, ring, np.array(seconds), below=colour == GREEN)
        attend = [decode_cost("butterfly", w, p, DGX).compute_seconds for w in block]
        axes.loglog(queries, attend, color=GREY, lw=0.9, ls=":", label="attending alone")
        axes.set(xlabel="new queries", title=f"{kv_heads} key heads for 16 query heads")
    left.set_ylabel("seconds")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8.5)
    figure.suptitle(
        f"Decoding is the tree's, prefill the ring's: {context:,} keys on {p} H100s",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    return figure


def _mark_crossings(axes, x, first, second, below=False):
    """A dot where two lines of a log-log plot cross, and where on the x-axis that is."""
    x, gap = np.log(x), np.log(first) - np.log(second)
    for i in np.nonzero(np.sign(gap[:-1]) * np.sign(gap[1:]) < 0)[0]:
        part = gap[i] / (gap[i] - gap[i + 1])
        at = np.exp(x[i] + part * (x[i + 1] - x[i]))
        y = np.exp(np.log(first[i]) + part * (np.log(first[i + 1]) - np.log(first[i])))
        axes.plot(at, y, "o", color=INK, ms=4, zorder=5)
        text = f"{at:.2g}" if at < 100 else f"{float(f'{at:.2g}'):,.0f}"
        axes.annotate(
            text,
            (at, y),
            xytext=(5, -12) if below else (-4, 5),
            textcoords="offset points",
            ha="left" if below else "right",
            fontsize=8.5,
        )


LIMIT_COLOURS = {
    "memory bandwidth": BLUE,
    "latency": ORANGE,
    "link bandwidth": RED,
    "arithmetic": GREEN,
    "memory": PALE,
}

# The published shape of Llama 3.1 8B's attention.
LLAMA_8B = Workload(1, heads=32, kv_heads=8, head_dim=128, layers=32)


@styled
def scaling():
    """Time of a token's attention from a million to a billion keys, on 8 to 4,096 devices."""
    figure, axes = new_figure(7.4, 4.2)
    devices = 2 ** np.arange(3, 13)
    for context in (10**6, 10**7, 10**8, 10**9):
        w = replace(LLAMA_8B, context=context)
        costs = [decode_cost("butterfly", w, int(p), DGX) for p in devices]
        seconds = np.array([c.seconds for c in costs])
        fits = np.array([c.limit != "memory" for c in costs])
        axes.loglog(devices, seconds, color=PALE, lw=3, zorder=1)
        for name, colour in LIMIT_COLOURS.items():
            chosen = np.array([c.limit == name for c in costs])
            face = "white" if name == "memory" else colour
            edge = GREY if name == "memory" else colour
            axes.scatter(devices[chosen], seconds[chosen], color=face, edgecolors=edge, zorder=3)
        best = int(np.argmin(np.where(fits, seconds, np.inf)))
        if best < len(devices) - 1:  # more devices make it slower
            axes.scatter(
                devices[best], seconds[best], s=110, facecolors="none", edgecolors=INK, zorder=4
            )
        axes.annotate(
            f"{context / 1e6:,.0f}M keys", (devices[0], seconds[0]), xytext=(-8, 0),
            textcoords="offset points", ha="right", va="center", fontsize=9,
        )  # fmt: skip
    for name in ("memory bandwidth", "latency"):
        axes.scatter([], [], color=LIMIT_COLOURS[name], label=f"limited by {name}")
    axes.scatter([], [], color="white", edgecolors=GREY, label="the cache does not fit")
    axes.scatter(
        [], [], s=90, facecolors="none", edgecolors=INK, label="where more devices stop helping"
    )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="devices (H100, eight to a node)",
        ylabel="s a token: attention of Llama 3.1 8B",
        title="More devices help until a doubling saves less reading than its round costs",
        xlim=(2.6, 5200),
    )
    axes.set_xticks(devices, [str(p) for p in devices])
    axes.minorticks_off()
    axes.legend(fontsize=8.5)
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
    "cost-fastest-merge": fastest_merge,
    "cost-launch": launch_crossing,
    "cost-sensitivity": latency_or_bandwidth,
    "cost-prefill": prefill_crossing,
    "cost-scaling": scaling,
    "cost-grouped-queries": grouped_queries,
}
