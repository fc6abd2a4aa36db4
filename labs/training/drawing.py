"""The notebook's figures: rows that share prefixes, the order in which a mask is intervals, what is
saved, how nodes are dealt over devices, and a training run."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.boxes import ROWS, bare, draw_cell, draw_tree, headline, tint
from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, RED, new_figure
from labs.training.dealing import DEALINGS, blocks_by_device, deal_tree
from labs.training.rows import RowTree, pack_rows
from treeattn import ancestor_mask, depths

RESULTS = Path(__file__).parent / "results"
TEXTS = "The cat sat down", "The cat ran", "The dog barks", "The cat sat"
WORDS = ("The", "cat", "ran", "sat", "down", "dog", "barks")  # a token's id is its place


def rows_of(texts=TEXTS) -> list[list[int]]:
    """The texts as rows of token ids."""
    return [[WORDS.index(word) for word in text.split()] for text in texts]


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
def rows_tree_rows(texts=TEXTS) -> Figure:
    """Rows, the tree in which each prefix is computed once, and the rows that read it."""
    (tree,) = pack_rows(rows_of(texts))
    colors = [ROWS[row % len(ROWS)] for row in _first_rows(tree)]
    words = [WORDS[token] for token in tree.tokens]
    figure, axes = new_figure(11.0, 2.35, ncols=3, width_ratios=(4.2, 4, 4.2))
    _draw_rows(axes[0], tree, words, colors)
    headline(axes[0], f"{len(texts)} rows: {tree.row_tokens} tokens")
    draw_tree(axes[1], tree.parents, _numbered(tree), colors, width=0.86)
    headline(axes[1], f"their tree: {len(words)} nodes, one pass")
    _draw_rows(axes[2], tree, [str(node) for node in range(len(words))], colors)
    headline(axes[2], "row_map: which node a row reads")
    return figure.describe(
        f"Left, {len(texts)} rows of words: {'; '.join(texts)}. In the middle their prefix tree of "
        f"{len(words)} numbered nodes, {', '.join(_numbered(tree))}: what rows begin with alike "
        "stands there once. Right, the rows again, each cell with the number of the node that is "
        f"read there: {'; '.join(str(row[row >= 0].tolist()) for row in tree.row_map)}."
    )


def by_depth(tree: RowTree) -> np.ndarray:
    """The nodes level by level: a row's first tokens, then all second ones, and so on."""
    return np.argsort(depths(tree.parents), kind="stable")


def renumbered_mask(tree: RowTree, order) -> np.ndarray:
    """(n, n) bool: who sees whom when the nodes are numbered in another order."""
    mask = np.asarray(ancestor_mask(tree.parents))
    return mask[np.ix_(order, order)]


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
def subtrees_as_intervals(texts=TEXTS) -> Figure:
    """For each node the nodes that see it: a run in depth-first order, with holes by depth."""
    (tree,) = pack_rows(rows_of(texts))
    order = by_depth(tree)
    labels = [WORDS[token] for token in tree.tokens]
    figure, (left, right) = new_figure(8.8, 3.1, ncols=2)
    depth_first = renumbered_mask(tree, np.arange(len(order)))
    _draw_subtrees(left, depth_first, [f"{w} {j}" for j, w in enumerate(labels)])
    headline(left, "Depth first: every subtree is a run")
    _draw_subtrees(
        right, renumbered_mask(tree, order), [f"{labels[k]} {j}" for j, k in enumerate(order)]
    )
    headline(right, "Level by level: a subtree has holes")
    return figure.describe(
        f"Two charts with a line for each of {len(order)} nodes, on which the nodes of its subtree "
        "are filled in: those that see it. Left, in depth-first order, each line is one bar that "
        f"begins at its own node and ends before {tree.ends.tolist()}. Right, level by level "
        f"({', '.join(labels[k] for k in order)}), the lines of “cat”, “dog” and “sat” have holes, "
        "hatched: nodes between the first and the last of the subtree that are none of it."
    )


def tokens_saved(answers, prompt, answer):
    """How many times fewer tokens the tree has than separate rows, that share the prompt alone."""
    return answers * (prompt + answer) / (prompt + answers * answer)


LENGTHS = ((8, GREEN, "-"), (4, BLUE, "--"), (1, ORANGE, "-."), (0.25, GREY, ":"))


def _draw_formula(axes) -> None:
    answers = np.arange(1, 65)
    for ratio, color, line in LENGTHS:
        saved = tokens_saved(answers, ratio, 1)
        axes.plot(answers, saved, line, color=color, lw=2)
        times = f"{ratio:g} times" if ratio > 1 else "as long as" if ratio == 1 else "a quarter of"
        axes.text(66, saved[-1], f"{times} an answer", va="center", fontsize=9, color=INK)
    axes.set(xlabel="answers to a prompt", ylabel="tokens of rows / nodes of the tree")
    axes.set(xlim=(1, 64), ylim=(1, 9))
    headline(axes, "Calculated: the prompt is …")


def _draw_measured(axes, results: Mapping) -> None:
    places = np.arange(len(results))
    bars = (
        ("tokens", GREY, lambda r: r["tokens"]["padded"] / r["tokens"]["tree"], None),
        ("seconds, treeattn", BLUE, lambda r: r["seconds"]["padded"] / r["seconds"]["tree"], None),
        ("seconds, transformers", ORANGE, _of_transformers, "//"),
    )
    for i, (name, color, ratio, hatch) in enumerate(bars):
        timed = [(y, ratio(r)) for y, r in enumerate(results.values()) if "seconds" in r or not i]
        y, values = np.array(timed).T
        y = y + 0.27 * (i - 1)
        axes.barh(y, values, 0.24, color=color, hatch=hatch, edgecolor="white", label=name)
        for place, value in zip(y, values, strict=True):
            axes.text(value + 0.06, place, f"{value:.1f}", va="center", fontsize=8.5, color=INK)
    axes.set_yticks(places, [r["name"].replace(", ", ",\n") for r in results.values()], fontsize=9)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set(xlabel="of padded rows / of the tree")
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.17), ncols=3, fontsize=8.5)
    headline(axes, "Measured, two CPU cores")


