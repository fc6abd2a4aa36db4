"""What decoding sends, holds and takes, by method: figures of notebook 05 and the README."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from figures.canvas import styled
from figures.measured import measured
from figures.style import BLUE, GREEN, ORANGE, PURPLE, RED, new_figure
from labs.cost.report import bytes_text

STYLES = {  # a method's colour and marker
    "allreduce": (BLUE, "o"),
    "butterfly": (GREEN, "^"),
    "gather": (PURPLE, "v"),
    "pass-Q": (ORANGE, "D"),
    "ring": (RED, "s"),
}


@styled
def sent_by_context(sent: Mapping[str, Mapping[int, int]] | None = None) -> Figure:
    """Bytes that a device sends for one decode step, by the length of the context.

    sent: method -> {context: bytes}, as `treeattn.program` reads them from the programs; those
          of benchmarks/decode.py for eight devices when None, from a checkout.

    Raises ValueError without either.
    """
    sent = _sent(8) if sent is None else sent
    figure, ax = new_figure(7.0, 3.4)
    for method, by_context in sent.items():
        contexts = list(by_context)
        values = list(by_context.values())
        color, marker = STYLES[method]
        ax.plot(contexts, values, marker=marker, color=color, ms=6)
        ax.annotate(
            f"{method}  {bytes_text(values[-1])}",
            (contexts[-1], values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
    ax.set(xscale="log", yscale="log", xlabel="keys in the cache", ylabel="bytes sent by a device")
    ax.set_xlim(right=max(contexts) * 8)
    ax.set_xticks(contexts, [f"{n // 1024}k" for n in contexts])
    ax.minorticks_off()
    ax.set_title("A tree's messages do not grow with the context; a ring's do")
    ends = (f"{name} {bytes_text(list(row.values())[-1])}" for name, row in sent.items())
    return figure.describe(
        "Bytes that a device sends against the keys in the cache, both axes logarithmic. The "
        f"ring's line rises in proportion, the others are level. At the right: {', '.join(ends)}."
    )


def _sent(p: int) -> dict[str, dict[int, int]]:
    sent = {}
    for row in measured("decode"):
        method = row["name"].removeprefix("tree, ")
        if row["p"] == p and method in ("allreduce", "pass-Q", "ring"):
            sent.setdefault(method, {})[row["keys"]] = row["sent"]
    return sent


@styled
def decode_ratios(rows: Sequence[Mapping] | None = None) -> Figure:
    """Time, bytes and memory by method and number of devices: rows of benchmarks/decode.py.

    rows: those of a checkout's benchmarks/results when None; ValueError where there are none.
    """
    rows = measured("decode") if rows is None else rows
    keys = max(row["keys"] for row in rows)
    rows = [row for row in rows if row["keys"] == keys]
    names, devices = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "p"))
    figure, panels = new_figure(8.0, 6.8, nrows=3, sharex=True)
    step = 0.9 / len(names)
    titles = "time, × tree by Allreduce", "bytes that a device sends", "bytes that a device holds"
    for ax, title, key in zip(panels, titles, ("ms", "sent", "held"), strict=True):
        for i, name in enumerate(names):
            mine = {row["p"]: row[key] for row in rows if row["name"] == name}
            if key == "ms":
                tree = {row["p"]: row["ms"] for row in rows if row["name"] == names[0]}
                mine = {p: ms and ms / tree[p] for p, ms in mine.items()}
            x = [devices.index(p) + (i - len(names) / 2 + 0.5) * step for p in mine]
            look = {"label": name, "hatch": "///" if i >= 6 else None}  # there are six colours
            bars = ax.bar(x, [value or 0 for value in mine.values()], 0.9 * step, **look)
            ratio = [f"{v:.1f}" if v else "" for v in mine.values()]
            labels = ratio if key == "ms" else [bytes_text(v) for v in mine.values()]
            ax.bar_label(bars, labels, fontsize=7, padding=1, rotation=90)
        ax.set(yscale="linear" if key == "held" else "log", ylabel=title)
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


FIGURES = {
    "sent_by_context": sent_by_context,
    "decode_ratios": decode_ratios,
}
