"""Figures of the associative merge: trees of states, their numbers shown (notebook 04)."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from figures import sentence
from figures.canvas import styled, write_gif
from figures.sentence import WEIGHTS, WORDS
from figures.style import BLUE, GREY, INK, NOTE, ORANGE, PALE, Figure, new_figure
from treeattn import AttentionState, finalize, merge

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
        ax.text(-1.05, height, name, va="center", ha="center", color=NOTE)
    ax.set(xlim=(-1.4, 4.7), ylim=(-0.6, 2.4))
    ax.axis("off")
    ax.set_title("What the states stand for: the sum of the weights, and of the weighted values")
    return figure.describe(
        """A tree of three levels. At the bottom the five words with their weights, 1, 2, 4, 1 and
        8, and their weighted values; above them the shards the cat, drank, and warm milk with the
        sums 3, 4 and 9; at the top 16 and (20, 36), whose quotient is the attention
        (1.25, 2.25)."""
    )


# ---------------------------------------------------------------- the same tree, as it is stored

# The five words, and after the third a leaf without keys: the pairs are the shards above.
LEAVES = (0, 1, 2, None, 3, 4)


def six_leaves() -> AttentionState:
    """The figure's leaves: (s, 1, v) of one word each, and one state without keys."""
    m = [-np.inf if a is None else np.log(WEIGHTS[a]) for a in LEAVES]
    d = [0.0 if a is None else 1.0 for a in LEAVES]
    n = [(0, 0) if a is None else sentence.VALUES[a] for a in LEAVES]
    return AttentionState(*(jnp.asarray(x, jnp.float32) for x in (m, d, n)))


def _levels() -> list[AttentionState]:
    """The leaves, and the states after each round of the tree."""
    levels = [six_leaves()]
    while (count := len(levels[-1].max)) > 1:
        left, right, alone = (
            jax.tree.map(lambda x, part=part: x[part], levels[-1])
            for part in (slice(0, count - 1, 2), slice(1, None, 2), slice(count - count % 2, None))
        )
        levels.append(jax.tree.map(lambda *x: jnp.concatenate(x), merge(left, right), alone))
    return levels


def _pivot(m: float) -> str:
    return f"m log {np.exp(m):.0f}" if np.isfinite(m) else "m −∞"


def _stored(d: float, n: np.ndarray) -> str:
    x, y = (f"{number:.4g}" for number in n)
    return f"\nd {d:.4g}\nn ({x}, {y})"


def _draw_box(ax, place, label: str, fontsize: float, *, empty: bool, newest: bool) -> None:
    box = dict(
        boxstyle="round,pad=0.35",
        fc="white" if empty else "#D8ECF8" if newest else "#F6F6F6",
        ec=BLUE if newest else GREY,
    )
    color = NOTE if empty else INK
    style = dict(ha="center", va="center", ma="left", bbox=box, fontsize=fontsize, zorder=3)
    ax.text(*place, label, color=color, **style)


def _draw_edge(ax, child, parent, fontsize: float, weight: float | None) -> None:
    """A line up, with the child's weight; without one, if its parent's pivot is not yet known."""
    wins = weight == 1
    color = PALE if weight is None else ORANGE if wins else GREY
    ax.plot(*zip(child, parent, strict=True), color=color, lw=2.5 if wins else 1)
    if weight is not None:
        middle = np.mean([child, parent], axis=0)
        box = dict(fc="white", ec="none", pad=0.8)
        style = dict(ha="center", va="center", fontsize=fontsize - 1, bbox=box)
        ax.text(*middle, f"×{weight:.4g}", color=ORANGE if wins else NOTE, **style)


