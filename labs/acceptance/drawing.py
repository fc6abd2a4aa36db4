"""The lab's two figures: how beam candidates distort p, and how many tokens each rule keeps."""

from fractions import Fraction

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Figure, new_figure
from labs.acceptance.beams import beam_candidates, longest_of_tosses
from labs.acceptance.models import DRAFT, SHAPES, TARGET, in_floats, rules_for
from labs.acceptance.rules import mean_length, step_law
from treeattn_conformance import law

LOOKS = {  # marker, colour, and how far below the row's line
    "matching": ("o", GREY, 0.0),
    "token by token": ("s", ORANGE, -0.24),
    "k-sequential": ("D", PURPLE, 0.0),
    "block": ("v", GREEN, 0.0),
    "traversal": ("^", BLUE, 0.24),
}


def tossed(width: int) -> list[Fraction]:
    """The first token's distribution after `longest_of_tosses` over a beam of `width`."""
    p, q = TARGET, DRAFT
    beam = beam_candidates(lambda path: q, width, 1)
    found = law(lambda rng: longest_of_tosses(beam, lambda path: p, lambda path: q, rng)[0])
    return [Fraction(found.get(x, 0)) for x in range(len(p))]


@styled
def likeliest_tossed_for() -> Figure:
    """The target's distribution, and the first token's distributions by tosses for beams."""
    figure, ax = new_figure(7.0, 2.8)
    kinds = {
        "target": (TARGET, GREY),
        "beam of 1": (tossed(1), ORANGE),
        "beam of 2": (tossed(2), RED),
    }
    for i, (name, (chances, colour)) in enumerate(kinds.items()):
        places = np.arange(3) + 0.27 * (i - 1)
        ax.bar(places, [float(x) for x in chances], 0.25, color=colour, label=name)
        for place, x in zip(places, chances, strict=True):
            ax.annotate(str(x), (place, float(x)), (0, 2), textcoords="offset points", ha="center")
    ax.set(ylim=(0, 0.98), ylabel="probability", xticks=range(3), yticks=(0, 0.5))
    ax.set_xticklabels(["token 0", "token 1", "token 2"])
    ax.legend(loc="upper right")
    return figure.describe(
        f"""Bars of the probabilities of three tokens. The target's: 1/2, 3/10, 1/5. By tossing for
        the likeliest token of the draft: {", ".join(map(str, tossed(1)))}. By tossing for its two
        likeliest ones: {", ".join(map(str, tossed(2)))}: token 0 comes much too often, and
        another one never."""
    )


@styled
def tokens_by_rule(target, draft, bounds: dict) -> Figure:
    """Mean tokens of a step, with a row for each of SHAPES, and a mark for each rule.

    target, draft: path -> (V,) Fractions; bounds: {shape's name: the bound of all lossless rules}
    """
    figure, ax = new_figure(9.2, 3.4)
    said = []
    for row, (shape, widths, replacement) in enumerate(SHAPES):
        ax.plot([1, bounds[shape]], [row, row], color=GREY, lw=0.8, zorder=1)
        ax.plot([bounds[shape]] * 2, [row - 0.36, row + 0.36], color=INK, lw=2)
        values = []
        for name, rule in rules_for(widths, replacement).items():
            models = [in_floats(x) for x in (target, draft)]
            tokens = mean_length(step_law(rule, *models, widths, replacement))
            marker, colour, below = LOOKS[name]
            ax.plot(tokens, row + below, marker, color=colour, ms=7, label=name, zorder=3)
            values.append(f"{name} {tokens:.2f}")
        said.append(f"{shape}: {', '.join(values)}, bound {float(bounds[shape]):.2f}")
    ax.set(yticks=range(len(SHAPES)), xlabel="mean tokens of a step; the bar is the bound")
    ax.set_yticklabels([shape for shape, _, _ in SHAPES])
    ax.invert_yaxis()
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend([handles[name] for name in LOOKS], LOOKS, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure.describe(
        f"A row for each drafted shape, marks at mean tokens. {'; '.join(said)}."
    )
