"""Figures of notebook 09: what speculation was measured to save."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from treeattn.figures.canvas import styled
from treeattn.figures.measured import measured
from treeattn.figures.roofline import STYLES
from treeattn.figures.style import BLUE, GREY, INK, ORANGE, new_figure

KINDS = ("chat", "code", "editing", "structured")


def _kinds(rows) -> list[str]:
    return [kind for kind in KINDS if any(r["kind"] == kind for r in rows)]


def _results(results: Mapping | None) -> Mapping:
    return measured("speculative") if results is None else results


@styled
def tokens_a_step(results: Mapping | None = None) -> Figure:
    """New tokens for each call of the model over all steps, by kind of text and draft.

    results: what benchmarks/speculative.py wrote; a checkout's when None, ValueError if none.
    """
    rows = _results(results)["counts"]
    drafts = list(dict.fromkeys(r["draft"] for r in rows))
    kinds = _kinds(rows)
    figure, axes = new_figure(8.4, 0.9 + 0.33 * len(drafts), ncols=len(kinds), sharey=True)
    for ax, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        most = max(r["tokens_a_step"] for r in rows if r["kind"] == kind)
        for i, draft in enumerate(drafts):
            mine = [r["tokens_a_step"] for r in rows if (r["kind"], r["draft"]) == (kind, draft)]
            mean = float(np.mean(mine))
            ax.barh(
                i,
                mean,
                color=BLUE if "chain" not in draft and draft != "ngram" else ORANGE,
                height=0.62,
                hatch=None if "chain" not in draft and draft != "ngram" else "//",
                edgecolor="white",
            )
            ax.plot(mine, [i] * len(mine), "o", color=INK, ms=2.5)
            ax.text(max(mine) * 1.04 + 0.03 * most, i, f"{mean:.2f}", va="center", fontsize=8.5)
        ax.axvline(1, color=GREY, lw=1)
        ax.set(xlim=(0, 1.4 * most + 0.3), title=kind)
        ax.invert_yaxis() if ax is np.atleast_1d(axes)[0] else None
    np.atleast_1d(axes)[0].set_yticks(range(len(drafts)), drafts, fontsize=9)
    figure.supxlabel(
        "tokens a step, over all steps: mean (bar) and prompts (dots); chains hatched", fontsize=9.5
    )
    return figure.describe(
        f"Bars of new tokens a step for {len(drafts)} drafts, a panel for each kind of text: "
        f"{', '.join(kinds)}. Dots are single prompts, numbers the means. Bars are longest where "
        "texts repeat themselves, and barely above 1 for the draft from the model's own layers."
    )


@styled
def acceptance_by_depth(results: Mapping | None = None, least: int = 20) -> Figure:
    """Of the steps with a candidate of d tokens, the share in which d were accepted.

    results: as for `tokens_a_step`; least: depths that fewer steps reached are left out.
    """
    rows = _results(results)["counts"]
    figure, ax = new_figure(7.6, 3.9)
    for draft, (color, marker) in zip(
        dict.fromkeys(r["draft"] for r in rows), STYLES, strict=False
    ):
        counts = [r["by_depth"] for r in rows if r["draft"] == draft]
        deepest = max(map(len, counts))
        reached, taken = np.array(
            [[sum(c[d][j] for c in counts if len(c) > d) for d in range(deepest)] for j in (0, 1)]
        )
        kept = reached >= least
        ax.plot(
            np.arange(1, deepest + 1)[kept],
            (taken / np.maximum(reached, 1))[kept],
            marker=marker,
            color=color,
            ms=5,
            lw=1.4,
            label=draft,
        )
    ax.set(xlabel="depth d of a candidate", ylabel="accepted to that depth", ylim=(0, 1))
    ax.set_title("How far candidates carry")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure.describe(
        "For each draft, the share of candidates of d tokens that were accepted to depth d. The "
        "lines fall over the first five; after that, those of drafts that look up in the text stay "
        "between a tenth and a third; token recycling starts highest and falls to zero."
    )


@styled
def speedups(results: Mapping | None = None) -> Figure:
    """Plain decoding's time over the default draft's, prompt by prompt, least to most.

    results: as for `tokens_a_step`.
    """
    rows = sorted(_results(results)["times"], key=lambda r: (r["kind"], -r["speedup"]))
    figure, ax = new_figure(7.6, 0.9 + 0.25 * len(rows))
    ends = {}
    for i, row in enumerate(rows):
        color, marker = STYLES[2 * KINDS.index(row["kind"])]
        ax.plot(row["spread"], [i, i], color=color, lw=2)
        ax.plot(row["speedup"], i, marker, color=color, ms=7)
        ax.text(
            row["spread"][1] * 1.03,
            i,
            f"{row['tokens_a_step']:.1f} a step",
            va="center",
            fontsize=8,
            color=INK,
        )
        ends[row["kind"]] = i
    ax.axvline(1, color=INK, lw=1)
    for end in list(ends.values())[:-1]:
        ax.axhline(end + 0.5, color=GREY, lw=0.6, ls=":")
    ax.set_yticks(range(len(rows)), [f"{r['kind']}: {r['name']}" for r in rows], fontsize=8.5)
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="times plain decoding's speed, after prefill")
    ticks = [
        t for t in (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8) if t < 1.4 * max(r["speedup"] for r in rows)
    ]
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_xlim(
        min(0.7, *(r["spread"][0] for r in rows)) * 0.95, 1.35 * max(r["spread"][1] for r in rows)
    )
    ax.set_title("Guessing pays where texts repeat themselves")
    return figure.describe(
        f"A dot and a range for each of {len(rows)} prompts: how many times faster than plain "
        f"decoding, from {min(r['speedup'] for r in rows):.1f} to "
        f"{max(r['speedup'] for r in rows):.1f}, with the tokens a step beside it. A vertical line "
        "marks 1, as fast as plain decoding."
    )


@styled
def training(results: Mapping | None = None) -> Figure:
    """The recurrent drafter's loss, and what it is judged by, along its training.

    results: what training/drafter.py wrote; a checkout's when None, ValueError if none.
    """
    curve = (measured("recurrent") if results is None else results)["training"]["curve"]
    updates = [point["updates"] for point in curve]
    values = [point["tokens_a_step"] for point in curve]
    figure, (left, right) = new_figure(8.0, 3.2, ncols=2)
    left.plot(updates, [point["loss"] for point in curve], "o-", color=ORANGE, ms=4)
    left.set(title="What is minimized", ylabel="loss of a batch, nats")
    right.plot(updates, values, "s-", color=BLUE, ms=4)
    right.axhline(1, color=GREY, lw=1)
    right.set(title="What it is for", ylabel="tokens a step, a chain of four")
    for ax in (left, right):
        ax.set_xlabel("updates")
    return figure.describe(
        f"Two lines over {updates[-1]} updates. Left, loss falls from {curve[0]['loss']:.1f} to "
        f"{curve[-1]['loss']:.1f}. Right, tokens a step on texts about other topics rise from "
        f"{values[0]:.2f} to {max(values):.2f} at most; a grey line at 1 is plain decoding."
    )


FIGURES = {
    "drafter_training": training,
    "speculation_tokens": tokens_a_step,
    "speculation_depth": acceptance_by_depth,
    "speculation_times": speedups,
}
