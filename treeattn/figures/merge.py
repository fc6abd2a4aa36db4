"""Figures of the associative merge: trees of states, their numbers shown (notebook 04)."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from treeattn.figures import sentence
from treeattn.figures.canvas import styled, write_gif
from treeattn.figures.sentence import WEIGHTS, WORDS
from treeattn.figures.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    Figure,
    new_figure,
)
from treeattn.idea.state import (
    AttentionState,
    finalize,
    reduce_tree,
    tree_round,
)

# Eight leaves of one key each, but the sixth, which has none.
SCORES = np.array([1.0, 3.0, 0.5, 2.0, -1.0, -np.inf, 4.0, 1.5])
VALUES = np.array([2.0, -1.0, 4.0, 1.0, 3.0, 0.0, 0.5, -2.0])


# ---------------------------------------------------------------- the five words

SHARDS = (0, 1), (2,), (3, 4)


def _sums(words) -> tuple[int, np.ndarray]:
    """(Σ eˢ, Σ eˢ v) of some of the words, by their numbers."""
    weights = np.array(WEIGHTS)[list(words)]
    return int(weights.sum()), weights @ np.array(sentence.VALUES)[list(words)]


@styled
def merge_words() -> Figure:
    """The five words' leaves, their three shards and the whole: what each state stands for."""
    figure, ax = new_figure(8.0, 3.9)
    levels = [
        [((a,), a) for a in range(5)],
        [(shard, np.mean(shard)) for shard in SHARDS],
        [(range(5), 2.0)],
    ]
    for height, (below, above) in enumerate(itertools.pairwise(levels)):
        for words, x in below:
            parent = next(at for more, at in above if set(words) <= set(more))
            ax.plot([x, parent], [height, height + 1], color=GREY, lw=1, zorder=1)
    for height, level in enumerate(levels):
        for words, x in level:
            d, n = _sums(words)
            name = WORDS[words[0]] if height == 0 else ""
            label = f"{d}\n({n[0]}, {n[1]})"
            box = {"boxstyle": "round,pad=0.4", "fc": "white" if height == 0 else "#D8ECF8"}
            ax.text(x, height, label, ha="center", va="center", bbox=box | {"ec": BLUE})
            ax.text(x, height - 0.42, name, ha="center", va="center", style="italic")
    d, n = _sums(range(5))
    out = f"attention = ({n[0]}, {n[1]}) / {d} = ({n[0] / d:.2f}, {n[1] / d:.2f})"
    ax.text(2.45, 2, out, va="center", color=INK)
    for height, name in enumerate(("words", "shards", "all")):
        ax.text(-1.05, height, name, va="center", ha="center", color=GREY)
    ax.set(xlim=(-1.4, 4.7), ylim=(-0.6, 2.4))
    ax.axis("off")
    ax.set_title("What the states stand for: the sum of the weights, and of the weighted values")
    return figure.describe(
        """A tree of three levels. At the bottom the five words with their weights, 1, 2, 4, 1 and
        8, and their weighted values; above them the shards the cat, drank, and warm milk with the
        sums 3, 4 and 9; at the top 16 and (20, 36), whose quotient is the attention
        (1.25, 2.25)."""
    )


# ---------------------------------------------------------------- the tree of eight leaves


def eight_leaves() -> AttentionState:
    """The figure's leaves: (s, 1, v) of one key each, and one state without keys."""
    none = np.isinf(SCORES)
    return AttentionState(
        *(jnp.asarray(x, jnp.float32) for x in (SCORES, ~none * 1.0, (VALUES * ~none)[:, None]))
    )


