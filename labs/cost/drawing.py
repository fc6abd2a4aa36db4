"""The notebook's figures: where a step's time goes, the referee, the merges, and the map."""

import functools
import itertools

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, SKY, Figure, new_figure
from labs.cost.advice import advise, best_of_each
from labs.cost.merges import MERGES, SCATTERING, merge_messages
from labs.cost.models import MODELS, Model
from labs.cost.network import collective_seconds
from labs.cost.observed import DGX, observed_collectives
from labs.cost.steps import CORNERS, REPAIRED, Plan, Rates, Step, sent_seconds, step_cost
from labs.cost.topology import every_nth
from labs.cost.workload import Workload

LLAMA_8B = MODELS["llama-3.1-8b"]
PARTS = {
    "weights": (GREY, ""),
    "attend": (BLUE, ""),
    "merge": (ORANGE, "//"),
    "sums": (GREEN, ".."),
    "kernels": (PALE, ""),
}


@styled
def steps() -> Figure:
    """Where a token's time goes, by the best plan of each kind that fits."""
    figure, axes = new_figure(7.6, 3.1)
    shown = [x for x in best_of_each(advise(LLAMA_8B, 1, 10**6, 16, DGX)) if x.fits][:7]
    said = []
    for y, step in enumerate(reversed(shown)):
        left = 0.0
        for name, (colour, hatch) in PARTS.items():
            width = 1e3 * getattr(step, name)
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "height": 0.7}
            axes.barh(y, width, left=left, label=name if y == 0 else None, **look)
            left += width
        axes.text(left, y, f" {left:.1f}", va="center", fontsize=9)
        said.append(f"{step.plan} {left:.1f}")
    names = [f"{x.plan} ({x.plan.devices})" for x in reversed(shown)]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set(xlabel="ms a token: Llama 3.1 8B, 1M keys, 16 H100s")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5)
    return figure.describe(
        "Bars of a token's milliseconds by plan, divided into reading weights, attending, merging, "
        f"the sums of tensor parallelism and kernels: {'; '.join(reversed(said))}."
    )


@styled
def referee() -> Figure:
    """The model's times of collectives over measured ones: a line for each table, a dot a row."""
    figure, axes = new_figure(7.0, 4.6)
    names = []
    for y, table in enumerate(reversed(observed_collectives())):
        network = DGX if table["per_node"] > 1 else every_nth(DGX, DGX.node_size)
        sizes, seen = np.array(table["rows"]).T
        times = [collective_seconds(table["kind"], table["devices"], x, network) for x in sizes]
        ratios = 1e6 * np.array(times) / seen
        for chosen, face in ((sizes <= 65_536, BLUE), (sizes > 65_536, "white")):
            axes.plot(ratios[chosen], [y] * chosen.sum(), "o", color=BLUE, mfc=face, ms=5)
        names.append(f"{table['machine']}: {table['how']}")
    axes.axvline(1, color=INK, lw=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.25, 0.5, 1, 2], ["0.1", "¼", "½", "1", "2"])
    axes.minorticks_off()
    axes.set(
        xlabel="model over measured (hollow: above 64 KiB)",
        title="In a node about right for few bytes; between nodes half, or less",
    )
    return figure.describe(
        """The model's time over the measured one for 86 rows of sixteen public tables. In one
        node of Hopper GPUs those of up to 64 KiB lie between three quarters and 1.2, but for one;
        SGLang's kernels above it fall to a third. Between nodes the ratios are about a half and
        come nearer to one with many bytes; on three nodes that are known to be slow they fall to
        a tenth."""
    )


