"""The notebook's figures: time against context, and a second of bytes on the links."""

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, Figure, new_figure

COLOURS = {"ring": BLUE, "tree": ORANGE, "butterfly": GREEN}


@styled
def time_against_context(rows: list[dict], forecasts: list[float], fitted: list[bool]) -> Figure:
    """Points are measured; full points were used to fit the model. Lines are the model."""
    figure, ax = new_figure(7.0, 4.0)
    for method, colour in COLOURS.items():
        here = [i for i, row in enumerate(rows) if row["method"] == method]
        keys, seconds = ([rows[i][what] for i in here] for what in ("keys", "seconds"))
        between = np.geomspace(min(keys), max(keys))
        line = np.interp(between, keys, [forecasts[i] for i in here])  # linear in the keys
        ax.plot(between, line, color=colour, lw=1.5)
        ax.text(1.1 * keys[-1], line[-1], method, color=colour, va="center")
        fills = [colour if fitted[i] else "white" for i in here]
        ax.scatter(keys, seconds, c=fills, edgecolors=colour, zorder=3)
        if method == "ring":
            ax.plot(between, line / 8, color=GREY, ls="--", lw=1)
            ax.text(1.1 * keys[-1], line[-1] / 8, "ring ÷ 8", color=GREY, va="top")
    ax.set(xscale="log", yscale="log", xlabel="keys of the whole context", ylabel="seconds")
    ax.set_xlim(right=3.2 * keys[-1])
    ax.set_xticks(keys, [f"{n:,}" for n in keys])
    ax.minorticks_off()
    said = [f"{x['method']}, {x['keys']:,} keys: {x['seconds']:.3g} s" for x in rows]
    return figure.describe(
        f"""Seconds of a decode against the keys of the context, both logarithmic. The ring's line
        rises with the context and crosses the tree's, which is flat; the butterfly's is flat and
        lies far below. A dashed line is an eighth of the ring's. Measured: {"; ".join(said)}."""
    )


@styled
def second_of_bytes(rows: list[dict]) -> Figure:
    """A drawing of the network for each row. A link is as wide as the bytes of a second."""
    figure, axes = new_figure(9.6, 3.2, ncols=len(rows))
    said = []
    for ax, row in zip(axes, rows, strict=True):
        rates = {link: sent / row["seconds"] for link, sent in row["bytes"].items()}
        _draw_network(ax, row, rates)
        busy = 8 * rates["r0"] / row["intra"], 8 * rates["up0"] / row["inter"]
        said.append("{}: links busy for {:.1%} inside, {:.1%} between".format(row["method"], *busy))
        ax.set_title(said[-1].replace(": ", "\n"), fontsize=9)
    return figure.describe(
        f"""Two nodes of four devices, and a switch between the nodes, for three methods. The links
        are as wide as the bytes that they carry in a second. {"; ".join(said)}."""
    )


def _draw_network(ax, row: dict, rates: dict[str, float]) -> None:
    per_node = row["p"] // row["nodes"]
    centre = (row["p"] - 1) / 2
    for rank in range(row["p"]):
        x = rank // per_node * per_node + (per_node - 1) / 2
        uplink = rates[f"up{rank // per_node}"] / 1e6
        if rank % per_node == 0:
            ax.plot([x, centre], [1, 2], color=RED, lw=0.5 + uplink)
            ax.text(1.4 * x - 0.4 * centre, 1.55, f"{uplink:.2g} MB/s", ha="center", color=RED)
        ax.plot([rank, x], [0, 1], color=INK, lw=0.5 + rates[f"r{rank}"] / 1e6)
        ax.text(rank, -0.1, str(rank), ha="center", va="center", bbox={"color": PALE})
    ax.axis("off")
