"""Anybody's kernel behind the interface of `attend`: a function that returns a state.

    kernel(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False)

What it is given has been checked: there is at least one query, one key and one entry of a head, and
the arrays lie and agree as in `attend`. It is given those options only that a call has, and `scale`
always. (out, lse) will do for a state. What it returns is checked, too, for shapes and dtypes; its
numbers are its own affair, of which `treeattn_conformance.check_attention` asks.
"""

import functools
import inspect

import jax.numpy as jnp
import numpy as np

from treeattn.idea.arrays import Array, varying_like
from treeattn.idea.state import AttentionState, from_output
from treeattn.kernel.inputs import Implementation, Inputs

OPTIONS = "mask", "bias", "kv_lengths", "causal"


def name_of(implementation: Implementation) -> str:
    """How errors call it."""
    if isinstance(implementation, functools.partial):
        return name_of(implementation.func)
    return getattr(implementation, "__name__", type(implementation).__name__)


def check_hashable(kernel) -> None:
    """Raise a TypeError for a function that JAX could not compile a program for."""
    try:
        hash(kernel)
    except TypeError:
        raise TypeError(
            f"implementation: expected a name or a hashable function, got {name_of(kernel)}"
        ) from None


def obstacle(inputs: Inputs, kernel) -> str | None:
    """Why the function cannot take these arguments, naming the argument; None if it can."""
    if inputs.intervals is not None:
        return (
            f"ends: the implementation {name_of(kernel)} is given none; use "
            "implementation='blockwise'"
        )
    taken = _options_taken(kernel)
    for name in _options(inputs):
        if name in taken:
            continue
        about = ""
        if name == "kv_lengths":
            about = ", which keys have, too, that devices cannot share evenly"
        return f"{name}: the implementation {name_of(kernel)} takes no {name}{about}"
    return None


def attend_by_hook(inputs: Inputs) -> AttentionState:
    """The state by the function that is the inputs' implementation.

    Raises ValueError for an option that it does not take, and what `_checked_state` raises.
    """
    kernel = inputs.implementation
    if (problem := obstacle(inputs, kernel)) is not None:
        raise ValueError(problem)
    shape, dv, dtype = inputs.state_shape
    if 0 in (*inputs.q.shape, *inputs.v.shape):
        return varying_like(AttentionState.identity(shape, dv, dtype), *inputs.arrays)
    scale = inputs.scale
    if inputs.factor is not None:
        scale = scale * inputs.factor.astype(dtype)
    found = kernel(inputs.q, inputs.k, inputs.v, scale=scale, **_options(inputs))
    return varying_like(_checked_state(found, inputs), *inputs.arrays)


def _options(inputs: Inputs) -> dict:
    """Those of `OPTIONS` that these inputs have."""
    found = {"mask": inputs.mask, "bias": inputs.bias, "kv_lengths": inputs.lengths}
    found = {name: x for name, x in found.items() if x is not None}
    return found | {"causal": True} if inputs.causal else found


def _options_taken(kernel) -> tuple[str, ...]:
    """Those of `OPTIONS` that the function has parameters for."""
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):  # what is not written in Python may have no signature
        return OPTIONS
    if any(x.kind == x.VAR_KEYWORD for x in parameters):
        return OPTIONS
    by_name = {x.name for x in parameters if x.kind in (x.KEYWORD_ONLY, x.POSITIONAL_OR_KEYWORD)}
    return tuple(name for name in OPTIONS if name in by_name)


def _checked_state(found, inputs: Inputs) -> AttentionState:
    """What the function returned, as a state in the accumulation dtype.

    Raises TypeError for what is neither a state nor (out, lse), and for a dtype that is narrower
    than sums are kept in; ValueError for other shapes. All of them name `implementation`.
    """
    name = name_of(inputs.implementation)
    shape, dv, dtype = inputs.state_shape
    if isinstance(found, AttentionState):
        parts = found._asdict()
        shapes = dict(zip(parts, (shape, shape, (*shape, dv)), strict=True))
        narrow = ()
    elif isinstance(found, tuple | list) and len(found) == 2:
        parts = dict(zip(("out", "lse"), found, strict=True))
        shapes = {"out": (*shape, dv), "lse": shape}
        narrow = ("out",)  # rounded once, as a result is
    else:
        raise TypeError(
            f"implementation: expected {name} to return an AttentionState or (out, lse), got "
            f"{type(found).__name__}"
        )
    for part, x in parts.items():
        _check_part(name, part, x, shapes[part], None if part in narrow else dtype)
    parts = {part: jnp.asarray(x).astype(dtype) for part, x in parts.items()}
    if "lse" in parts:
        return from_output(**parts)
    return AttentionState(**parts)


def _check_part(name: str, part: str, x, shape: tuple[int, ...], dtype) -> None:
    """Raise the error that says what `part` of the result should have been.

    dtype: that it must have, or a wider one; None for any floating-point dtype
    """
    if not isinstance(x, Array | np.generic) or not jnp.issubdtype(x.dtype, jnp.floating):
        came = getattr(x, "dtype", type(x).__name__)
        raise TypeError(
            f"implementation: expected {name}'s {part} to be a floating-point array, got {came}"
        )
    if dtype is not None and jnp.promote_types(x.dtype, dtype) != x.dtype:
        raise TypeError(
            f"implementation: expected {name}'s {part} in {dtype} or wider, got {x.dtype}"
        )
    axes = "(batch, q_len, heads, value head_dim)"
    if len(shape) == 3:
        axes = "(batch, q_len, heads)"
    if x.shape != shape:
        raise ValueError(
            f"implementation: expected {name}'s {part} {axes} = {shape}, got {x.shape}"
        )
