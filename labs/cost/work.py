"""How much a program computes: its operations, and the merges along its longest path."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from treeattn.idea.state import AttentionState, tree_round


def flops(function: Callable, *shapes: tuple[int, ...]) -> float:
    """Floating-point operations of the compiled program, for float32 arrays of these shapes."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().cost_analysis()["flops"]


def count_merges(program: Callable, *arguments) -> tuple[int, int]:
    """(work, depth) of `program(*arguments)`: its merges, and those on its longest path.

    Read off the traced program: each merge takes one maximum of two pivots, so the work is
    the number of pivots that come out of a maximum, and the depth counts the maxima that
    feed one another. The program must take no other maximum.
    """
    with jax.disable_jit():  # loops are unrolled, and functions inlined
        jaxpr = jax.make_jaxpr(program)(*arguments).jaxpr
    work = 0
    depth = {}

    def deepest(inputs) -> int:
        return max((depth.get(x, 0) for x in inputs if not isinstance(x, Literal)), default=0)

    for eqn in jaxpr.eqns:
        merges = eqn.primitive.name == "max"
        work += eqn.outvars[0].aval.size if merges else 0
        depth |= dict.fromkeys(eqn.outvars, deepest(eqn.invars) + merges)
    return work, deepest(jaxpr.outvars)


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
