"""How much a program computes: its operations, and the merges along its longest path."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal


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
    traced = jax.make_jaxpr(program)(*arguments)
    work, depths = _walk(traced.jaxpr, [0] * len(traced.jaxpr.invars))
    return work, max(depths, default=0)


def _walk(jaxpr, depths: list[int]) -> tuple[int, list[int]]:
    """The work in `jaxpr`, and the depth of each output when its inputs have `depths`."""
    depth = dict(zip(jaxpr.invars, depths, strict=True))
    work = 0
    for eqn in jaxpr.eqns:
        inputs = [0 if isinstance(x, Literal) else depth.get(x, 0) for x in eqn.invars]
        inner = [x for x in eqn.params.values() if isinstance(x, ClosedJaxpr)]
        if eqn.primitive.name == "max":
            work += eqn.outvars[0].aval.size
            outputs = [1 + max(inputs)]
        elif eqn.primitive.name == "scan":
            # What the loop slices or stacks has an axis more outside it.
            body = inner[0].jaxpr
            carries = sum(map(_same_rank, eqn.outvars, body.outvars))
            consts = sum(map(_same_rank, eqn.invars, body.invars)) - carries
            outputs = inputs[consts : consts + carries]
            outputs += [0] * (len(eqn.outvars) - carries)
            for _ in range(eqn.params["length"]):
                more, outputs = _walk(body, inputs)
                work += more
                inputs[consts : consts + carries] = outputs[:carries]
        elif inner:
            more, outputs = _walk(inner[0].jaxpr, inputs)
            work += more
        else:
            outputs = [max(inputs, default=0)] * len(eqn.outvars)
        depth |= dict(zip(eqn.outvars, outputs, strict=True))
    return work, [0 if isinstance(x, Literal) else depth.get(x, 0) for x in jaxpr.outvars]


def _same_rank(x, y) -> bool:
    return x.aval.ndim == y.aval.ndim
