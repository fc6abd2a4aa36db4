"""Work and depth of reductions, counted round by round (notebook 04)."""

import functools

import jax
import numpy as np

from treeattn.cost.work import count_merges
from treeattn.figures.canvas import styled
from treeattn.figures.style import BLUE, GREEN, ORANGE, RED, Figure, new_figure
from treeattn.idea.state import AttentionState, reduce_chain, tree_round


def scalar_states(p: int) -> AttentionState:
    """The shapes of p states of one query and one value, for tracing only."""
    return jax.eval_shape(lambda: AttentionState.identity((p,), 1))


@functools.cache
def states_left(p: int, arity: int) -> int:
    """After one round of the tree: the shape of a traced `tree_round`."""
    one_round = functools.partial(tree_round, arity=arity)
    return jax.eval_shape(one_round, scalar_states(p)).max.shape[0]


def count_rounds(p: int, arity: int) -> int:
    """Rounds of `reduce_tree` over p states, until one is left."""
    return 0 if p == 1 else 1 + count_rounds(states_left(p, arity), arity)


@functools.cache
def count_tree(p: int, arity: int) -> tuple[int, int, int]:
    """(rounds, work, depth) of `reduce_tree` over p states: each round's counts, added up."""
    if p == 1:
        return 0, 0, 0
    one_round = functools.partial(tree_round, arity=arity)
    work, depth = count_merges(one_round, scalar_states(p))
    rounds, more_work, more_depth = count_tree(states_left(p, arity), arity)
    return 1 + rounds, work + more_work, depth + more_depth


@styled
def merge_rounds(largest: int = 128) -> Figure:
    """Rounds against the number of states, on a logarithmic axis: trees at every p, and a chain."""
    figure, ax = new_figure(7.0, 3.4)
    near = [k**i + j for k in (2, 3, 4) for i in range(8) for j in (0, 1)]  # where steps can be
    ps = sorted({p for p in near if 2 <= p <= largest})
    styles = (2, BLUE, "-", "o"), (3, GREEN, "--", "^"), (4, RED, ":", "s")
    for arity, color, line, marker in styles:
        rounds = [count_rounds(p, arity) for p in ps]
        powers = [arity**i for i in range(1, 8) if arity**i <= largest]
        ax.step(ps, rounds, where="mid", color=color, ls=line)
        ax.plot(powers, range(1, len(powers) + 1), marker, color=color, ms=5)
        ax.annotate(
            f"{arity} children a node", (largest, rounds[-1]), (6, 0), color=color,
            textcoords="offset points", va="center", annotation_clip=False,
        )  # fmt: skip
    few = range(2, 10)
    chain = [count_merges(reduce_chain, scalar_states(p))[1] for p in few]
    ax.plot(few, chain, color=ORANGE, ls="-.")
    ax.annotate(
        f"chain: on to {largest - 1} at {largest}", (few[-2], chain[-2]), (8, -2), color=ORANGE,
        textcoords="offset points", va="center",
    )  # fmt: skip
    ax.set(
        xlabel="states p", ylabel="rounds", xscale="log", ylim=(0, 8.6), xlim=(1.9, largest * 1.05)
    )
    ax.set_xticks(2 ** np.arange(1, 8), 2 ** np.arange(1, 8))
    ax.minorticks_off()
    ax.set_title("Against a logarithmic axis the rounds of a tree rise along a straight line")
    return figure.describe(
        f"""Rounds against the number of states p, 2 to {largest}, on a logarithmic axis. Trees of
        2, 3 and 4 children a node are staircases along straight lines that end at 7, 5 and 4
        rounds; their corners, at the powers of 2, 3 and 4, are marked. The chain leaves them at
        once, and runs out of the picture at 9 states."""
    )


FIGURES = {"merge_rounds": merge_rounds}
