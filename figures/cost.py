"""Figures of notebook 06: links, rounds, and the papers' figures and tables re-derived."""

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, new_figure
from labs.cost.formulas import Workload, mem_ring, mem_tree, numel_kv
from labs.cost.network import collective_seconds, run_rounds
from labs.cost.papers import (
    FIGURE_4_GAP_BYTES,
    H100_8B,
    MI300X_8B,
    RTX4090_1B,
    TABLE_1_H100,
    TABLE_1_MI300X,
    TABLE_2_RTX4090,
    fit_machine,
    script_seconds,
)
from labs.cost.placement import every_nth
from labs.cost.roofline import attend_seconds
from labs.cost.schedules import schedule
from labs.cost.strategies import decode_cost
from labs.cost.topology import CORNERS, H100, preset

DGX = preset("dgx-h100")
PAPERS_BLOCK = Workload(640_000)  # 2024 §6.3: 16 heads of 128, bfloat16


@styled
def links():
    """Time of one message by its size, over each link: 2024 Figure 2, from data sheets."""
    figure, axes = new_figure(7.0, 3.7)
    size = np.logspace(3, 10, 200)
    for name, level, colour, dashes in (
        ("NVLink 4", DGX.levels[0], BLUE, "-"),
        ("xGMI (MI300X)", preset("mi300x").levels[0], GREEN, "--"),
        ("InfiniBand NDR", DGX.levels[1], ORANGE, "-"),
        ("PCIe 4.0 x16", preset("rtx4090").levels[0], PURPLE, "-."),
        ("100 GbE", preset("ethernet").levels[1], RED, ":"),
    ):
        label = f"{name}: {level.latency * 1e6:g} µs, {level.bandwidth / 1e9:g} GB/s"
        seconds = level.latency + size / level.bandwidth
        axes.loglog(size, seconds, dashes, color=colour, label=label)
    chunk = PAPERS_BLOCK.dtype_bytes * numel_kv(PAPERS_BLOCK, 8)
    attend = attend_seconds(PAPERS_BLOCK, 80_000, 1, H100)
    notes = ((chunk, "80,000 keys\nand values", -4, "right"), (8320, "a state", 4, "left"))
    for x, text, dx, ha in notes:
        axes.axvline(x, color=GREY, lw=0.8, ls=":")
        axes.annotate(
            text,
            (x, 1.2),
            xytext=(dx, 0),
            textcoords="offset points",
            ha=ha,
            va="top",
            color=GREY,
            fontsize=8.5,
        )
    axes.plot(chunk, attend, "o", color=INK, ms=5)
    axes.annotate(
        "attending\nto them:\n196 µs",
        (chunk, attend),
        xytext=(7, 2),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
    )
    axes.set(
        xlabel="bytes of the message",
        ylabel="seconds",
        title="A chunk of the cache waits for bandwidth, a state only for latency",
        ylim=(2e-7, 2),
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.12, 0.93), labelspacing=0.25)
    return figure.describe(
        """Seconds of one message against its bytes, both logarithmic, for five links. Each curve is
        flat up to some ten kilobytes and then rises in proportion. A state of 8 kB lies on the flat
        part; 655 MB of keys and values on the rising one, where each link takes longer than the
        196 microseconds of attending to them."""
    )


