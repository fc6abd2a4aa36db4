"""Counts: functions of the package that a warm call takes in Python; merges of a program."""

import sys
from pathlib import Path

import jax
from jax.extend.core import Literal

import treeattn
from treeattn import AttentionState

PACKAGE = str(Path(treeattn.__file__).parent)


def python_calls(function, *arguments, **options) -> int:
    """Calls of the package's functions in `function(*arguments, **options)`, called before."""
    for _ in range(2):  # traced, compiled and known to be
        function(*arguments, **options)
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        function(*arguments, **options)
    finally:
        sys.setprofile(None)
    return count


def count_merges(program, *arguments):
    """(work, depth): the merges of a traced program, and those on its longest path.

    Each merge takes one maximum of two pivots, and the program must take no other.
    """
    with jax.disable_jit():  # loops are unrolled, and functions inlined
        jaxpr = jax.make_jaxpr(program)(*arguments).jaxpr
    work, depth = 0, {}

    def deepest(inputs):
        return max((depth.get(x, 0) for x in inputs if not isinstance(x, Literal)), default=0)

    for eqn in jaxpr.eqns:
        merges = eqn.primitive.name == "max"
        work += eqn.outvars[0].aval.size if merges else 0
        depth |= dict.fromkeys(eqn.outvars, deepest(eqn.invars) + merges)
    return work, deepest(jaxpr.outvars)


def scalar_states(p):
    """The shapes of p states of one query and one value, for tracing."""
    return jax.eval_shape(lambda: AttentionState.identity((p,), 1))