def _of_transformers(result: Mapping) -> float:
    seconds = result["seconds"]
    return seconds.get("torch padded", 0) / seconds.get("torch tree", 1)


@styled
def what_is_saved(results: Mapping | None = None) -> Figure:
    """Fewer tokens by the number of answers, and the tokens and seconds of real rows.

    results: what `python -m labs.training.benchmark` wrote; the stored results when None
    """
    if results is None:
        results = json.loads((RESULTS / "training.json").read_text(encoding="utf-8"))
    results = {kind: result for kind, result in results.items() if kind != "least"}
    figure, (left, right) = new_figure(9.6, 3.5, ncols=2)
    _draw_formula(left)
    left.set_xlim(1, 104)
    left.set_xticks([1, 16, 32, 48, 64])
    _draw_measured(right, results)
    tokens = [r["tokens"]["padded"] / r["tokens"]["tree"] for r in results.values()]
    timed = [r["seconds"] for r in results.values() if "seconds" in r]
    seconds = [s["padded"] / s["tree"] for s in timed]
    return figure.describe(
        f"""Left, how many times fewer tokens a tree has than its rows, for 1 to 64 answers to one
        prompt: with a prompt eight times as long as an answer it rises to
        {tokens_saved(64, 8, 1):.1f}, with one a quarter as long it stays below 1.25. Right, bars
        for {len(results)} kinds of real rows: the tree has {min(tokens):.1f} to {max(tokens):.1f}
        times fewer tokens than the padded rows; where it was timed, {len(timed)} of them, a step
        takes {min(seconds):.1f} to {max(seconds):.1f} times less time."""
    )


COLORS = dict(zip(DEALINGS, (ORANGE, BLUE, GREEN), strict=True))


@styled
def draw_work(ends=None, devices: int = 8) -> Figure:
    """The blocks of scores that each device computes, of a tree dealt in three ways.

    ends: (n,) where each node's subtree ends, in depth-first order; of a prompt of 8,192 tokens and
          sixteen answers of 512 when None
    """
    ends = _prompt_and_answers(8192, 16, 512) if ends is None else np.asarray(ends)
    figure, panels = new_figure(8.0, 3.1, ncols=len(DEALINGS), sharey=True)
    said = []
    for ax, dealing in zip(panels, DEALINGS, strict=True):
        nodes = deal_tree(ends, devices, dealing=dealing)
        work = blocks_by_device(ends, nodes, devices).sum(axis=1)
        mean = work.mean()
        most = int(work.max())
        bars = ax.bar(range(devices), work, 0.8, color=COLORS[dealing])
        on_bars = INK if dealing == "contiguous" else "white"
        ax.bar_label(bars, fontsize=8, label_type="center", color=on_bars)
        ax.axhline(mean, color=INK, lw=1, ls="--")
        ax.set_title(f"{dealing}: most is {most / mean:.2f} × mean", fontsize=10)
        ax.set(xlabel="device", xticks=range(devices))
        said.append(f"{dealing}: {', '.join(map(str, work))}")
    panels[0].set_ylabel("blocks of scores")
    return figure.describe(
        f"Three panels of bars, one for each of {devices} devices: the blocks of scores that it "
        f"computes for a tree of {len(ends):,} nodes, with a dashed line at the mean of "
        f"{mean:.1f}. {'; '.join(said)}."
    )


def _prompt_and_answers(prompt: int, answers: int, length: int):
    """Ends of a tree that is a prompt, and after it its answers."""
    nodes = np.arange(prompt + answers * length)
    ends = prompt + ((nodes - prompt) // length + 1) * length
    ends[:prompt] = len(nodes)
    return ends


WINDOW = 5  # steps whose mean a line shows


@styled
def learning_curve(results: Mapping | None = None) -> Figure:
    """The reward of a step's samples, and how many of them were right, along the run.

    results: what `python -m labs.training.train_on_a_tree` wrote; the stored run's when None
    """
    if results is None:
        results = json.loads((RESULTS / "train_on_a_tree.json").read_text(encoding="utf-8"))
    steps = results["steps"]
    number = np.arange(1, len(steps) + 1)
    width = min(WINDOW, len(steps))
    figure, ax = new_figure(6.4, 3.2)
    ends = {}
    for name, label, color, marker in (
        ("reward", "mean reward", ORANGE, "o"),
        ("right", "share of right answers", BLUE, "s"),
    ):
        values = np.array([step[name] for step in steps])
        mean = np.convolve(values, np.ones(width) / width, mode="valid")
        ax.plot(number, values, marker, color=color, ms=4, alpha=0.45)
        ax.plot(number[width - 1 :], mean, color=color, lw=2, label=label)
        ends[name] = mean[0], mean[-1]
    ax.set(xlabel="step", ylim=(0, 1.04), title="The packaged model learns sums, 32 answers a step")
    ax.legend(loc="lower right", fontsize=9)
    return figure.describe(
        f"Dots for each of {len(steps)} steps, and lines of the mean over {width} of them. "
        f"The mean reward goes from {ends['reward'][0]:.2f} to {ends['reward'][1]:.2f}, "
        f"the share of right answers from {ends['right'][0]:.2f} to {ends['right'][1]:.2f}."
    )
