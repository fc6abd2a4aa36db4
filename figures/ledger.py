"""Figures of notebook 10: what became of the sources' statements."""

from collections import Counter
from pathlib import Path
from textwrap import fill

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, new_figure

# From what holds to what does not; the last two are no verdict on a statement.
VERDICTS = {
    "proved": BLUE,
    "checked": GREEN,
    "checked in part": SKY,
    "imprecise": ORANGE,
    "wrong as printed": RED,
    "cannot be tested here": GREY,
    "definition": PALE,
}


@styled
def scorecard(rows: list[dict[str, str]]):
    """A disc for each source and verdict, its area the number of rows.

    rows: the ledger's, each with "source" and "verdict"
    """
    counts = Counter((row["source"], row["verdict"]) for row in rows)
    sources = list(dict.fromkeys(row["source"] for row in rows))
    totals = Counter(row["source"] for row in rows)
    figure, axes = new_figure(9.0, 1.6 + 0.62 * len(sources))
    for y, source in enumerate(sources):
        axes.axhline(y, color=PALE, lw=1, zorder=0)
        for x, (verdict, colour) in enumerate(VERDICTS.items()):
            if number := counts[source, verdict]:
                axes.scatter(x, y, 14 * number + 30, color=colour, edgecolor=INK, lw=0.6)
                beside = (number + 10) ** 0.5 * 1.9 + 3
                axes.annotate(
                    str(number),
                    (x, y),
                    xytext=(beside, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
    axes.set_xticks(range(len(VERDICTS)), [fill(v, 10) for v in VERDICTS], fontsize=8)
    axes.set_yticks(range(len(sources)), [f"{s}, {totals[s]} rows" for s in sources])
    axes.set(xlim=(-0.6, len(VERDICTS) - 0.3), ylim=(len(sources) - 0.4, -0.6))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    said = "; ".join(
        f"{source}: " + ", ".join(f"{counts[source, v]} {v}" for v in VERDICTS if counts[source, v])
        for source in sources
    )
    return figure.describe(f"Rows of the ledger by source and by verdict. {said}.")


def of_the_checkout():
    """`scorecard` of the rows that notebooks/ledger has."""
    rows = []
    for path in sorted((Path(__file__).parent.parent / "notebooks" / "ledger").iterdir()):
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        columns = header.split("\t")
        rows += [dict(zip(columns, line.split("\t"), strict=True)) for line in lines]
    return scorecard(rows)


FIGURES = {"ledger_scorecard": of_the_checkout}
