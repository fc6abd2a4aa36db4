"""Figures of notebook 06b: how to shard a cache, and where that stops helping."""

import functools
import itertools

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from labs.cost.advice import advise
from labs.cost.formulas import Workload
from labs.cost.merges import MERGES, SCATTERING, merge_seconds
from labs.cost.models import MODELS, Model
from labs.cost.prefill import prefill_seconds
from labs.cost.sharding import Plan, Step, step_cost
from labs.cost.topology import CORNERS, Topology
from figures.canvas import styled
from figures.cost import DGX
from figures.style import (
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
    """Microseconds to merge a layer's states: every way, for little and for much, with ranges."""
    figure, panels = new_figure(9.6, 3.8, ncols=3, sharey=True)
    one = Workload(640_000)
    latent = Workload(1, batch=32, heads=128, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    names = [m for m in MERGES if m != "tree"][::-1]  # three Allreduces, which XLA joins
    for axes, (w, p, title) in zip(
        panels,
        (
            (one, 8, "one token, 8 H100s"),
            (one, 64, "one token, 64 H100s"),
            (latent, 8, "32 of DeepSeek-V3, 8 H100s"),
        ),
        strict=True,
    ):
        for y, merge in enumerate(names):
            if merge == "one-shot" and p > DGX.node_size:
                continue
            times = {n: merge_seconds(merge, w, p, c(DGX)) * 1e6 for n, c in CORNERS.items()}
            low = min(times.values())
            high = max(times.values())
            marker = "s" if merge in SCATTERING else "o"
            colour = ORANGE if merge in SCATTERING else BLUE
            axes.plot([low, high], [y, y], color=colour, lw=3, alpha=0.35)
            axes.plot(times["NCCL 2.28"], y, marker, color=colour, ms=5)
        axes.set(xscale="log", xlabel="µs a layer")
        axes.set_title(title, fontsize=10)
        axes.set_xticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
        axes.minorticks_off()
    panels[0].set_yticks(range(len(names)), names)
    figure.suptitle(
        "Merging states: one token's launches count; 32 of DeepSeek-V3, their bytes "
        "(squares: heads end scattered)",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Microseconds of eleven ways to merge a layer's states, on a log axis: of one token
        on 8 and on 64 H100s, and of 32 tokens of DeepSeek-V3 on 8; a point by NCCL 2.28's constants
        in a bar over all choices. For one token a single kernel, a gather or an all-to-all take
        least. With 32 tokens, 128 heads and outputs of 512, kernels and gathers take longest, and
        what scatters states in 16 bits least."""
    )


COLOURS = {
    "H": BLUE,
    "HS": GREEN,
    "S": ORANGE,
    "BH": SKY,
    "BS": PURPLE,
    "BHS": PALE,
    "B": RED,
    "": "white",
}
# Of all merges one of these is the fastest, or within a hundredth of it.
FASTEST = ("butterfly", "gather", "one-shot", "hierarchical", "a2a", "helix")
DTYPES = {"deepseek-v3": {"weight_dtype": "float8"}}  # as it was published


def letters(plan: Plan) -> str:
    """What a plan splits: (B)atch, (L)ayers, (H)eads, (S)equence."""
    shares = (("B", plan.batch), ("L", plan.stages), ("H", plan.heads), ("S", plan.sequence))
    return "".join(letter for letter, n in shares if n > 1)


@functools.cache
def best_on(model: Model, batch: int, context: int, p: int, there: Topology) -> Step:
    """The fastest step on exactly p devices."""
    dtypes = DTYPES.get(model.name, {})
    return advise(model, batch, context, p, there, FASTEST, exactly=True, **dtypes)[0]


def best_up_to(model: Model, batch: int, context: int, p: int, there: Topology) -> Step:
    """The fastest step on p devices, or on half of them, a quarter, …"""
    numbers = [1 << k for k in range(p.bit_length())]
    steps = [best_on(model, batch, context, n, there) for n in numbers]
    return min(steps, key=lambda step: (not step.fits, step.seconds))


def best_plan(model: Model, batch: int, context: int, p: int) -> tuple[Plan | None, bool]:
    """(the fastest plan, None where nothing fits; whether no corner has one a tenth faster)."""
    usual = best_up_to(model, batch, context, p, DGX)
    if not usual.fits:
        return None, True
    dtypes = DTYPES.get(model.name, {})
    sure = True
    for corner in CORNERS.values():
        there = corner(DGX)
        best = best_up_to(model, batch, context, p, there).seconds
        same = step_cost(model, usual.plan, batch, context, there, **dtypes).seconds
        sure = sure and same <= 1.1 * best
    return usual.plan, sure


@styled
def decision_map():
    """What the fastest plan splits, by keys and devices; question marks where constants decide."""
    figure, panels = new_figure(9.2, 6.4, nrows=2, ncols=2, sharex=True, sharey=True)
    contexts = [10**4 * 4**k for k in range(6)]
    devices = [2**k for k in range(2, 8)]
    for axes, (model, batch) in zip(
        panels.ravel(), itertools.product((LLAMA_8B, MODELS["deepseek-v3"]), (1, 32)), strict=True
    ):
        for i, p in enumerate(devices):
            for j, context in enumerate(contexts):
                plan, sure = best_plan(model, batch, context, p)
                split = letters(plan) if plan else ""
                colour = to_rgba(COLOURS.get(split, GREY), 0.45 if split else 0.0)
                axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=colour, lw=0))
                if plan:
                    text = split + (f" on {plan.devices}" if plan.devices < p else "")
                    text += "" if sure else " ?"
                    axes.text(j, i, text, ha="center", va="center", fontsize=8, color=INK)
        axes.set(xlim=(-0.5, len(contexts) - 0.5), ylim=(-0.5, len(devices) - 0.5))
        name = {"llama-3.1-8b": "Llama 3.1 8B", "deepseek-v3": "DeepSeek-V3, 8-bit weights"}
        heads = f"{model.kv_heads} key heads" if model.kv_heads > 1 else "one latent"
        axes.set_title(f"{name[model.name]} ({heads}), batch {batch}", fontsize=10)
        axes.set_xticks(range(len(contexts)), [_thousands(n) for n in contexts])
        axes.set_yticks(range(len(devices)), devices)
    for axes in panels[1]:
        axes.set_xlabel("keys of a sequence")
    for axes in panels[:, 0]:
        axes.set_ylabel("H100s there are, eight to a node")
    figure.suptitle(
        "Split the (B)atch, the (L)ayers, the (H)eads, the (S)equence? White: it does not fit",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Four maps of keys by devices, for Llama 3.1 8B and DeepSeek-V3, batches of 1 and 32. For
        one sequence of Llama the heads are split up to 8 devices; on more, short caches stay on 8,
        long ones split the sequence between nodes as well. With 32 sequences the batch is split
        between nodes. DeepSeek-V3 fits from 16 devices on: a pipeline of two nodes, in each the
        heads for short caches, the sequence for long ones."""
    )


def _thousands(n: int) -> str:
    return f"{n / 1e6:.3g}M" if n >= 10**6 else f"{n // 1000}k"


PARTS = ("weights", "attend", "merge", "projections", "launches")


@styled
def steps(context: int = 10**6, p: int = 16):
    """Where a token's time goes, by the best plan of each kind."""
    figure, axes = new_figure(7.2, 2.9)
    best = advise(LLAMA_8B, 1, context, p, DGX)
    kinds = (
        lambda x: x.copies > 1 and x.heads > 1,
        lambda x: x.copies == 1 and x.family == "heads + sequence",
        lambda x: x.family == "heads" and x.devices == p // 2,
        lambda x: x.family == "heads" and x.devices == p,
        lambda x: not x.split_weights and x.merge == "tree-joined" and x.devices == p,
    )
    shown = [next(s for s in best if kind(s.plan)) for kind in kinds]
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
    axes.set_yticks(range(len(shown)), [_name(s.plan) for s in reversed(shown)], fontsize=8.5)
    axes.set(xlabel=f"ms a token: Llama 3.1 8B, {_thousands(context)} keys, {p} H100s")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5)
    return figure.describe(
        """Bars of a token's milliseconds by plan, divided into reading weights, attending, merging,
        the projections' Allreduces and launches. Heads in each node with the sequence across takes
        4.5 ms; with weights over both nodes 5.4, for Allreduces cross; 8 heads on one node 6.6, on
        both 7.6; the papers' tree with all weights on every device more than 9, half of which is
        reading weights."""
    )


def _name(plan: Plan) -> str:
    """A plan with its devices."""
    where = str(plan).replace("weights 2 times", "weights in each node")
    return f"{where} ({plan.devices})"


@styled
def prefill(context: int = 2**20):
    """Time of a layer by the number of new tokens, on 8 and on 128 devices, with a causal mask."""
    figure, panels = new_figure(8.4, 3.6, ncols=2, sharey=True)
    new = 2 ** np.arange(0, 21, 2)
    for axes, p in zip(panels, (8, 128), strict=True):
        for name, colour, style in (
            ("ring", ORANGE, "o-"),
            ("ring-in-order", RED, "x:"),
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
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle(
        "A million keys, 32 heads on 8 key heads: few new tokens send states, many send keys",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Seconds of a layer against the number of new tokens, logarithmic, for a ring over dealt
        and one over contiguous tokens, an all-gather of keys, Ulysses and a tree, on 8 and on 128
        devices. The tree is fastest by one to three orders for few tokens; with all million new,
        all meet at the arithmetic, but the ring over contiguous tokens, which takes nearly twice
        as long, and both rings on 128 devices, which leave each node by one network card."""
    )


@styled
def scaling():
    """Time of a token on 8 to 256 devices: weights split in each node, or over all of them."""
    figure, axes = new_figure(7.2, 3.9)
    devices = [2**k for k in range(3, 9)]
    for context, colour in ((10**6, BLUE), (10**7, ORANGE)):
        within = []
        over = []
        for p in devices:
            found = advise(LLAMA_8B, 1, context, p, DGX, FASTEST, exactly=True)
            found = [s for s in found if s.fits and s.plan.stages == 1]
            within += [(p, 1e3 * s.seconds) for s in found if s.plan.weights_over <= 8][:1]
            over += [(p, 1e3 * s.seconds) for s in found if s.plan.weights_over == p][:1]
        label = f"{_thousands(context)} keys"
        axes.loglog(*zip(*within, strict=True), "o-", color=colour, label=f"{label}, in each node")
        axes.loglog(*zip(*over, strict=True), "s--", color=colour, label=f"{label}, over all")
    floor = 1e3 * best_on(LLAMA_8B, 1, 1000, 8, DGX).seconds
    axes.axhline(floor, ls=":", color=GREY, label="1,000 keys on one node")
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, devices)
    axes.set_yticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axes.minorticks_off()
    axes.set(
        xlabel="devices (H100, eight to a node)",
        ylabel="ms a token",
        title="Llama 3.1 8B: where the weights are split decides what more nodes are worth",
    )
    axes.legend(fontsize=8.5)
    return figure.describe(
        """Milliseconds of a token against the number of devices, for a million and ten million
        keys, with the weights split in each node and over all devices; on 8 that is the same. With
        weights in each node a million keys get faster up to 128 devices, ten million all the way;
        with weights over all, a million keys get slower again beyond 32 devices."""
    )


FIGURES = {
    "shard_merges": merges,
    "shard_map": decision_map,
    "shard_steps": steps,
    "shard_prefill": prefill,
    "shard_scaling": scaling,
}
