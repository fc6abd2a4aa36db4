"""Attention on one device: queries and keys in, a state out.

Layouts are those of `jax.nn.dot_product_attention`: queries (b, l, h, d), keys (b, n, h_kv, d),
values (b, n, h_kv, dv); query head i reads key head i // (h // h_kv).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from treeattn import flash
from treeattn.blocks import attend_blockwise
from treeattn.checks import Array, check_choice, check_floating
from treeattn.inputs import (
    Bias,
    Inputs,
    Keys,
    Lengths,
    Mask,
    Output,
    Queries,
    Scale,
    Values,
    check_inputs,
    gather_inputs,
)
from treeattn.plain import attend_plain
from treeattn.state import AttentionState, check_state, finalize, from_output

# A name of IMPLEMENTATIONS, a user's function, or None for the fastest that can run.
Implementation = str | Callable[..., object] | None


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask = None,
    bias: Bias = None,
    kv_lengths: Lengths = None,
    causal: bool = False,
    scale: Scale = None,
    implementation: Implementation = None,
) -> AttentionState:
    """The state of each query after its keys: fields (b, l, h) and numerator (b, l, h, dv).

    >>> q, k, v = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 5))
    >>> state = attend(q, k, v)
    >>> print(state.max.shape, state.numerator.shape, state.denominator[0, 0])
    (1, 1, 2) (1, 1, 2, 5) [3. 3.]

    q:          (b, l, h, d), floating-point; k (b, n, h_kv, d) and v (b, n, h_kv, dv). h is a
                multiple of h_kv. k and v share a dtype, which may differ from q's, down to float8:
                they are widened a block at a time, except by "plain".
    mask:       True where a query may see a key; broadcasts to (b, h, l, n) as in NumPy. For
                padding pass (b, 1, 1, n).
    bias:       added to the scaled scores; broadcasts in the same way. −∞ hides the key.
    kv_lengths: (b,), or one number: how many of a text's keys are in use. Traced lengths are
                clipped to 0 … n.
    causal:     query i sees keys 0 … i; there are as many keys as queries.
    scale:      multiplies q·k; 1/√d when None. A number is compiled in, a JAX array's value is not.
    implementation: "plain", "blockwise" or "flash". None chooses the fastest one that can run.
                Or a function of yours,

                    kernel(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False)

                that returns (out, lse), an AttentionState, or a state of its own kind for your own
                `method`. It gets only the options that the call has. It is compiled into the
                program and differentiated as it is. `tree_decode` also passes kv_lengths if devices
                cannot share the keys evenly. Define it once, because every new lambda is compiled.

    The state is in float32, or float64 if q or k is. Scores and sums beyond the dtype's range
    count as its largest number; a score is NaN if some of its products are above the range and
    others below. A query that sees no key has the state (−∞, 0, 0) and zero gradients. Keys that no
    query of their text and head sees may be NaN or ∞; a NaN that one query sees may reach other
    queries of the head. (2024 eq. 2–4, 2025 eq. 1–3.)

    On several devices, inside jit, implementation=None sends no more than
    `jax.nn.dot_product_attention` and holds all scores; for sharded keys call `tree_decode`. Only
    the gradient of a loss that is linear in the output sends more, because JAX takes it without
    the output.

    Raises TypeError or ValueError that names the argument. Outside jit, the call waits until
    lengths and scale are computed, to check them.
    """
    may_split = xla_may_split(q, k, v)
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale, causal, may_split)
    return _on_its_devices(inputs, implementation, False)


def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask = None,
    bias: Bias = None,
    kv_lengths: Lengths = None,
    causal: bool = False,
    scale: Scale = None,
    implementation: Implementation = None,
) -> Output:
    """softmax(scale · q kᵀ) v, (b, l, h, dv) in the queries' dtype (2024 eq. 5, 2025 eq. 5).

    Arguments and errors as in `attend`, whose state it finalizes. A query that sees no key has
    output 0.

    >>> q, k = jnp.zeros((1, 1, 1, 4)), jnp.zeros((1, 2, 1, 4))
    >>> print(attention(q, k, jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)).ravel())
    [2.]
    """
    may_split = xla_may_split(q, k, v)
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale, causal, may_split)
    return _on_its_devices(inputs, implementation, True)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _attend(inputs: Inputs, implementation: Implementation, finalized: bool):
    check_inputs(inputs)
    state = attend_inputs(inputs, implementation)
    return output_of(state, inputs)[0] if finalized else state


def output_of(state: AttentionState, inputs: Inputs):
    """(out, lse) of the state, with out in the queries' dtype."""
    check_state(implementation=state)
    out, lse = finalize(state)
    return out.astype(inputs.q.dtype), lse


def check_implementation(implementation: Implementation, q) -> None:
    """Raise what `check_choice` raises, and ValueError for flash if q is on another device."""
    if implementation is not None:
        check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if implementation == "flash":
        flash.check_device(q)


