"""Figures of notebook 06b: how to shard a cache, and where that stops helping."""

from dataclasses import replace

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap

from treeattn.cost.formulas import Workload
from treeattn.cost.merges import MERGES, SCATTERING, merge_seconds
from treeattn.cost.prefill import prefill_seconds
from treeattn.cost.sharding import MODELS, Model, advise
from treeattn.cost.topology import CORNERS
from treeattn.figures.canvas import styled
from treeattn.figures.cost import DGX
from treeattn.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    new_figure,
)

LLAMA_8B = MODELS["llama-3.1-8b"]


@styled
def merges():
    """Microseconds to merge a layer's states: every way, on 8 and on 64 devices, with ranges."""
    figure, panels = new_figure(8.4, 3.8, ncols=2, sharey=True)
    w = Workload(640_000)
    names = [m for m in MERGES if m != "tree-joined"][::-1]
    for axes, p in zip(panels, (8, 64), strict=True):
        for y, merge in enumerate(names):
            times = {n: merge_seconds(merge, w, p, c(DGX)) * 1e6 for n, c in CORNERS.items()}
            low = min(times.values())
            high = max(times.values())
            marker = "s" if merge in SCATTERING else "o"
            colour = ORANGE if merge in SCATTERING else BLUE
            axes.plot([low, high], [y, y], color=colour, lw=3, alpha=0.35)
            axes.plot(times["NCCL 2.28"], y, marker, color=colour, ms=5)
        axes.set(xscale="log", xlabel="µs a layer", title=f"{p} H100s")
        axes.set_xticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
        axes.minorticks_off()
    panels[0].set_yticks(range(len(names)), names)
    figure.suptitle(
        "Merging one token's states: launches count, bytes do not (squares: heads end scattered)",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Microseconds of ten ways to merge a layer's states on 8 and on 64 H100s, on a logarithmic
        axis; a point by NCCL 2.28's constants in a bar over all choices. Three Allreduces, the
        tree, take longest by nearly all of them; a single kernel or an all-to-all take a tenth of
        it. The bars are factors of two to four wide and overlap between neighbours."""
    )


FAMILIES = {
    "heads": BLUE,
    "heads + sequence": GREEN,
    "sequence": ORANGE,
    "batch + heads": SKY,
    "batch + sequence": PURPLE,
    "batch + heads + sequence": PALE,
    "batch": RED,
}
LETTERS = dict(zip(FAMILIES, ("H", "HS", "S", "BH", "BS", "BHS", "B"), strict=True))


def best_family(model: Model, batch: int, context: int, p: int) -> tuple[str | None, bool]:
    """(the family of the fastest plan, None where nothing fits; whether all constants agree)."""
    best = {
        name: advise(model, batch, context, p, corner(DGX))[0] for name, corner in CORNERS.items()
    }
    usual = best["NCCL 2.28"]
    families = {step.plan.family for step in best.values()}
    return usual.plan.family if usual.fits else None, len(families) == 1


@styled
def decision_map():
    """Which family of plans is fastest, by keys and devices; dots where the constants decide."""
    figure, panels = new_figure(8.6, 6.0, nrows=2, ncols=2, sharex=True, sharey=True)
    contexts = [10**4 * 4**k for k in range(6)]
    devices = [2**k for k in range(1, 8)]
    norm = BoundaryNorm(np.arange(len(FAMILIES) + 2) - 0.5, len(FAMILIES) + 1)
    colours = ListedColormap([*FAMILIES.values(), "white"])
    cases = [
        (model, batch) for model in (LLAMA_8B, replace(LLAMA_8B, kv_heads=1)) for batch in (1, 32)
    ]
    for axes, (model, batch) in zip(panels.ravel(), cases, strict=True):
        grid = np.full((len(devices), len(contexts)), len(FAMILIES))
        for i, p in enumerate(devices):
            for j, context in enumerate(contexts):
                family, sure = best_family(model, batch, context, p)
                if family is None:
                    continue
                grid[i, j] = list(FAMILIES).index(family)
                text = LETTERS[family] + ("" if sure else " ?")
                axes.text(j, i, text, ha="center", va="center", fontsize=8, color=INK)
        axes.imshow(grid, cmap=colours, norm=norm, aspect="auto", origin="lower", alpha=0.45)
        heads = f"{model.kv_heads} key head{'s' if model.kv_heads > 1 else ''}"
        axes.set_title(f"{heads}, batch {batch}", fontsize=10)
        axes.set_xticks(range(len(contexts)), [_thousands(n) for n in contexts])
        axes.set_yticks(range(len(devices)), devices)
    for axes in panels[1]:
        axes.set_xlabel("keys of a sequence")
    for axes in panels[:, 0]:
        axes.set_ylabel("H100s, eight to a node")
    figure.suptitle(
        "Llama 3.1 8B: split the (B)atch, the (H)eads, the (S)equence? White: it does not fit",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Four maps of keys by devices, for 8 key heads and one, batches of 1 and 32. With 8 key
        heads, up to 8 devices the heads are split; beyond, heads and sequence, for long caches; for
        short ones the batch as well. With one key head the sequence is split almost everywhere.
        Question marks, where the choice of constants decides, lie along the borders."""
    )