@styled
def merges() -> Figure:
    """Microseconds of every way to merge a layer's states, for few bytes and many, with ranges."""
    figure, panels = new_figure(9.6, 3.4, ncols=3, sharey=True)
    one = Workload(1)
    latent = Workload(1, batch=32, heads=128, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    names = [m for m in MERGES if m != "tree"][::-1]  # three Allreduces, which XLA joins
    cases = (
        (one, 8, "one token, 8 H100s"),
        (one, 64, "one token, 64 H100s"),
        (latent, 8, "32 of DeepSeek-V3, 8 H100s"),
    )
    for axes, (w, p, title) in zip(panels, cases, strict=True):
        for y, merge in enumerate(names):
            if merge == "one-shot" and p > DGX.node_size:
                continue
            messages = merge_messages(merge, w, p, node_size=DGX.node_size)
            free = [r._replace(exchange=0.0) for r in CORNERS.values()]
            times = [1e6 * sent_seconds(messages, p, DGX, rates) for rates in free]
            scattered = merge in SCATTERING
            colour = ORANGE if scattered else BLUE
            axes.plot([min(times), max(times)], [y, y], color=colour, lw=3, alpha=0.35)
            axes.plot(times[0], y, "s" if scattered else "o", color=colour, ms=5)
        axes.set(xscale="log", xlabel="µs a layer")
        axes.set_title(title, fontsize=10)
        axes.set_xticks([5, 10, 20, 50, 100, 200, 400], "5 10 20 50 100 200 400".split())
        axes.minorticks_off()
    panels[0].set_yticks(range(len(names)), names)
    return figure.describe(
        """Microseconds of eight ways to merge a layer's states, on a log axis: of one token on 8
        and on 64 H100s, and of 32 tokens of DeepSeek-V3 on 8; a point by the repaired constants in
        a bar over the others. For one token a single kernel, a gather or an all-to-all take least.
        With 32 tokens, 128 heads and outputs of 512, kernels and gathers take longest, and what
        scatters states in 16 bits least."""
    )


COLOURS = {
    "H": BLUE,
    "HS": GREEN,
    "S": ORANGE,
    "BH": SKY,
    "BS": PURPLE,
    "BHS": PALE,
    "B": RED,
}
DTYPES = {"deepseek-v3": {"weight_dtype": "float8"}}  # as it was published


def letters(plan: Plan) -> str:
    """The axes a plan splits: (B)atch, (L)ayers, (H)eads, (S)equence."""
    return "".join(word[0].upper() for word in plan.family.split(" + ") if word != "one device")


@functools.cache
def _best(model: Model, batch: int, context: int, p: int, rates: Rates) -> Step:
    """The fastest step on p devices, or on half of them, a quarter, …"""
    dtypes = DTYPES.get(model.name, {})
    steps = advise(model, batch, context, p, DGX, rates, exactly=True, **dtypes)[:1]
    fewer = [_best(model, batch, context, p // 2, rates)] if p > 1 else []
    return min(fewer + steps, key=lambda step: (not step.fits, round(step.seconds, 6)))


def best_plan(model: Model, batch: int, context: int, p: int) -> tuple[Plan | None, bool]:
    """(the fastest plan, or None if no plan fits; whether no corner has one a tenth faster)."""
    usual = _best(model, batch, context, p, REPAIRED)
    if not usual.fits:
        return None, True
    dtypes = DTYPES.get(model.name, {})
    sure = True
    for rates in CORNERS.values():
        same = step_cost(model, usual.plan, batch, context, DGX, rates, **dtypes)
        sure = sure and same.seconds <= 1.1 * _best(model, batch, context, p, rates).seconds
    return usual.plan, sure


@styled
def decision_map() -> Figure:
    """The fastest plan's split, by keys and devices, with question marks where constants decide."""
    figure, panels = new_figure(9.2, 5.6, nrows=2, ncols=2, sharex=True, sharey=True)
    contexts = [10**4 * 4**k for k in range(6)]
    devices = [2**k for k in range(2, 7)]
    cases = itertools.product((LLAMA_8B, MODELS["deepseek-v3"]), (1, 32))
    for axes, (model, batch) in zip(panels.ravel(), cases, strict=True):
        for i, p in enumerate(devices):
            for j, context in enumerate(contexts):
                _field(axes, j, i, *best_plan(model, batch, context, p), p)
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
    title = "Split the (B)atch, the (L)ayers, the (H)eads, the (S)equence? White: it does not fit"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure.describe(
        """Four maps of keys by devices, for Llama 3.1 8B and DeepSeek-V3, batches of 1 and 32. For
        one sequence of Llama the heads are split up to 8 devices; on more, caches of up to 160,000
        keys stay on 8, longer ones split the sequence between nodes as well. With 32 sequences the
        batch is split between nodes. DeepSeek-V3 fits from 16 devices on: a pipeline of two nodes,
        in each the sequence or, for the shortest caches, the heads."""
    )


def _field(axes, x: int, y: int, plan: Plan | None, sure: bool, p: int) -> None:
    """One field of the map: the plan's split, on how many of p devices."""
    split = letters(plan) if plan else ""
    colour = to_rgba(COLOURS.get(split, GREY), 0.45 if split else 0.0)
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=colour, lw=0))
    if plan:
        text = split + (f" on {plan.devices}" if plan.devices < p else "")
        axes.text(x, y, text + ("" if sure else " ?"), ha="center", va="center", fontsize=8)


def _thousands(n: int) -> str:
    return f"{n / 1e6:.3g}M" if n >= 10**6 else f"{n // 1000}k"
