"""Rounds of reductions by the number of states: a figure of notebook 04."""

import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREEN, ORANGE, RED, Figure, new_figure
from labs.cost.work import count_merges, count_rounds, scalar_states
from treeattn import reduce_chain


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
            f"{arity} children a node",
            (largest, rounds[-1]),
            (6, 0),
            color=color,
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    few = range(2, 10)
    chain = [count_merges(reduce_chain, scalar_states(p))[1] for p in few]
    ax.plot(few, chain, color=ORANGE, ls="-.")
    ax.annotate(
        f"chain: on to {largest - 1} at {largest}",
        (few[-2], chain[-2]),
        (8, -2),
        color=ORANGE,
        textcoords="offset points",
        va="center",
    )
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
