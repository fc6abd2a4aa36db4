"""How many nodes of a prefix tree are free, by context, batch and devices: figures of notebook
09."""

import numpy as np
from matplotlib.figure import Figure

from labs.cost import MODELS, cache_fits, preset, verify_seconds
from labs.cost.topology import Topology
from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, new_figure

CONTEXTS = tuple(2**k for k in range(9, 21))
BATCHES = {1: (BLUE, "o"), 8: (ORANGE, "^"), 32: (GREEN, "D"), 128: (PURPLE, "v")}
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MORE = 0.1  # of a step's time is still called free


def nodes_free(
    batch: int, context: int, topology: Topology, p: int, model: str = "llama-3.1-8b"
) -> float:
    """Tokens of each text for at most 1 + MORE times the time of one, between steps of SIZES.

    As `labs.cost.free_tokens`, which looks at every number of tokens and takes longer.
    """
    first = verify_seconds(MODELS[model], 1, batch, context, topology, p=p)
    before = 1, first
    for n in SIZES[1:]:
        seconds = verify_seconds(MODELS[model], n, batch, context, topology, p=p)
        if seconds > (1 + MORE) * first:
            share = ((1 + MORE) * first - before[1]) / (seconds - before[1])
            return before[0] + share * (n - before[0])
        before = n, seconds
    return SIZES[-1]


@styled
def free_nodes(devices: tuple[int, ...] = (1, 8), topology: str = "dgx-h100") -> Figure:
    """The nodes of each text that are free, by context: a panel for each number of devices.

    A line for each batch, drawn thick as far as the devices hold its caches.
    """
    where = preset(topology)
    model = MODELS["llama-3.1-8b"]
    peak = where.device.flops / where.device.memory_bandwidth * model.kv_heads / model.heads
    figure, axes = new_figure(8.4, 3.9, ncols=len(devices), sharey=True)
    for ax, p in zip(np.atleast_1d(axes), devices, strict=True):
        for batch, (color, marker) in BATCHES.items():
            y = np.array([nodes_free(batch, n, where, p) for n in CONTEXTS])
            fits = [cache_fits(model, batch, n, where.device, p=p) for n in CONTEXTS]
            held = sum(fits)
            lower = -5 if p > 1 and batch == 128 else 0  # two lines begin close together
            ax.plot(CONTEXTS, y, color=color, lw=0.9, ls=":")
            ax.plot(CONTEXTS[:held], y[:held], marker=marker, color=color, ms=5, lw=2)
            ax.annotate(
                f"{batch} texts" if batch > 1 else "1 text",
                (CONTEXTS[0], y[0]),
                (-6, lower),
                textcoords="offset points",
                ha="right",
                va="center",
                color=color,
                fontsize=9,
            )
        ax.axhline(peak, color=GREY, lw=0.8)
        ax.axhline(16, color=GREY, lw=0.8, ls=":")
        ax.set(xscale="log", yscale="log", xlabel="tokens of context", xlim=(75, 2**20 * 1.3))
        ax.set_title("one H100" if p == 1 else f"{p} H100s, joined by NVLink")
        ax.set_xticks([2**9, 2**13, 2**17, 2**20], ["512", "8k", "128k", "1M"])
        ax.set_yticks([1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64, 128, 256])
        ax.minorticks_off()
    first = np.atleast_1d(axes)[0]
    first.set_ylabel("nodes a text for 10 % more time")
    first.text(85, peak * 1.07, f"attention's own: {peak:.0f}", color=INK, fontsize=8.5)
    figure.suptitle(
        "The context makes the tree free; sending makes it dearer (Llama-3.1-8B, bfloat16)",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        "Nodes of each text that a step verifies in at most a tenth more time than one, by tokens "
        "of context, both axes logarithmic; a line for 1, 8, 32 and 128 texts. On one H100 the "
        "lines begin far apart, at 1 to 300 nodes, and come together near 74 at a million tokens. "
        "On eight they begin lower and come together there, too. Thick lines end where memory does."
    )


FIGURES = {"free_nodes": free_nodes}
