"""Figures of the associative merge: the tree of states, its work and depth, its rounding."""

import functools
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from treeattn.cost.work import count_merges
from treeattn.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, new_figure
from treeattn.idea.state import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
    tree_round,
)

# Eight leaves of one key each, but the sixth, which has none.
SCORES = np.array([1.0, 3.0, 0.5, 2.0, -1.0, -np.inf, 4.0, 1.5])
VALUES = np.array([2.0, -1.0, 4.0, 1.0, 3.0, 0.0, 0.5, -2.0])


# ---------------------------------------------------------------- work and depth


def scalar_states(p: int) -> AttentionState:
    """The shapes of p states of one query and one value, for tracing only."""
    return jax.eval_shape(lambda: AttentionState.identity((p,), 1))


@functools.cache
def count_tree(p: int, arity: int) -> tuple[int, int, int]:
    """(rounds, work, depth) of `reduce_tree` over p states: each round's counts, added up."""
    if p == 1:
        return 0, 0, 0
    one_round = functools.partial(tree_round, arity=arity)
    work, depth = count_merges(one_round, scalar_states(p))
    left = jax.eval_shape(one_round, scalar_states(p)).max.shape[0]
    rounds, more_work, more_depth = count_tree(left, arity)
    return 1 + rounds, work + more_work, depth + more_depth


def merge_rounds(largest: int = 128) -> Figure:
    """Rounds against the number of states, to a power of two: chain, and trees at every p."""
    figure, ax = new_figure(7.0, 3.4)
    ps = np.arange(2, largest + 1)
    powers = 2 ** np.arange(1, largest.bit_length())
    chain = [count_merges(reduce_chain, scalar_states(p))[1] for p in powers]
    ax.plot(powers, chain, color=ORANGE, label="chain")
    for arity, color in ((2, BLUE), (3, GREEN), (4, RED)):
        rounds = [count_tree(p, arity)[0] for p in ps]
        ax.step(ps, rounds, where="mid", color=color, label=f"tree, {arity} children a node")
    ax.set(xlabel="states p", ylabel="rounds", xscale="log", yscale="log")
    ax.set_xticks([2, 4, 8, 16, 32, 64, 128], [2, 4, 8, 16, 32, 64, 128])
    ax.set_yticks([1, 2, 3, 4, 7, 15, 31, 63, 127], [1, 2, 3, 4, 7, 15, 31, 63, 127])
    ax.minorticks_off()
    ax.set_title(
        f"{largest} states: {chain[-1]} rounds as a chain, {count_tree(largest, 2)[0]} as a "
        f"binary tree, {largest - 1} merges either way",
        loc="left",
        fontsize=11,
    )
    ax.legend()
    return figure


# ---------------------------------------------------------------- rounding

# Every operation rounds to its own dtype, and compiling 1,024 leaves stays quick.
AS_WRITTEN = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


def random_shards(p: int, keys: int = 8, queries: int = 64, dv: int = 8) -> AttentionState:
    """States (p, queries) of p shards of `keys` keys in numpy float64; N(0, 1) scores, values."""
    rng = np.random.default_rng(0)
    s = rng.standard_normal((p, keys, queries))
    v = rng.standard_normal((p, keys, queries, dv))
    m = s.max(1)
    w = np.exp(s - m[:, None])
    return AttentionState(m, w.sum(1), (w[..., None] * v).sum(1))


def chain_prefixes(states: AttentionState) -> AttentionState:
    """All prefixes, each from the one before by one merge."""
    start = AttentionState.identity(
        states.max.shape[1:], states.numerator.shape[-1], states.max.dtype
    )
    return jax.lax.scan(lambda a, b: (merge(a, b),) * 2, start, states)[1]


def output_chain_prefixes(states: AttentionState) -> AttentionState:
    """The same, but what is carried from merge to merge is (out, lse), in the states' dtype."""
    dtype = states.max.dtype

    def add(carry, state):
        out, lse = finalize(merge(from_output(*carry), state))
        return (out.astype(dtype), lse.astype(dtype)), from_output(out, lse)

    shape, dv = states.max.shape[1:], states.numerator.shape[-1]
    start = jnp.zeros((*shape, dv), dtype), jnp.full(shape, -jnp.inf, dtype)
    return jax.lax.scan(add, start, states)[1]


def tree_prefixes(states: AttentionState) -> AttentionState:
    """The binary trees over the first 1, 2, 4, … states."""
    levels = [states]
    while len(levels[-1].max) > 1:
        levels.append(tree_round(levels[-1], 2))
    return jax.tree.map(lambda *x: jnp.stack([level[0] for level in x]), *levels)