@styled
def rounds(p: int = 16, message_bytes: int = 8320):
    """Who sends to whom, and when, on two nodes of eight: lines from start to arrival."""
    kinds = (
        ("ring-allreduce", "ring"),
        ("tree-allreduce", "tree"),
        ("hierarchical-allreduce", "tree"),
        ("butterfly", "ring"),
    )
    figure, panels = new_figure(8.6, 3.3, ncols=4, sharey=True)
    for axes, (kind, algorithm) in zip(panels, kinds, strict=True):
        topology = DGX.by_protocol(algorithm, p)[0]
        end = 0.0
        count = 0
        sent_rounds = list(schedule(kind, p, message_bytes, 8))
        for sent, start, arrival in run_rounds(sent_rounds, p, topology):
            far = topology.level_of(sent.source, sent.target) == 1
            for colour, chosen, dashes in ((BLUE, ~far, "-"), (ORANGE, far, "--")):
                axes.plot(
                    np.stack([start[chosen], arrival[chosen]]) * 1e6,
                    np.stack([sent.source[chosen], sent.target[chosen]]),
                    dashes,
                    color=colour,
                    lw=0.9,
                )
            end = max(end, arrival.max())
            count = count + 1
        axes.set_title(f"{kind}:\n{count} rounds, {end * 1e6:.1f} µs", fontsize=9.5)
        axes.axhline(7.5, color=GREY, lw=0.7, ls=":")
        axes.set_xlabel("µs after the launch")
    panels[0].set_yticks([0, 4, 7, 8, 12, 15])
    panels[0].set_ylabel("device (node 0 below the line)")
    figure.suptitle(
        "One state of 8 kB over two nodes; what crosses between them is dashed",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Four panels, time to the right and 16 devices upwards; each message is a line from its
        sender and start to its receiver and arrival. The ring's Allreduce is a band of 30 rounds
        that winds around; the tree goes up a chain in each node, across once each way, and down;
        the hierarchical Allreduce has three short rounds in each node, one across and three back;
        the butterfly has four rounds, the last across."""
    )


@styled
def referee(observed: list[dict]):
    """The model's times of collectives over measured ones: a line for each table, a dot a row."""
    figure, axes = new_figure(7.0, 4.6)
    names = []
    for y, table in enumerate(reversed(observed)):
        network = DGX if table["per_node"] > 1 else every_nth(DGX, DGX.node_size)
        sizes, seen = np.array(table["rows"]).T
        times = [
            [
                collective_seconds(table["kind"], table["devices"], size, corner(network))
                for size in sizes
            ]
            for corner in CORNERS.values()
        ]
        ratios = 1e6 * np.array(times) / seen
        axes.plot([ratios.min(), ratios.max()], [y, y], color=BLUE, lw=3, alpha=0.25)
        model = ratios[list(CORNERS).index("NCCL 2.28")]
        for chosen, face in ((sizes <= 65_536, BLUE), (sizes > 65_536, "white")):
            axes.plot(model[chosen], [y] * chosen.sum(), "o", color=BLUE, mfc=face, ms=5)
        names.append(f"{table['machine']}: {table['how']}")
    axes.axvline(1, color=INK, lw=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.25, 0.5, 1, 2], ["0.1", "¼", "½", "1", "2"])
    axes.minorticks_off()
    axes.set(
        xlabel="model over measured (hollow: above 64 KiB; bars: all constants)",
        title="In a node about right for few bytes; between nodes half, or less",
    )
    return figure.describe(
        """The model's time over the measured one for 86 rows of sixteen public tables. In one
        node of Hopper GPUs those of up to 64 KiB lie between three quarters and 1.2, but for one;
        SGLang's kernels above it fall to a third. Between nodes the ratios are about a half and
        come nearer to one with many bytes; on three nodes that are known to be slow they fall to
        a tenth. Bars show the range over the choices of constants."""
    )


