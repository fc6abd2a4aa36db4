"""Figures of tree decoding: who swaps with whom, and how much the devices send."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from treeattn.cost.report import bytes_text
from treeattn.figures.measured import measured
from treeattn.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, new_figure

COLOURS = {
    "allreduce": BLUE,
    "butterfly": GREEN,
    "gather": PURPLE,
    "pass-Q": ORANGE,
    "ring": RED,
}


def butterfly_pairs(p: int) -> list[tuple[str, list[tuple[int, int]]]]:
    """The rounds of `merge_across(method="butterfly")`: (what happens, pairs (from, to))."""
    core = 1 << (p.bit_length() - 1)
    folds = [(core + i, i) for i in range(p - core)]
    rounds = [("hand in", folds)] if folds else []
    for k in range(core.bit_length() - 1):
        rounds.append((f"swap over {1 << k}", [(i, i ^ (1 << k)) for i in range(core)]))
    return rounds + ([("hand back", [(b, a) for a, b in folds])] if folds else [])


def butterfly(sizes: Sequence[int] = (8, 6)) -> Figure:
    """Who sends its state to whom, round by round, and how many shards each state then holds."""
    figure, axes = new_figure(8.4, 3.4, ncols=len(sizes), squeeze=False)
    for ax, p in zip(axes[0], sizes, strict=True):
        holds = [1] * p
        rounds = butterfly_pairs(p)
        for step, (what, pairs) in enumerate(rounds):
            before = list(holds)
            for a, b in pairs:
                ax.annotate(
                    "",
                    (b, step + 0.86),
                    (a, step + 0.14),
                    arrowprops={"arrowstyle": "-|>", "color": BLUE, "lw": 1.1, "alpha": 0.8},
                )
                holds[b] = before[a] if what == "hand back" else holds[b] + before[a]
            for i in range(p):
                ax.plot([i, i], [step + 0.14, step + 0.86], color=PALE, lw=1, zorder=0)
            ax.text(p - 0.35, step + 0.5, what, va="center", color=GREY, fontsize=9)
            _row(ax, step, before, p)
        _row(ax, len(rounds), holds, p)
        ax.set(xlim=(-0.6, p + 1.1), ylim=(len(rounds) + 0.4, -0.4), xlabel="device")
        ax.set(xticks=range(p), yticks=range(len(rounds) + 1), ylabel="after round")
        ax.set_title(f"{p} devices: {len(rounds)} rounds")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    return figure


def _row(ax, y: int, holds: Sequence[int], p: int) -> None:
    """A circle a device, with the number of shards its state covers; full ones filled."""
    for i, n in enumerate(holds):
        full = n == p
        ax.plot(i, y, "o", ms=15, mfc=GREEN if full else "white", mec=GREEN if full else INK)
        ax.text(i, y, str(n), ha="center", va="center", fontsize=9, color="white" if full else INK)


def sent_by_context(sent: Mapping[str, Mapping[int, int]] | None = None) -> Figure:
    """Bytes that a device sends for one decode step, by the length of the context.

    sent: method -> {context: bytes}, as `treeattn.cost.program` reads them from the programs; those
          of benchmarks/decode.py for eight devices when None, from a checkout.

    Raises ValueError without either.
    """
    sent = _sent(8) if sent is None else sent
    figure, ax = new_figure(7.0, 3.4)
    for method, by_context in sent.items():
        contexts, values = list(by_context), list(by_context.values())
        ax.plot(contexts, values, "o-", color=COLOURS[method], ms=4)
        ax.annotate(
            f"{method}  {bytes_text(values[-1])}",
            (contexts[-1], values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[method],
        )
    ax.set(xscale="log", yscale="log", xlabel="keys in the cache", ylabel="bytes sent by a device")
    ax.set_xlim(right=max(contexts) * 8)
    ax.set_xticks(contexts, [f"{n // 1024}k" for n in contexts])
    ax.minorticks_off()
    ax.set_title("A tree's messages do not grow with the context; a ring's do")
    return figure


def _sent(p: int) -> dict[str, dict[int, int]]:
    sent = {}
    for row in measured("decode"):
        method = row["name"].removeprefix("tree, ")
        if row["p"] == p and method in ("allreduce", "pass-Q", "ring"):
            sent.setdefault(method, {})[row["keys"]] = row["sent"]
    return sent


def decode_ratios(rows: Sequence[Mapping] | None = None) -> Figure:
    """Time, bytes and memory by method and number of devices: rows of benchmarks/decode.py.

    rows: those of a checkout's benchmarks/results when None; ValueError where there are none.
    """
    rows = measured("decode") if rows is None else rows
    keys = max(row["keys"] for row in rows)
    rows = [row for row in rows if row["keys"] == keys]
    names, devices = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "p"))
    figure, panels = new_figure(7.0, 6.4, nrows=3, sharex=True)
    titles = "time, × tree by Allreduce", "bytes that a device sends", "bytes that a device holds"
    for ax, title, key in zip(panels, titles, ("ms", "sent", "held"), strict=True):
        for i, name in enumerate(names):
            mine = {row["p"]: row[key] for row in rows if row["name"] == name}
            if key == "ms":
                tree = {row["p"]: row["ms"] for row in rows if row["name"] == names[0]}
                mine = {p: ms and ms / tree[p] for p, ms in mine.items()}
            x = [devices.index(p) + (i - len(names) / 2 + 0.5) * 0.14 for p in mine]
            bars = ax.bar(x, [value or 0 for value in mine.values()], 0.13, label=name)
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
    return figure


def tree_of_trees(nodes: int = 2, devices: int = 4) -> Figure:
    """A merge inside each node, then one between the nodes, over the slow links."""
    figure, ax = new_figure(7.0, 2.6)
    for node in range(nodes):
        left = node * (devices + 1)
        ax.axvspan(left - 0.45, left + devices - 0.55, color=PALE, lw=0, alpha=0.6)
        ax.text(left + (devices - 1) / 2, -0.62, f"node {node}", ha="center", color=GREY)
        middle = left + (devices - 1) / 2
        for i in range(devices):
            ax.plot([left + i, middle], [0, 1], color=BLUE, lw=1.4)
            ax.plot(left + i, 0, "s", ms=13, color=BLUE)
        ax.plot(middle, 1, "o", ms=11, color=BLUE)
        ax.plot([middle, ((nodes - 1) * (devices + 1) + devices - 1) / 2], [1, 2], color=RED, lw=2)
    ax.plot(((nodes - 1) * (devices + 1) + devices - 1) / 2, 2, "o", ms=13, color=RED)
    ax.text(-0.75, 0.5, "within a node\n(fast links)", ha="right", va="center", color=BLUE)
    ax.text(-0.75, 1.5, "between nodes\n(slow links)", ha="right", va="center", color=RED)
    ax.set(xlim=(-3.4, nodes * (devices + 1) - 0.8), ylim=(-0.9, 2.35))
    ax.set_title("A tree of trees: merge inside each node, then between the nodes")
    ax.axis("off")
    return figure


FIGURES = {
    "butterfly": butterfly,
    "tree_of_trees": tree_of_trees,
    "sent_by_context": sent_by_context,
    "decode_ratios": decode_ratios,
}