@functools.cache
def rounding_errors(p: int = 1024) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """(dtype, order) -> (numbers of states merged, relative errors of out).

    The error is ‖out − exact‖ / ‖exact‖ against float64, the median over 64 queries. The
    shards' states are exact until they are rounded to the dtype in which they are merged.
    """
    shards = random_shards(p)
    every, powers = np.arange(1, p + 1), 2 ** np.arange(p.bit_length())
    weights = np.exp(shards.max - shards.max.max(0))
    exact = np.cumsum(shards.numerator * weights[..., None], 0)
    exact /= np.cumsum(shards.denominator * weights, 0)[..., None]
    orders = {
        "chain": (chain_prefixes, every),
        "tree": (tree_prefixes, powers),
        "scan": (scan_states, every),
        "chain of (out, lse)": (output_chain_prefixes, every),
    }
    errors = {}
    for dtype in ("float32", "float16", "bfloat16"):
        rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.dtype(dtype)), shards)  # noqa: B023
        for order, (prefixes, counts) in orders.items():
            run = jax.jit(lambda x, f=prefixes: finalize(f(x))[0], compiler_options=AS_WRITTEN)
            out, wanted = np.asarray(run(rounded), np.float64), exact[counts - 1]
            error = np.linalg.norm(out - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
            errors[dtype, order] = counts, np.median(error, axis=-1)
    return errors


def merge_rounding() -> Figure:
    """Rounding error against the number of states merged, by order and dtype of the carry."""
    errors = rounding_errors()
    figure, axes = new_figure(9.0, 3.6, ncols=3, sharey=True)
    styles = {
        "chain of (out, lse)": dict(color=RED, lw=1, ls=(0, (2, 1))),
        "chain": dict(color=ORANGE),
        "scan": dict(color=SKY, lw=1),
        "tree": dict(color=BLUE, marker="o", ms=4, ls="none"),
    }
    for ax, dtype in zip(axes, ("float32", "float16", "bfloat16"), strict=True):
        for order, style in styles.items():
            ax.plot(*errors[dtype, order], label=order, **style)
        ax.axhline(float(jnp.finfo(dtype).eps), color=GREY, lw=0.8)
        ax.text(
            1024, float(jnp.finfo(dtype).eps) * 0.5, "machine ε", color=GREY, ha="right", va="top"
        )
        ax.set(xscale="log", yscale="log", xlabel="states merged")
        ax.set_xticks([1, 4, 16, 64, 256, 1024], [1, 4, 16, 64, 256, 1024])
        ax.minorticks_off()
        ax.set_title(f"{dtype} states", loc="left", fontsize=10)
    axes[0].set_ylabel("relative error of the output")
    axes[0].legend(loc="upper left")
    figure.suptitle(
        "Along a tree the rounding error stays near the dtype's ε; along a chain it accumulates",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure


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
            empty, newest = d[i] == 0, level == shown and step > 0
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


def merge_tree_frame(step: int = len(STEPS) - 1) -> Figure:
    """The merge of eight leaves after `step` of its six half rounds, every (m, d, n) shown."""
    figure, ax = new_figure(8.6, 4.9)
    _draw_tree(ax, step)
    ax.set_title(STEPS[step], loc="left", fontsize=11)
    if step == len(STEPS) - 1:
        ax.text(4.35, 3, _result(), va="center", color=INK, fontsize=10)
    return figure


def merge_tree() -> Figure:
    """The whole tree of eight leaves: every (m, d, n) and every weight."""
    figure = merge_tree_frame()
    figure.axes[0].set_title(
        "The running maximum along a tree: eight states merge in three rounds",
        loc="left",
        fontsize=11,
    )
    return figure


def merge_tree_steps() -> Figure:
    """The leaves, and the tree after each of its three rounds."""
    figure, axes = new_figure(11.0, 7.4, nrows=2, ncols=2)
    for level, ax in enumerate(axes.flat):
        _draw_tree(ax, 2 * level, fontsize=6.5)
        title = f"After round {level}" if level else "Eight states; the sixth has no keys"
        ax.set_title(title, loc="left", fontsize=11)
    return figure


def write_merge_tree_gif(path: str | Path) -> None:
    """The frames of `merge_tree_frame` as an animation that repeats."""
    frames = []
    for step in range(len(STEPS)):
        png = io.BytesIO()
        merge_tree_frame(step).savefig(png, format="png")
        frames.append(Image.open(png).convert("RGB").quantize(48))
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=[2500] * (len(frames) - 1) + [5000],
        loop=0,
        optimize=True,
    )


FIGURES = {
    "merge_tree": merge_tree,
    "merge_tree_steps": merge_tree_steps,
    "merge_rounds": merge_rounds,
    "merge_rounding": merge_rounding,
}
ANIMATIONS = {"merge_tree": write_merge_tree_gif}