def _draw_tree(ax, step: int, fontsize: float = 8.5) -> None:
    """The tree after `step` half rounds: an odd one has found the new pivots, not the sums."""
    levels = _levels()
    shown = (step + 1) // 2
    x = np.arange(6.0)
    for level, states in enumerate(levels):
        m = states.max.tolist()
        d = states.denominator.tolist()
        n = np.asarray(states.numerator)
        for i in range(len(m)):
            if level > shown:
                ax.plot(x[i], level, "o", color=PALE, ms=6)
                continue
            sums = _stored(d[i], n[i]) if 2 * level <= step else "\nd ?\nn ?"
            newest = level == shown and step > 0
            label = _pivot(m[i]) + sums
            _draw_box(ax, (x[i], level), label, fontsize, empty=d[i] == 0, newest=newest)
            if level == 0 and LEAVES[i] is not None:
                word = WORDS[LEAVES[i]]
                ax.text(x[i], -0.47, word, ha="center", va="center", style="italic")
        if level + 1 == len(levels):
            break
        above = np.asarray(levels[level + 1].max)
        parents = np.array([x[i : i + 2].mean() for i in range(0, len(x), 2)])
        for i in range(len(m)):
            weight = round(float(np.exp(m[i] - above[i // 2])), 4) if level < shown else None
            _draw_edge(ax, (x[i], level), (parents[i // 2], level + 1), fontsize, weight)
        x = parents
    ax.set(xlim=(-0.6, 5.6), ylim=(-0.6, 3.45))
    ax.axis("off")


STEPS = (
    "Five words and a leaf without keys. In each box: m, a word's score; d = 1; n, its value.",
    "Round 1, pivots: each pair takes its larger m as m′, and weights its children by exp(m − m′).",
    "Round 1, sums: the weighted d and n add up. No keys weigh 0.",
    "Round 2, pivots: log 4 wins; the third state has no partner and goes on as it is.",
    "Round 2, sums.",
    "Round 3, pivots: log 8, of milk, is the maximum of all the scores.",
    "Round 3, sums: five merges, three rounds.",
)


def _result() -> str:
    out, lse = (x[0] for x in finalize(_levels()[-1]))
    return f"out = n / d = ({out[0]:.2f}, {out[1]:.2f})\nlse = m + log d = log {np.exp(lse):.0f}"


@styled
def merge_tree_frame(step: int = len(STEPS) - 1) -> Figure:
    """The merge of six leaves after `step` of its six half rounds, every (m, d, n) shown."""
    figure, ax = new_figure(8.6, 4.9)
    _draw_tree(ax, step)
    ax.set_title(STEPS[step], loc="left", fontsize=11)
    if step == len(STEPS) - 1:
        ax.text(3.75, 3, _result(), va="center", color=INK, fontsize=10)
    return figure


@styled
def merge_tree() -> Figure:
    """The whole tree of six leaves: every (m, d, n) and every weight."""
    figure = merge_tree_frame()
    figure.axes[0].set_title(
        "The running maximum along a tree: six states merge in three rounds",
        loc="left",
        fontsize=11,
    )
    return figure.describe(
        """A binary tree of six states (m, d, n): the five words, and after the third a leaf without
        keys. Edges carry the weight of each child; the thick orange ones come from the larger
        pivot, whose weight is 1. The pairs are the shards the cat, drank, and warm milk; the third
        has no partner in the second round. At the root m is log 8, d 2, n (2.5, 4.5), and the
        output n / d is (1.25, 2.25)."""
    )


def write_merge_tree_gif(path: str | Path) -> None:
    """The frames of `merge_tree_frame` as an animation that repeats."""
    milliseconds = [2500] * (len(STEPS) - 1) + [5000]
    write_gif(path, map(merge_tree_frame, range(len(STEPS))), milliseconds)


# ---------------------------------------------------------------- rounding


@styled
def counted(chain, tree) -> Figure:
    """The denominators d of 1, 2, 3, … keys of score 0, merged as a chain and as a tree."""
    figure, ax = new_figure(6.0, 2.8)
    keys, ends = np.arange(1, len(chain) + 1), {}
    for name, d, color in (("tree", tree, BLUE), ("chain", chain, ORANGE)):
        d = np.asarray(d, float)
        ax.plot(keys, d, color=color, lw=2)
        ax.text(keys[-1] * 1.02, d[-1], f"{name}: {d[-1]:.0f}", color=color, va="center")
        ends[name] = f"{d[-1]:.0f}"
    ax.set(xlabel="keys", ylabel="d", xlim=(0, 1.2 * len(chain)), ylim=(0, None))
    return figure.describe(
        f"""The denominator d against the number of keys. Along a tree it ends at {ends["tree"]};
        along a chain it rises to {ends["chain"]} and stays there."""
    )


FIGURES = {
    "merge_tree": merge_tree,
    "merge_words": merge_words,
}
ANIMATIONS = {"merge_tree": write_merge_tree_gif}