def _on_its_devices(inputs: Inputs, implementation: Implementation, finalized: bool):
    """The state, or the output if `finalized`, on the devices that hold the arrays.

    Raises what `check_implementation` raises, and ValueError for keys sharded along Explicit axes,
    which a function of the user's may take.
    """
    check_implementation(implementation, inputs.q)
    spec = jax.typeof(inputs.k).sharding.spec
    if any(spec[1:2]) and not callable(implementation):
        raise ValueError(
            f"k: its keys are sharded along {spec[1]!r}, got {spec}; call tree_decode or "
            "ring_attention, or jax.reshard k"
        )
    return _attend(inputs, implementation, finalized)


def xla_may_split(*arrays) -> bool:
    """Whether XLA may split a program with these arguments over several devices by itself.

    False if there is only one device, in the context's mesh or at all, and inside `shard_map`,
    where each device runs the program by itself. Elsewhere True for traced arrays, whose sharding
    is unknown. For concrete arrays, whether one of them is on several devices.
    """
    context = jax.sharding.get_abstract_mesh()
    sizes = zip(context.axis_sizes, context.axis_types, strict=True)
    if not context.empty and all(n == 1 or kind == AxisType.Manual for n, kind in sizes):
        return False
    if jax.device_count() == 1:
        return False
    if any([isinstance(x, jax.core.Tracer) for x in arrays]):
        return True
    return any([isinstance(x, jax.Array) and len(x.devices()) > 1 for x in arrays])


def attend_inputs(inputs: Inputs, implementation: Implementation):
    """`attend` for checked inputs, inside a trace: a state, or a user's state of another kind.

    Here alone is decided what runs. None is "plain" for symbolic sizes, as `jax.export` has them;
    flash on a CUDA device if there are many queries and flash can compute the call; "plain" where
    XLA may split the arrays, because there "blockwise" would send every block of sharded keys to
    every device; else "blockwise".
    """
    if inputs.q.size == 0 or inputs.k.shape[1] == 0:  # most kernels fail on empty arrays
        return AttentionState.identity(inputs.q.shape[:3], inputs.v.shape[-1], inputs.dtype)
    if callable(implementation):
        return _attend_by_function(inputs, implementation)
    if inputs.bias is not None:
        inputs = inputs.replace(bias=inputs.bias.astype(inputs.dtype))
    if implementation is None:
        symbolic = not isinstance(inputs.q.size * inputs.k.size, int)
        if not symbolic and flash.is_best(inputs):
            # The platform is known only when the program is lowered.
            return jax.lax.platform_dependent(
                inputs, cuda=flash.flash_attend, default=attend_blockwise
            )
        # The sizes of blocks are numbers, so "blockwise" takes no symbolic size.
        implementation = "plain" if symbolic or inputs.may_split else "blockwise"
    if implementation == "flash" and (reason := flash.why_not(inputs)) is not None:
        raise ValueError(reason)
    return IMPLEMENTATIONS[implementation](inputs)


IMPLEMENTATIONS = {
    "plain": attend_plain,  # holds all scores, and XLA can split it over devices
    "blockwise": attend_blockwise,  # the same in bounded memory, and faster
    "flash": flash.flash_attend,  # flash-attn-jax's CUDA kernel: 16 bits, no mask, no bias
}


def _attend_by_function(inputs: Inputs, kernel: Callable):
    """The state by a user's kernel, which gets the options that this call has.

    (out, lse) and an AttentionState are checked, and become a state in the accumulation dtype. A
    state of the kernel's own kind is returned as it is, unchecked.

    Raises TypeError for None, one array, and a tuple or list of other than two entries, and if lse
    or a field of the state has a narrower dtype than the accumulation's. Raises ValueError if
    shapes do not fit. These errors name `implementation`. If the kernel has no parameter for an
    option, Python raises its own TypeError.
    """
    options = {
        "mask": inputs.mask,
        "bias": inputs.bias,
        "kv_lengths": inputs.lengths,
        "causal": inputs.causal or None,
    }
    options = {name: x for name, x in options.items() if x is not None}
    result = kernel(inputs.q, inputs.k, inputs.v, scale=inputs.total_scale, **options)
    name = getattr(kernel, "__name__", str(kernel))
    listed = type(result) in (tuple, list)  # a state of the kernel's own may be a NamedTuple
    if isinstance(result, AttentionState):
        parts = result._asdict()
    elif listed and len(result) == 2:
        parts = dict(zip(("out", "lse"), result, strict=True))
    elif listed or result is None or isinstance(result, Array | np.generic):
        raise TypeError(
            f"implementation: expected {name} to return (out, lse), an AttentionState or a state "
            f"of its own, got {type(result).__name__}"
        )
    else:
        return result
    queries, dtype = inputs.q.shape[:3], inputs.dtype
    for part, x in parts.items():
        of_kernel = f"implementation: {name}'s {part}"
        check_floating(**{of_kernel: x})
        # `out` may be narrower, because kernels round it once, at the end. Other parts may not.
        if part != "out" and jnp.promote_types(x.dtype, dtype) != x.dtype:
            raise TypeError(f"{of_kernel}: expected {dtype} or wider, got {x.dtype}")
        values = inputs.v.shape[-1:] if part in ("out", "numerator") else ()
        if x.shape != queries + values:
            raise ValueError(f"{of_kernel}: expected shape {queries + values}, got {x.shape}")
    arrays = [jnp.asarray(x).astype(dtype) for x in parts.values()]
    return from_output(*arrays) if "out" in parts else AttentionState(*arrays)
