"""How much a program computes: its operations, and the merges along its longest path."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Literal


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
    work, depth = 0, {}

    def deepest(inputs) -> int:
        return max((depth.get(x, 0) for x in inputs if not isinstance(x, Literal)), default=0)

    for eqn in jaxpr.eqns:
        merges = eqn.primitive.name == "max"
        work += eqn.outvars[0].aval.size if merges else 0
        depth |= dict.fromkeys(eqn.outvars, deepest(eqn.invars) + merges)
    return work, deepest(jaxpr.outvars)