def _thousands(n: int) -> str:
    return f"{n / 1e6:.3g}M" if n >= 10**6 else f"{n // 1000}k"


PARTS = ("weights", "attend", "merge", "projections", "launches")


@styled
def steps(context: int = 10**6, p: int = 16):
    """Where a token's time goes, by the best plan of each family."""
    figure, axes = new_figure(7.2, 2.9)
    best = {}
    for step in advise(LLAMA_8B, 1, context, p, DGX):
        best.setdefault((step.plan.family, step.plan.split_weights), step)
    papers = next(
        s
        for s in advise(LLAMA_8B, 1, context, p, DGX, merges=("tree",))
        if not s.plan.split_weights
    )
    shown = [*best.values(), papers][:5]
    colours = (GREY, BLUE, ORANGE, GREEN, PALE)
    for y, step in enumerate(reversed(shown)):
        left = 0.0
        for name, colour, hatch in zip(PARTS, colours, ("", "", "//", "..", ""), strict=True):
            width = 1e3 * getattr(step, name)
            axes.barh(
                y,
                width,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                height=0.7,
                label=name if y == 0 else None,
            )
            left += width
        axes.annotate(
            f"{left:.1f}",
            (left, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(shown)), [str(s.plan) for s in reversed(shown)], fontsize=8.5)
    axes.set(xlabel=f"ms a token: Llama 3.1 8B, {_thousands(context)} keys, {p} H100s")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5)
    return figure.describe(
        """Bars of a token's milliseconds by plan, divided into reading weights, attending, merging,
        the projections' Allreduces and launches. Splitting heads and sequence takes 5.4 ms, the
        heads alone 7.6, for they read each key on two devices, and the papers' tree with all
        weights on every device more than 9, half of which is reading weights."""
    )


@styled
def prefill(context: int = 2**20):
    """Time of a layer by the number of new tokens, on 8 and on 128 devices, with a causal mask."""
    figure, panels = new_figure(8.4, 3.6, ncols=2, sharey=True)
    new = 2 ** np.arange(0, 21, 2)
    for axes, p in zip(panels, (8, 128), strict=True):
        for name, colour, style in (
            ("ring", ORANGE, "o-"),
            ("kv-gather", GREEN, "^-."),
            ("ulysses", PURPLE, "v:"),
            ("tree", BLUE, "s--"),
        ):
            if name == "ulysses" and p > 32:
                continue
            blocks = [Workload(context, heads=32, kv_heads=8, queries=int(n)) for n in new]
            seconds = [prefill_seconds(name, w, p, DGX)[0] for w in blocks]
            axes.loglog(new, seconds, style, color=colour, ms=4, label=name)
        axes.set(xlabel="new tokens", title=f"{p} H100s")
    panels[0].set_ylabel("seconds a layer")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(
        "A million keys, 32 heads on 8 key heads: few new tokens send states, many send keys",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Seconds of a layer against the number of new tokens, logarithmic, for a ring, an
        all-gather of keys, Ulysses and a tree, on 8 and on 128 devices. The tree is fastest by one
        to three orders for few tokens; with all million new, all meet at the arithmetic, but the
        flat ring on 128 devices, which leaves each node by one network card."""
    )


@styled
def scaling():
    """Time of a token from a million to a hundred million keys, on 8 to 512 devices."""
    figure, axes = new_figure(7.2, 3.9)
    devices = [2**k for k in range(3, 10)]
    for context, colour, style in (
        (10**6, BLUE, "o-"),
        (10**7, ORANGE, "s--"),
        (10**8, GREEN, "^-."),
    ):
        best = [advise(LLAMA_8B, 1, context, p, DGX)[0] for p in devices]
        shown = [(p, 1e3 * s.seconds) for p, s in zip(devices, best, strict=True) if s.fits]
        axes.loglog(
            *zip(*shown, strict=True), style, color=colour, label=f"{_thousands(context)} keys"
        )
    floor = [1e3 * advise(LLAMA_8B, 1, 1000, p, DGX)[0].seconds for p in devices]
    axes.loglog(devices, floor, ":", color=GREY, label="1,000 keys: weights, launches, Allreduces")
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, devices)
    axes.set_yticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axes.minorticks_off()
    axes.set(
        xlabel="devices (H100, eight to a node)",
        ylabel="ms a token, by the best plan",
        title="Llama 3.1 8B: more devices help until the Allreduces cost what they save",
    )
    axes.legend(fontsize=8.5)
    return figure.describe(
        """Milliseconds of a token by the best plan against the number of devices, for a million,
        ten million and a hundred million keys, and for a thousand. The longer the cache, the
        further the curve falls; each ends near the dotted one of a thousand keys, which rises once
        the devices fill more than one node."""
    )


FIGURES = {
    "shard_merges": merges,
    "shard_map": decision_map,
    "shard_steps": steps,
    "shard_prefill": prefill,
    "shard_scaling": scaling,
}
