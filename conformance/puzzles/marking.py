"""Marks of an attempt: a report of the conformance suite, with a picture that says the same."""

import functools
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, INK, RED, Figure, new_figure
from treeattn_conformance import Report


class Marked(NamedTuple):
    """What came of an attempt: the suite's report, and a picture of the answer beside it."""

    report: Report
    figure: Figure

    @property
    def passed(self) -> bool:
        return not self.report.names("failed") and bool(self.report.names("passed"))

    def __repr__(self) -> str:
        return str(self.report)

    def _repr_mimebundle_(self, **options) -> tuple[dict, dict]:
        data, metadata = self.figure._repr_mimebundle_(**options)
        return data | {"text/plain": repr(self)}, metadata


def verdict(report: Report) -> tuple[str, str]:
    """(a line, the cure) for the picture."""
    if not report.names("failed"):
        return "passed", ""
    failed = [x for x in report.results if x.status == "failed"]
    named = [x for x in failed if x.fingerprints]
    if named:
        names = named[0].fingerprints
        return f"{named[0].case}: {', '.join(names)}", report.cures[names[0]]
    return f"{failed[0].case}: not yet", failed[0].detail


def marked(draw: Callable) -> Callable:
    """A picture of what `draw` finds of an attempt: the verdict above it, the cure below."""

    @functools.wraps(draw)
    def mark(*attempt: Callable) -> Marked:
        with np.errstate(all="ignore"):  # the picture says what became of an attempt
            report, width, panels, caption = draw(*attempt)
            return Marked(report, _picture(report, width, panels, caption))

    return mark


@styled
def _picture(report: Report, width: float, panels: dict[str, Callable], caption: str) -> Figure:
    line, cure = verdict(report)
    passed = line == "passed"
    figure, axes = new_figure(width, 2.9, ncols=len(panels), squeeze=False)
    for ax, (title, draw) in zip(axes[0], panels.items(), strict=True):
        try:
            draw(ax)
        except Exception as error:
            ax.axis("off")
            words = textwrap.fill(f"{type(error).__name__}: {error}", 34)
            ax.text(0.5, 0.5, words, ha="center", va="center", color=RED, fontsize=9)
        ax.set_title(title, fontsize=10)
    color = BLUE if passed else RED
    figure.suptitle(line, color=color, x=0.01, ha="left", fontsize=12)
    if cure:
        figure.supxlabel(textwrap.fill(cure, int(13 * width)), fontsize=9, color=INK)
    return figure.describe(f"{caption} Verdict: {line}. {cure}")