@styled
def memory_gap():
    """The 2024 text's Figure 4: peak memory of one block on each of two devices, ring and tree."""
    figure, panels = new_figure(7.2, 3.2, ncols=2, sharey=True)
    contexts = np.arange(1, 9) * 16_000
    for axes, hidden in zip(panels, (2048, 4096), strict=True):
        block = [Workload(int(n), heads=hidden // 128) for n in contexts]
        ring, tree = ([2 * f(w, 2) / 1e6 for w in block] for f in (mem_ring, mem_tree))
        axes.plot(contexts / 1e3, ring, "o-", color=ORANGE, ms=4, label="ring")
        axes.plot(contexts / 1e3, tree, "s--", color=BLUE, ms=4, label="tree")
        axes.annotate(
            "",
            (128, ring[-1]),
            (128, tree[-1]),
            arrowprops={"arrowstyle": "<->", "color": INK},
        )
        axes.annotate(
            f"{ring[-1] - tree[-1]:.1f} MB\nprinted: {FIGURE_4_GAP_BYTES[hidden] / 1e6:.0f}",
            (128, (ring[-1] + tree[-1]) / 2),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
        )
        axes.set(xlabel="thousand keys, half on each device", title=f"hidden size {hidden}")
    panels[0].set_ylim(0, 2300)
    panels[0].set_ylabel("MB on a device")
    panels[0].legend(fontsize=9, loc="upper left")
    return figure.describe(
        """Peak megabytes of a block on each of two devices against the keys in the cache, for
        hidden sizes 2048 and 4096. Ring and tree are straight lines; the ring's is twice as steep.
        At 128,000 keys they are 524.3 and 1048.6 MB apart, where 524 and 1040 are printed."""
    )


@styled
def figure_3():
    """2024 Figure 3(a) in its own units: each method's time over the ring's at 80,000 keys."""
    figure, panels = new_figure(8.4, 3.4, ncols=3, sharey=True)
    contexts = [80_000 * 2**k for k in range(7)]
    for axes, p in zip(panels, (8, 64, 128), strict=True):
        unit = decode_cost("ring", Workload(contexts[0]), p, DGX).seconds
        for strategy, colour, style in (("ring", ORANGE, "o-"), ("tree", BLUE, "s--")):
            times = [decode_cost(strategy, Workload(n), p, DGX).seconds for n in contexts]
            axes.loglog(contexts, np.array(times) / unit, style, color=colour, ms=4)
            axes.annotate(
                f"{strategy}: ×{times[-1] / times[0]:.3g}",
                (contexts[-1], times[-1] / unit),
                xytext=(-3, 7),
                textcoords="offset points",
                ha="right",
                color=colour,
                fontsize=9,
            )
        axes.set(xlabel="keys in the cache", title=f"{p} GPUs")
    panels[0].set_ylabel("time over the ring's at 80,000 keys")
    figure.suptitle(
        "Calculated: the ring's time grows with the context, the tree's the less, the more GPUs",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        """Three panels, for 8, 64 and 128 GPUs: calculated times of ring and tree over the ring's
        at 80,000 keys, against the keys from 80,000 to 5.12 million, logarithmic. The ring's rises
        about 60-fold in all three. The tree's lies far below it, and rises less with more GPUs, but
        is flat nowhere."""
    )


TABLES = (
    ("8 × H100", TABLE_1_H100, H100_8B, 3, True),
    ("4 × MI300X", TABLE_1_MI300X, MI300X_8B, 4, False),
    ("2 × RTX 4090", TABLE_2_RTX4090, RTX4090_1B, 4, False),
)


@styled
def tables():
    """2025 Tables 1 and 2: both columns as printed, and as the authors' script would take."""
    figure, panels = new_figure(8.6, 3.6, ncols=3)
    for axes, (name, rows, setting, fitted, step) in zip(panels, TABLES, strict=True):
        machine = fit_machine(rows[:fitted], setting, ring_step=step)
        contexts = np.geomspace(rows[0].context, rows[-1].context, 40)
        found = np.array([script_seconds(setting, int(n), machine) for n in contexts])
        for i, (colour, marker, dashes) in enumerate(((BLUE, "s", "--"), (ORANGE, "o", "-"))):
            mean, error = zip(*[(row.tree, row.ring)[i] for row in rows], strict=True)
            label = ("tree", "ring")[i]
            axes.errorbar(
                [r.context for r in rows],
                mean,
                error,
                fmt=marker,
                color=colour,
                ms=5,
                capsize=2,
                label=f"{label}, printed",
            )
            axes.loglog(contexts, found[:, i], dashes, color=colour, lw=1, label=f"{label}, model")
        text = f"{machine.bandwidth / 1e9:.3g} GB/s, {machine.utilisation:.0%},\n"
        text += f"{machine.overhead * 1e3:.1f} ms a layer"
        text += f", ring {machine.ring_step * 1e3:.0f} more" if step else ""
        axes.set_title(f"{name}\n{text}", fontsize=9)
        axes.set_xticks([r.context for r in rows], [f"{r.context // 1000}k" for r in rows])
        axes.minorticks_off()
        axes.set_xlabel("prompt's tokens")
    panels[0].set_ylabel("seconds: prefill and ten tokens")
    panels[0].legend(fontsize=7.5, loc="upper left")
    return figure.describe(
        """Printed seconds of tree and ring against the prompt's length on three machines, with the
        model's curves. On the 4090s and the MI300X all points lie on or near the curves. On the
        H100s the first three do; at 256,000 tokens both printed times lie far below them."""
    )


FIGURES = {
    "cost_links": links,
    "cost_rounds": rounds,
    "cost_memory": memory_gap,
    "cost_figure_3": figure_3,
    "cost_tables": tables,
}
