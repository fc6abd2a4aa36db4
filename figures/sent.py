"""The bytes and the time of decoding, by method: a figure of the benchmarks' page."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from figures.canvas import styled
from figures.measured import measured
from figures.style import new_figure

# The three methods to compare: the tree, the ring, and the cache brought to the query.
SHOWN = ("tree, allreduce", "ring", "gather the cache")


def bytes_text(count: float) -> str:
    """Three digits and a decimal unit: 655360000 -> "655 MB"."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
    name, size = next((unit for unit in units if count >= 0.9995 * unit[1]), units[-1])
    return f"{float(f'{count / size:.3g}'):g} {name}"


@styled
def decode_ratios(rows: Sequence[Mapping] | None = None) -> Figure:
    """Time, bytes and memory by method and number of devices: rows of benchmarks/decode.py.

    rows: those of a checkout's benchmarks/results when None; ValueError where there are none.
    """
    rows = measured("decode") if rows is None else rows
    keys = max(row["keys"] for row in rows)
    rows = [row for row in rows if row["keys"] == keys and row["name"] in SHOWN]
    names, devices = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "p"))
    figure, panels = new_figure(7.0, 5.6, nrows=3, sharex=True)
    step = 0.9 / len(names)
    titles = "time, × tree by Allreduce", "bytes that a device sends", "bytes that a device holds"
    for ax, title, key in zip(panels, titles, ("ms", "sent", "held"), strict=True):
        for i, name in enumerate(names):
            mine = {row["p"]: row[key] for row in rows if row["name"] == name}
            if key == "ms":
                tree = {row["p"]: row["ms"] for row in rows if row["name"] == names[0]}
                mine = {p: ms and ms / tree[p] for p, ms in mine.items()}
            x = [devices.index(p) + (i - len(names) / 2 + 0.5) * step for p in mine]
            look = {"label": name}
            bars = ax.bar(x, [value or 0 for value in mine.values()], 0.9 * step, **look)
            ratio = [f"{v:.1f}" if v else "" for v in mine.values()]
            labels = ratio if key == "ms" else [bytes_text(v) for v in mine.values()]
            ax.bar_label(bars, labels, fontsize=7, padding=1, rotation=90)
        ax.set(yscale="linear" if key == "held" else "log")
        ax.set_ylabel(title, fontsize=8.5)
        low, high = ax.get_ylim()
        room = 1.4 * high if key == "held" else high * (high / low) ** 0.3  # for the labels
        ax.set_ylim(low, room)
        for at, value in zip(x, mine.values(), strict=True):
            if value is None:
                ax.text(at, 1.1 * low, "too large", fontsize=7, rotation=90, ha="center")
        ax.yaxis.set_major_formatter(
            lambda y, _, key=key: f"{y:g}" if key == "ms" else bytes_text(y)
        )
        ax.yaxis.set_minor_formatter("")
    panels[-1].set_xticks(range(len(devices)), [f"{p} devices" for p in devices])
    panels[0].set_title(f"One query over {keys // 1024}k keys, simulated devices on shared cores")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure.describe(
        f"Three rows of bars for {', '.join(map(str, devices))} devices, a bar for each way to "
        "decode: time relative to the tree by Allreduce, bytes that a device sends, bytes that it "
        "holds; each bar has its number. The ring is the slowest and sends by far the most."
    )


FIGURES = {"decode_ratios": decode_ratios}
