"""Figures of notebook 06: what is fastest where, and where it stops helping."""

from dataclasses import replace

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from treeattn.cost.formulas import Workload
from treeattn.cost.network import merge_seconds
from treeattn.cost.strategies import decode_cost
from treeattn.cost.topology import H100, Level, Topology, preset
from treeattn.figures.canvas import styled
from treeattn.figures.cost import DGX, LLAMA_8B
from treeattn.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, new_figure

MERGE_COLOURS = {
    "gather": GREEN,
    "butterfly": BLUE,
    "tree-allreduce": SKY,
    "hierarchical-allreduce": ORANGE,
    "ring-allreduce": RED,
}


@styled
def fastest_merge():
    """Which way of merging states is fastest, by the devices and the bytes of a state."""
    figure, (left, right) = new_figure(8.4, 3.7, ncols=2, sharey=True)
    sizes, devices = np.logspace(3, 9, 61), 2 ** np.arange(1, 13)
    kinds = list(MERGE_COLOURS)
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
        _regions(axes, sizes, devices, best, [MERGE_COLOURS[k] for k in kinds])
        axes.set_title(topology.name, fontsize=10)
        axes.set_xlabel("bytes of a state")
        axes.axvline(8320, color=INK, lw=0.8, ls=":")
    left.set_ylabel("devices")
    left.annotate("papers' block", (8320, 2), xytext=(3, 4), textcoords="offset points", fontsize=8)
    _colour_legend(figure, MERGE_COLOURS)
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


FIGURES = {
    "cost-fastest-merge": fastest_merge,
    "cost-launch": launch_crossing,
    "cost-sensitivity": latency_or_bandwidth,
    "cost-prefill": prefill_crossing,
    "cost-scaling": scaling,
}