def _draw_tree(ax, step: int, fontsize: float = 8.5) -> None:
    """The tree after `step` half rounds: an odd one has found the new pivots, not the sums."""
    levels = [eight_leaves()]
    while len(levels[-1].max) > 1:
        levels.append(tree_round(levels[-1], 2))
    shown = (step + 1) // 2
    x = np.arange(8.0)
    for level, states in enumerate(levels):
        m, d, n = (np.asarray(field) for field in states)
        for i in range(len(m)):
            if level > shown:
                ax.plot(x[i], level, "o", color=PALE, ms=6)
                continue
            sums = f"\nd {d[i]:.2f}\nn {n[i, 0]:.2f}" if 2 * level <= step else "\nd ?\nn ?"
            empty = d[i] == 0
            newest = level == shown and step > 0
            label = f"m {m[i]:.1f}" if np.isfinite(m[i]) else "m −∞"
            box = dict(
                boxstyle="round,pad=0.35",
                fc="white" if empty else "#D8ECF8" if newest else "#F6F6F6",
                ec=BLUE if newest else GREY,
            )
            ax.text(
                x[i],
                level,
                (label + sums).replace("-", "−"),
                ha="center",
                va="center",
                ma="left",
                bbox=box,
                fontsize=fontsize,
                color=GREY if empty else INK,
                zorder=3,
            )
        if level + 1 == len(levels):
            break
        parents = x.reshape(-1, 2).mean(1)
        pivots = np.repeat(np.asarray(levels[level + 1].max), 2)
        for i, parent in enumerate(np.repeat(parents, 2)):
            known = level + 1 <= shown
            wins = known and m[i] == pivots[i]
            color = PALE if not known else ORANGE if wins else GREY
            ax.plot([x[i], parent], [level, level + 1], color=color, lw=2.5 if wins else 1)
            if known:
                ax.text(
                    0.5 * (x[i] + parent),
                    level + 0.5,
                    f"×{np.exp(m[i] - pivots[i]):.2f}",
                    ha="center",
                    va="center",
                    fontsize=fontsize - 1,
                    color=ORANGE if wins else GREY,
                    bbox=dict(fc="white", ec="none", pad=0.8),
                )
        x = parents
    ax.set(xlim=(-0.6, 7.6), ylim=(-0.45, 3.45))
    ax.axis("off")


STEPS = (
    "Eight states, each of one key: m is its score, d = 1, n its value. The sixth has no keys.",
    "Round 1, pivots: each pair takes the larger m, and weights its children by exp(m − m′).",
    "Round 1, sums: the weighted d and n add up. No keys weigh 0.",
    "Round 2, pivots: the maximum runs on along the orange edges.",
    "Round 2, sums.",
    "Round 3, pivots: 4.0 is the maximum of all the scores.",
    "Round 3, sums: seven merges, three rounds.",
)


def _result() -> str:
    out, lse = finalize(reduce_tree(eight_leaves()))
    return f"out = n / d = {out[0]:.2f}     lse = m + log d = {lse:.2f}".replace("-", "−")


@styled
def merge_tree_frame(step: int = len(STEPS) - 1) -> Figure:
    """The merge of eight leaves after `step` of its six half rounds, every (m, d, n) shown."""
    figure, ax = new_figure(8.6, 4.9)
    _draw_tree(ax, step)
    ax.set_title(STEPS[step], loc="left", fontsize=11)
    if step == len(STEPS) - 1:
        ax.text(4.35, 3, _result(), va="center", color=INK, fontsize=10)
    return figure


@styled
def merge_tree() -> Figure:
    """The whole tree of eight leaves: every (m, d, n) and every weight."""
    figure = merge_tree_frame()
    figure.axes[0].set_title(
        "The running maximum along a tree: eight states merge in three rounds",
        loc="left",
        fontsize=11,
    )
    return figure.describe(
        """A binary tree of eight states (m, d, n), of one key each but the sixth, which has none.
        Edges carry the weight of each child; the thick orange ones come from the larger pivot,
        whose weight is 1. At the root m is 4.0, d 1.67, n 0.34, and the output n / d is 0.21."""
    )


@styled
def merge_tree_steps() -> Figure:
    """The leaves, and the tree after each of its three rounds."""
    figure, axes = new_figure(11.0, 7.4, nrows=2, ncols=2)
    for level, ax in enumerate(axes.flat):
        _draw_tree(ax, 2 * level, fontsize=6.5)
        title = f"After round {level}" if level else "Eight states; the sixth has no keys"
        ax.set_title(title, loc="left", fontsize=11)
    return figure.describe(
        """Four pictures of the same tree of eight states: the leaves alone, then after each of the
        three rounds, in which four, two and one merged states appear."""
    )


def write_merge_tree_gif(path: str | Path) -> None:
    """The frames of `merge_tree_frame` as an animation that repeats."""
    milliseconds = [2500] * (len(STEPS) - 1) + [5000]
    write_gif(path, map(merge_tree_frame, range(len(STEPS))), milliseconds)


FIGURES = {
    "merge_tree": merge_tree,
    "merge_tree_steps": merge_tree_steps,
    "merge_words": merge_words,
}
ANIMATIONS = {"merge_tree": write_merge_tree_gif}
