"""Attention on one device: queries and keys in, a state out.

Layouts are those of `jax.nn.dot_product_attention`: queries (b, l, h, d), keys (b, n, h_kv, d),
values (b, n, h_kv, dv); query head i reads key head i // (h // h_kv).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from treeattn import flash, products
from treeattn.blocks import attend_blockwise
from treeattn.checks import Array, check_floating, check_hashable
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
from treeattn.state import AttentionState, finalize, from_output

# A name, a user's function, or None for the fastest that can run.
Implementation = str | Callable | None
NAMES = (None, "plain", "blockwise", "flash")


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    kv_lengths: Lengths | None = None,
    causal: bool = False,
    scale: Scale = None,
    implementation: Implementation = None,
) -> AttentionState:
    """The state of each query after its keys: fields (b, l, h) and numerator (b, l, h, dv).

    q:          (b, l, h, d), floating-point; k (b, n, h_kv, d) and v (b, n, h_kv, dv) of the
                same dtype. h must be a multiple of h_kv.
    mask:       True where a query may see a key; broadcasts to (b, h, l, n) as in NumPy.
    bias:       added to the scaled scores; broadcasts in the same way. −∞ hides the key.
    kv_lengths: (b,), or one number: for each row how many of its keys are in use, 0 … n. The rest
                are ignored. Traced lengths are clipped to 0 … n.
    causal:     query i sees keys 0 … i; there must be as many keys as queries.
    scale:      multiplies q·k; 1/√d when None. A number is compiled in, a JAX array's value is not.
    implementation: "plain" holds all scores, and XLA can split it over devices; "blockwise" is the
                same in bounded memory, and faster; "flash" is flash-attn-jax's CUDA kernel, for
                float16 and bfloat16 without mask and bias. None chooses flash on a CUDA device if
                there are more than 128 queries and flash can compute the call, plain where XLA may
                split the arrays, and blockwise everywhere else. Or pass a function,

                    kernel(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False)

                that returns (out, lse), as `from_output` reads them, or an AttentionState. It may
                also return a state of its own kind: `attend` returns this as it is, and
                `tree_decode` needs a `method` that merges it. The function gets checked arrays, and
                only the options that you pass, so it needs no parameters for the others.
                `tree_decode` also passes kv_lengths if devices cannot share the keys evenly. The
                function is compiled into the program and differentiated as it is. JAX keeps it and
                its program until the process ends, and compiles every new lambda anew.

    Sharded arrays: inside jit, on several devices, implementation=None sends no more than
    `jax.nn.dot_product_attention` does. For a cache that is sharded along its keys call
    `tree_decode`, which also keeps temporary memory bounded; for a sharded text `ring_attention`.
    If all scores together do not fit in memory, pass "blockwise", but only if no array is sharded
    along its length.

    The state is in float32, or float64 if q, k and v are. A score or a sum above the dtype's range
    counts as the largest finite number. With "plain" a score is NaN if some of its terms q_i·k_i
    overflow to +∞ and others to −∞. A query that sees no key has the state (−∞, 0, 0) and zero
    gradients. Keys and values that no query of their row and head sees may be NaN or ∞. A NaN that
    one query sees may reach other queries of the head, because 0 · NaN is NaN. (2024 eq. 2–4, 2025
    eq. 1–3.)

    Raises TypeError if dtypes are not floating-point or differ, or if a function cannot be hashed.
    Raises ValueError if shapes do not fit, lengths are out of range, the scale is not finite, keys
    are sharded along an Explicit axis, or "flash" cannot run. If a function's result does not
    fit, raises TypeError for its type or dtype, and ValueError for its shape. Outside jit, the call
    waits until lengths are computed, to check them.

    >>> q, k, v = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 5))
    >>> state = attend(q, k, v)
    >>> print(state.max.shape, state.numerator.shape, state.denominator[0, 0])
    (1, 1, 2) (1, 1, 2, 5) [3. 3.]
    """
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale, causal)
    return _attend(inputs, choose_implementation(implementation, inputs), False)


def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    kv_lengths: Lengths | None = None,
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
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale, causal)
    return _attend(inputs, choose_implementation(implementation, inputs), True)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _attend(inputs: Inputs, implementation: Implementation, finalized: bool):
    check_inputs(inputs)
    state = attend_inputs(inputs, implementation)
    return output_of(state, inputs)[0] if finalized else state


def output_of(state: AttentionState, inputs: Inputs):
    """(out, lse) of the state, with out in the queries' dtype."""
    out, lse = finalize(state)
    return out.astype(inputs.q.dtype), lse


def check_implementation(implementation: Implementation, q) -> None:
    """Raise ValueError unless it is a name or a function, and can run on q's device.

    Raise TypeError for a function that cannot be hashed, because `jax.jit` recognizes it by its
    hash.
    """
    if callable(implementation):
        check_hashable("implementation", implementation)
    elif not isinstance(implementation, str | None) or implementation not in NAMES:
        raise ValueError(
            f"implementation: expected one of {NAMES}, or a function, got {implementation!r}"
        )
    if implementation == "flash":
        flash.check_device(q)


def choose_implementation(implementation: Implementation, inputs: Inputs) -> Implementation:
    """The implementation to run for `attend` and `attention`, whose arrays may be sharded.

    None becomes "plain" where XLA may split the arrays, unless flash is best. `tree_decode` does
    not use this function: each device calls `attend_inputs` on its own shard.

    Inside a program the sharding of an array along Auto axes is unknown. If the keys are sharded,
    "blockwise" sends every block of keys to every device. With "plain", each device sums over its
    own keys, and only largest scores and sums are sent.
    Raises what `check_implementation` raises, and ValueError for keys that are sharded along
    Explicit axes, unless the implementation is a function.
    """
    check_implementation(implementation, inputs.q)
    if callable(implementation):
        return implementation
    spec = jax.typeof(inputs.k).sharding.spec
    if len(spec) > 1 and spec[1] is not None:
        raise ValueError(
            f"k: its keys are sharded along {spec[1]!r}, got {spec}; call tree_decode or "
            "ring_attention, or jax.reshard k"
        )
    if implementation is None and products.xla_may_split(inputs.q, inputs.k, inputs.v):
        return None if flash.is_best(inputs) else "plain"
    return implementation


def attend_inputs(inputs: Inputs, implementation: Implementation):
    """`attend` for checked inputs, inside a trace: a state, or a user's state of another kind."""
    if inputs.q.size == 0 or inputs.k.shape[1] == 0:  # most kernels fail on empty arrays
        return AttentionState.identity(inputs.q.shape[:3], inputs.v.shape[-1], inputs.dtype)
    if callable(implementation):
        return _attend_by_function(inputs, implementation)
    if implementation == "plain":
        return attend_plain(inputs)
    if implementation == "flash":
        if (reason := flash.why_not(inputs)) is not None:
            raise ValueError(reason)
        return flash.flash_attend(inputs)
    if implementation is None and flash.is_best(inputs):
        # The platform is known only when the program is lowered.
        return jax.lax.platform_dependent(inputs, cuda=flash.flash_attend, default=attend_blockwise)
    return attend_blockwise(inputs)


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
    pair = type(result) in (tuple, list) and len(result) == 2
    if isinstance(result, AttentionState):
        parts = result._asdict()
    elif pair:
        parts = dict(zip(("out", "lse"), result, strict=True))
    elif type(result) in (tuple, list, type(None)) or isinstance(result, Array | np.generic):
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
    return from_output(*arrays) if pair else AttentionState(*arrays)
