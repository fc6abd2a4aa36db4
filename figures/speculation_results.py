"""Figures of notebook 09: what speculation was measured to save."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from figures.canvas import styled
from figures.measured import measured
from figures.roofline import STYLES
from figures.style import BLUE, GREY, INK, ORANGE, new_figure

KINDS = ("chat", "code", "editing", "structured")


# Of benchmarks/speculative.py and of benchmarks/recurrent.py, replayed along the same texts.
LOOKED_UP = ("suffix", "suffix, chain", "ngram", "recycling")
TRAINED = ("recurrent, chain of 4", "recurrent", "surer")


def _results(results: Mapping | None, name: str = "speculative") -> Mapping:
    return measured(name) if results is None else results


def _kinds(rows) -> list[str]:
    return [kind for kind in KINDS if any(r["kind"] == kind for r in rows)]


def over_all_steps(rows: Iterable[Mapping]) -> float:
    """New tokens over calls of the model, of all rows together."""
    rows = list(rows)
    return sum(r["tokens"] for r in rows) / sum(r["steps"] for r in rows)


@styled
def tokens_a_step(results: Mapping | None = None, trained: Mapping | None = None) -> Figure:
    """New tokens for each call of the model over all steps of all prompts of a kind, by draft.

    results: what benchmarks/speculative.py wrote; a checkout's when None, ValueError if none.
    trained: what benchmarks/recurrent.py wrote, likewise
    """
    rows = [r for r in _results(results)["counts"] if r["draft"] in LOOKED_UP]
    greedy = [r for r in _results(trained, "recurrent")["drafts"] if r["mode"] == "greedy"]
    rows += [r for r in greedy if r["draft"] in TRAINED and r["kind"] in KINDS]
    drafts = list(dict.fromkeys(r["draft"] for r in rows))
    kinds = _kinds(rows)
    figure, axes = new_figure(8.4, 0.9 + 0.33 * len(drafts), ncols=len(kinds), sharey=True)
    for ax, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        for i, draft in enumerate(drafts):
            mine = [r for r in rows if (r["kind"], r["draft"]) == (kind, draft)]
            value = over_all_steps(mine) if mine else 0.0
            chain = "chain" in draft or draft == "ngram"
            ax.barh(
                i,
                value,
                color=ORANGE if chain else BLUE,
                height=0.62,
                hatch="//" if chain else None,
                edgecolor="white",
            )
            ax.text(value + 0.1, i, f"{value:.2f}", va="center", fontsize=8.5)
        ax.axvline(1, color=GREY, lw=1)
        ax.set(xlim=(0, 5.2), title=kind)
    first = np.atleast_1d(axes)[0]
    first.invert_yaxis()
    first.set_yticks(range(len(drafts)), drafts, fontsize=9)
    figure.supxlabel("tokens a step, all prompts of a kind together; chains hatched", fontsize=9.5)
    return figure.describe(
        f"Bars of new tokens a step for {len(drafts)} drafts, a panel for each kind of text: "
        f"{', '.join(kinds)}. Drafts that look up are longest where texts repeat themselves; the "
        "recurrent one, which was trained, is longest in chat; the surer of both is long in all."
    )


@styled
def calibration(results: Mapping | None = None) -> Figure:
    """What drafts gave a path of tokens, and how often the model wrote that path.

    results: what benchmarks/calibration.py wrote; a checkout's when None, ValueError if none.
    """
    drafts = _results(results, "calibration")["drafts"]
    names = list(dict.fromkeys(name.split(", ")[0] for name in drafts))
    figure, axes = new_figure(8.0, 3.9, ncols=len(names), sharey=True)
    for ax, draft in zip(np.atleast_1d(axes), names, strict=True):
        ax.plot([0, 1], [0, 1], color=GREY, lw=1)
        of_draft = [name for name in drafts if name.split(", ")[0] == draft]
        for name, (color, marker) in zip(of_draft, STYLES[::2], strict=False):
            x, y = ([row[key] for row in drafts[name]] for key in ("probability", "accepted"))
            ax.plot(x, y, marker=marker, color=color, ms=5, label=name.split(", ")[1])
        ax.set(title=f"{draft} draft", xlabel="probability that the draft gave a path")
        ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        ax.legend(loc="upper left", fontsize=9)
    np.atleast_1d(axes)[0].set_ylabel("share that the model wrote")
    return figure.describe(
        "For the recurrent and the suffix draft, the share of proposed paths that the model wrote, "
        "over the probability that the draft gave them; a grey diagonal is what is right. The "
        "recurrent draft lies a little below it in chat and far below in code and lists. The "
        "suffix draft lies on or above it in code and lists, and below in chat."
    )


class Total(NamedTuple):
    """All prompts of a kind together: new tokens, calls, and the seconds after prefill."""

    kind: str
    tokens: int
    steps: int
    plain_seconds: float
    seconds: float

    @property
    def speedup(self) -> float:
        """Plain decoding's time over the draft's."""
        return self.plain_seconds / self.seconds


def totals(results: Mapping | None = None) -> list[Total]:
    """A row for each kind of prompt, and one for all; of each prompt the fastest of its runs.

    results: as for `tokens_a_step`.
    """
    rows = _of_the_default(_results(results)["times"])
    found = []
    for kind in (*_kinds(rows), "all"):
        mine = [r for r in rows if kind in (r["kind"], "all")]
        found.append(
            Total(
                kind,
                sum(r["tokens"] for r in mine),
                sum(round(r["tokens"] / r["tokens_a_step"]) for r in mine),
                sum(min(r["plain_seconds"]) for r in mine),
                sum(min(r["seconds"]) for r in mine),
            )
        )
    return found


def _of_the_default(rows) -> list[Mapping]:
    return [r for r in rows if r.get("draft", "suffix") == "suffix"]


@styled
def speedups(results: Mapping | None = None) -> Figure:
    """Plain decoding's time over the default draft's, prompt by prompt and all of a kind together.

    results: as for `tokens_a_step`.
    """
    rows = _of_the_default(_results(results)["times"])
    of_kind = {total.kind: total for total in totals(results)}
    figure, ax = new_figure(7.6, 0.9 + 0.25 * (len(rows) + len(_kinds(rows))))
    names = []
    right = 1.03 * max(r["spread"][1] for r in rows)
    for kind in _kinds(rows):
        color, marker = STYLES[2 * KINDS.index(kind)]
        mine = sorted((r for r in rows if r["kind"] == kind), key=lambda r: -r["speedup"])
        for row in mine:
            ax.plot(row["spread"], [len(names)] * 2, color=color, lw=2)
            ax.plot(row["speedup"], len(names), marker, color=color, ms=5)
            _beside(ax, right, len(names), f"{row['tokens_a_step']:.1f} a step")
            names.append(row["name"])
        total = of_kind[kind]
        ax.plot(total.speedup, len(names), "|", color=INK, ms=13, mew=3)
        _beside(ax, right, len(names), f"{total.tokens / total.steps:.1f} a step", weight="bold")
        names.append(f"{kind}, in all: {total.speedup:.2f}")
        ax.axhline(len(names) - 0.5, color=GREY, lw=0.6, ls=":")
    ax.axvline(1, color=INK, lw=1)
    ax.set_yticks(range(len(names)), names, fontsize=8.5)
    for label in ax.get_yticklabels():
        label.set_weight("bold" if "in all" in label.get_text() else "normal")
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="times plain decoding's speed, after prefill")
    most = max(r["speedup"] for r in rows)
    ticks = [t for t in (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8) if t < 1.4 * most]
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_xlim(min(0.7, *(r["spread"][0] for r in rows)) * 0.95, 1.35 * right)
    ax.set_title("Guessing pays where texts repeat themselves")
    return figure.describe(
        f"A dot and a range for each of {len(rows)} prompts: how many times faster than plain "
        f"decoding, from {min(r['speedup'] for r in rows):.1f} to {most:.1f}, with the tokens a "
        "step beside it. A bar for each kind is plain decoding's whole time over the draft's: "
        + ", ".join(f"{kind} {of_kind[kind].speedup:.2f}" for kind in _kinds(rows))
        + ". A vertical line marks 1, as fast as plain decoding."
    )


def _beside(ax, x: float, y: int, text: str, **style) -> None:
    ax.text(x, y, text, va="center", fontsize=8, color=INK, **style)


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
    "speculation_calibration": calibration,
    "speculation_times": speedups,
}
