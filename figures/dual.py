"""Notebooks 03 and 05: three programs for one log-sum-exp, on numbers and on dual numbers."""

import numpy as np

from figures.canvas import styled
from figures.sentence import VALUES, WEIGHTS, WORDS
from figures.style import BLUE, GREY, INK, NOTE, PALE, RED, Figure, new_figure

CHAIN, TREE = ((((0, 1), 2), 3), 4), (((0, 1), (2, 3)), 4)
DEVICES = ((0, 1), 2, (3, 4))
Place = tuple[float, float, list[int]]  # x, y and the words below


def _number(words: list[int], rates: bool) -> str:
    """The sum of the words' weights, and of their weighted values as the part of ε."""
    mass = np.array(WEIGHTS)[words]
    moment = mass @ np.array(VALUES)[words]
    return f"{mass.sum()}\n({moment[0]}, {moment[1]}) ε" if rates else f"{mass.sum()}"


def _box(ax, place: Place, rates: bool, *below: Place) -> Place:
    """A box with the number of a set of words, and an arrow from each box below it."""
    x, y, words = place
    for x_below, y_below, _ in below:
        arrow = {"arrowstyle": "-|>", "color": BLUE, "shrinkA": 13, "shrinkB": 13}
        ax.annotate("", (x, y), (x_below, y_below), arrowprops=arrow)
    box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": BLUE}
    ax.text(x, y, _number(words, rates), ha="center", va="center", fontsize=7.5, bbox=box)
    return place


def _sum(ax, tree, rates: bool) -> Place:
    """Draw a tree of sums over words, given as nested pairs: its root."""
    if isinstance(tree, int):
        value = VALUES[tree]
        score = f"log {WEIGHTS[tree]}" + f"\n({value[0]}, {value[1]}) ε" * rates
        ax.text(tree, -1, score, ha="center", va="center", fontsize=7.5, color=INK)
        ax.text(tree, -1.7, WORDS[tree], ha="center", va="center", fontsize=8.5, color=NOTE)
        ax.text(tree + 0.1, -0.6, "exp", fontsize=7.5, color=NOTE)
        ax.annotate("", (tree, -0.3), (tree, -0.72), arrowprops={"arrowstyle": "->", "color": GREY})
        return _box(ax, (tree, 0, [tree]), rates)
    left, right = (_sum(ax, branch, rates) for branch in tree)
    above = (left[0] + right[0]) / 2, max(left[1], right[1]) + 1, left[2] + right[2]
    return _box(ax, above, rates, left, right)


def _logarithm(ax, root: Place, rates: bool) -> None:
    x, y, _ = root
    ax.annotate("", (x, y + 0.8), (x, y + 0.3), arrowprops={"arrowstyle": "->", "color": GREY})
    ax.text(x + 0.1, y + 0.5, "log", fontsize=7.5, color=NOTE)
    result = "log 16" + "\n(1.25, 2.25) ε" * rates
    ax.text(x, y + 1.05, result, ha="center", va="center", color=RED, fontsize=7.5)


def _three_programs(rates: bool) -> Figure:
    figure, (chain, tree, mesh) = new_figure(9.4, 4.3, ncols=3, sharey=True)
    for ax, branches in ((chain, CHAIN), (tree, TREE)):
        _logarithm(ax, _sum(ax, branches, rates), rates)
    for device in ((-0.5, 1.5), (1.5, 2.5), (2.5, 4.5)):
        mesh.axvspan(device[0] + 0.04, device[1] - 0.04, color=PALE, alpha=0.6, zorder=0)
    roots = [_sum(mesh, branches, rates) for branches in DEVICES]
    for x in (0.35, 2, 3.65):
        _logarithm(mesh, _box(mesh, (x, 2.6, [*range(5)]), rates, *roots), rates)
    for ax, title in ((chain, "a chain"), (tree, "a tree"), (mesh, "a mesh of three devices")):
        ax.set(xlim=(-0.6, 4.6), ylim=(-1.9, 5.4), xticks=[], yticks=[], title=title)
        ax.spines[:].set_visible(False)
    return figure


@styled
def three_programs() -> Figure:
    """A chain, a tree and a mesh add the exponentials of five scores, and take the logarithm."""
    return _three_programs(rates=False).describe(
        """Three programs for the log-sum-exp of five words' scores. Each takes the exponentials
        1, 2, 4, 1, 8, adds them to 16 and ends with log 16. The chain adds one word after the
        other, the tree adds pairs, and on the mesh each of three devices adds its own words, and
        then every device gets the sum of all three."""
    )


@styled
def dual_on_its_way() -> Figure:
    """The same three programs, whose every number carries a rate: the values, weighted."""
    return _three_programs(rates=True).describe(
        """The same chain, tree and mesh on dual numbers. A word enters as its score plus its value
        times ε: milk as log 8 + (1, 3) ε. Its exponential is 8 + (8, 24) ε. Wherever the programs
        add the numbers, they add the parts of ε, to 16 + (20, 36) ε. The logarithm ends all three
        with log 16 + (1.25, 2.25) ε, and (1.25, 2.25) is attention."""
    )


FIGURES = {"three_programs": three_programs, "dual_on_its_way": dual_on_its_way}
