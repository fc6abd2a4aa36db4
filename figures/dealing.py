"""How a tree's nodes are dealt over devices, and what each then has to compute: notebook 11."""

import numpy as np
from matplotlib.figure import Figure

from treeattn.devices.dealing import DEALINGS, blocks_by_device, deal_tree
from figures.canvas import styled
from figures.style import BLUE, GREEN, INK, ORANGE, new_figure

COLORS = dict(zip(DEALINGS, (ORANGE, BLUE, GREEN), strict=True))


@styled
def draw_work(ends=None, devices: int = 8) -> Figure:
    """The blocks of scores that each device computes, of a tree dealt in three ways.

    ends: (n,) where each node's subtree ends, in depth-first order; of a prompt of 8,192 tokens and
          sixteen answers of 512 when None
    """
    ends = _prompt_and_answers(8192, 16, 512) if ends is None else np.asarray(ends)
    figure, panels = new_figure(8.0, 3.1, ncols=len(DEALINGS), sharey=True)
    said = []
    for ax, dealing in zip(panels, DEALINGS, strict=True):
        nodes = deal_tree(ends, devices, dealing=dealing)
        work = blocks_by_device(ends, nodes, devices).sum(axis=1)
        mean = work.mean()
        most = int(work.max())
        bars = ax.bar(range(devices), work, 0.8, color=COLORS[dealing])
        on_bars = INK if dealing == "contiguous" else "white"
        ax.bar_label(bars, fontsize=8, label_type="center", color=on_bars)
        ax.axhline(mean, color=INK, lw=1, ls="--")
        ax.set_title(f"{dealing}: most is {most / mean:.2f} × mean", fontsize=10)
        ax.set(xlabel="device", xticks=range(devices))
        said.append(f"{dealing}: {', '.join(map(str, work))}")
    panels[0].set_ylabel("blocks of scores")
    return figure.describe(
        f"Three panels of bars, one for each of {devices} devices: the blocks of scores that it "
        f"computes for a tree of {len(ends):,} nodes, with a dashed line at the mean of "
        f"{mean:.1f}. {'; '.join(said)}."
    )


def _prompt_and_answers(prompt: int, answers: int, length: int):
    """Ends of a tree that is a prompt, and after it its answers."""
    nodes = np.arange(prompt + answers * length)
    ends = prompt + ((nodes - prompt) // length + 1) * length
    ends[:prompt] = len(nodes)
    return ends


FIGURES = {"dealing_work": draw_work}
