"""The notebook's figures: rows that share prefixes, the order in which a mask is intervals, what is
saved, and a training run."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.boxes import ROWS, bare, draw_cell, draw_tree, headline, tint
from figures.canvas import styled
from figures.style import BLUE, GREY, INK, ORANGE, RED, new_figure
from labs.training.rows import RowTree, interval_mask, pack_rows

RESULTS = Path(__file__).parent / "results"
TEXTS = "The cat sat down", "The cat ran", "The dog barks", "The cat sat"
WORDS = ("The", "cat", "ran", "sat", "down", "dog", "barks")  # a token's id is its place


def tree_of_texts() -> RowTree:
    """The tree of the texts, whose tokens are words."""
    return pack_rows([[WORDS.index(word) for word in text.split()] for text in TEXTS])


def _first_rows(tree: RowTree) -> np.ndarray:
    """(n,) the first row that has each node."""
    first = np.full(len(tree.tokens), -1)
    for row in reversed(range(len(tree.row_map))):
        nodes = tree.row_map[row]
        first[nodes[nodes >= 0]] = row
    return first


def _draw_rows(axes, tree: RowTree, labels, colors) -> None:
    for y, nodes in enumerate(tree.row_map):
        axes.text(-0.65, y, str(y), ha="right", va="center", color=GREY, fontsize=9)
        for x, node in enumerate(nodes[nodes >= 0]):
            draw_cell(axes, x, y, labels[node], colors[node])
    bare(axes, (-1.1, tree.row_map.shape[1] - 0.5), (-0.6, len(tree.row_map) - 0.4))


def _numbered(tree: RowTree) -> list[str]:
    return [f"{WORDS[token]} {node}" for node, token in enumerate(tree.tokens)]


@styled
def rows_tree_rows() -> Figure:
    """Rows, the tree in which each prefix is computed once, and the rows that read it."""
    tree = tree_of_texts()
    colors = [ROWS[row % len(ROWS)] for row in _first_rows(tree)]
    words = [WORDS[token] for token in tree.tokens]
    figure, axes = new_figure(11.0, 2.35, ncols=3, width_ratios=(4.2, 4, 4.2))
    _draw_rows(axes[0], tree, words, colors)
    headline(axes[0], f"{len(TEXTS)} rows: {tree.row_tokens} tokens")
    draw_tree(axes[1], tree.parents, _numbered(tree), colors, width=0.86)
    headline(axes[1], f"their tree: {len(words)} nodes, one pass")
    _draw_rows(axes[2], tree, [str(node) for node in range(len(words))], colors)
    headline(axes[2], "row_map: which node a row reads")
    return figure.describe(
        f"Left, {len(TEXTS)} rows of words: {'; '.join(TEXTS)}. In the middle their prefix tree of "
        f"{len(words)} numbered nodes, {', '.join(_numbered(tree))}: what rows begin with alike "
        "stands there once. Right, the rows again, each cell with the number of the node that is "
        f"read there: {'; '.join(str(row[row >= 0].tolist()) for row in tree.row_map)}."
    )


def _draw_subtrees(axes, mask, labels) -> None:
    """Row j: the queries that see node j. A gap between them is marked."""
    n = len(mask)
    for j in range(n):
        seen_by = np.flatnonzero(mask[:, j])
        for i in range(seen_by[0], seen_by[-1] + 1):
            inside = mask[i, j]
            face = tint(BLUE, 0.6 if i == j else 0.3) if inside else "white"
            box = Rectangle((i - 0.5, j - 0.36), 1, 0.72, fc=face, ec=BLUE if inside else RED, lw=1)
            if not inside:
                box.set_hatch("xxx")
            axes.add_patch(box)
        axes.text(-0.8, j, labels[j], ha="right", va="center", fontsize=9, color=INK)
    for i in range(n):
        axes.text(i, -0.85, str(i), ha="center", va="center", fontsize=9, color=GREY)
    bare(axes, (-2.3, n - 0.4), (-1.3, n - 0.4))


@styled
def subtrees_as_intervals() -> Figure:
    """For each node the nodes that see it: a run in depth-first order, with holes by depth."""
    tree = tree_of_texts()
    labels = [WORDS[token] for token in tree.tokens]
    mask = interval_mask(tree.ends)
    level_by_level = np.argsort(tree.positions, kind="stable")
    figure, (left, right) = new_figure(8.8, 3.1, ncols=2)
    _draw_subtrees(left, mask, _numbered(tree))
    headline(left, "Depth first: every subtree is a run")
    names = [f"{labels[k]} {j}" for j, k in enumerate(level_by_level)]
    _draw_subtrees(right, mask[np.ix_(level_by_level, level_by_level)], names)
    headline(right, "Level by level: a subtree has holes")
    return figure.describe(
        f"""Two charts with a line for each of {len(labels)} nodes, on which the nodes of its
        subtree are filled in: those that see it. Left, in depth-first order, each line is one bar
        that begins at its own node and ends before {tree.ends.tolist()}. Right, level by level
        ({", ".join(labels[k] for k in level_by_level)}), the lines of “cat”, “dog” and “sat” have
        holes, hatched: nodes between the first and the last of the subtree that are none of it."""
    )


def tokens_saved(answers, prompt, answer):
    """How many times fewer tokens the tree has than separate rows that share only the prompt."""
    return answers * (prompt + answer) / (prompt + answers * answer)


@styled
def what_is_saved() -> Figure:
    """Padded rows over the tree, in the stored tokens and seconds of real rows."""
    results = json.loads((RESULTS / "training.json").read_text(encoding="utf-8"))
    del results["least"]  # a step on 16 tokens
    figure, axes = new_figure(7.0, 3.5)
    places = np.arange(len(results))
    said = []
    bars = (
        ("tokens", GREY, None, "tokens", "padded", "tree"),
        ("seconds, treeattn", BLUE, None, "seconds", "padded", "tree"),
        ("seconds, transformers", ORANGE, "//", "seconds", "torch padded", "torch tree"),
    )
    for i, (name, color, hatch, what, padded, tree) in enumerate(bars):
        ratios = [r[what][padded] / r[what][tree] for r in results.values()]
        y = places + 0.27 * (i - 1)
        drawn = axes.barh(y, ratios, 0.24, color=color, hatch=hatch, edgecolor="white", label=name)
        axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8.5, color=INK)
        said.append(f"{min(ratios):.1f} to {max(ratios):.1f} for {name}")
    axes.set_yticks(places, [r["name"] for r in results.values()])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set(xlabel="of padded rows / of the tree, on two CPU cores")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5)
    return figure.describe(
        f"Bars for {len(results)} kinds of real rows, each with what padded rows take over what "
        f"their tree takes: {'; '.join(said)}."
    )


WINDOW = 5  # steps whose mean a line shows


@styled
def learning_curve() -> Figure:
    """The reward of a step's samples, and how many of them were right, along the stored run."""
    steps = json.loads((RESULTS / "train_on_a_tree.json").read_text(encoding="utf-8"))["steps"]
    number = np.arange(1, len(steps) + 1)
    figure, ax = new_figure(6.4, 3.2)
    said = []
    for name, label, color, marker in (
        ("reward", "mean reward", ORANGE, "o"),
        ("right", "share of right answers", BLUE, "s"),
    ):
        values = np.array([step[name] for step in steps])
        mean = np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")
        ax.plot(number, values, marker, color=color, ms=4, alpha=0.45)
        ax.plot(number[WINDOW - 1 :], mean, color=color, lw=2, label=label)
        said.append(f"the {label} goes from {mean[0]:.2f} to {mean[-1]:.2f}")
    ax.set(xlabel="step", ylim=(0, 1.04), title="The packaged model learns sums, 32 answers a step")
    ax.legend(loc="lower right", fontsize=9)
    return figure.describe(
        f"Dots for each of {len(steps)} steps, and lines of the mean over {WINDOW} of them: "
        f"{' and '.join(said)}."
    )
