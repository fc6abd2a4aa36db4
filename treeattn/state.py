"""The state of an attention over some of the keys, and the merge of two such states.

Attention of a query over keys with scores s_a and values v_a is N / D with

    D = Σ_a exp(s_a),    N = Σ_a exp(s_a) v_a.

Sums over disjoint sets of keys add, so every partition of the keys, reduced in any order,
gives the same attention. To stay in range, a state (m, d, n) keeps d = D·e⁻ᵐ and n = N·e⁻ᵐ, with a
pivot m, usually the largest score so far. The attention is n / d for every m. `merge` adds the
sums D and N of two states. (2024 §5.1; 2025 §5.1.)

**No keys** is the state (−∞, 0, 0), the identity of `merge`. It finalizes to output 0 and
lse −∞, and its gradients are zeros.

Every function here works under jit, vmap, grad and shard_map.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from treeattn.checks import (
    Array,
    Numbers,
    accumulation_dtype,
    as_array,
    check_floating,
    check_one_floating_dtype,
    check_shape,
    integer,
)


class AttentionState(NamedTuple):
    """Partial softmax sums over a set of keys, relative to a pivot.

    Differentiate what `finalize` returns: a field alone has another gradient, because the pivot is
    a constant of it.

    max:          (...,)     the pivot m; −∞ when the set is empty
    denominator:  (...,)     d = Σ_a exp(s_a − m)
    numerator:    (..., dv)  n = Σ_a exp(s_a − m) v_a

    >>> print(AttentionState(jnp.zeros(2), jnp.ones(2), jnp.ones((2, 3))).numerator.shape)
    (2, 3)
    """

    max: Float[jax.Array, "..."]
    denominator: Float[jax.Array, "..."]
    numerator: Float[jax.Array, "... dv"]

    @staticmethod
    def identity(
        shape: tuple[int, ...], value_dim: int, dtype: DTypeLike = jnp.float32
    ) -> "AttentionState":
        """The state of no keys, (−∞, 0, 0), for `shape` queries and values of `value_dim`."""
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            expected = "a floating-point dtype of 16 bits or more"  # float8_e4m3fn has no −∞
            raise TypeError(f"dtype: expected {expected}, got {dtype}")
        if not isinstance(shape, tuple):
            raise TypeError(f"shape: expected a tuple, the shape of the queries, got {shape!r}")
        return AttentionState(
            jnp.full(shape, -jnp.inf, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((*shape, value_dim), dtype),
        )


def finite(x: Float[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """`x`, with ±∞ replaced by the largest finite numbers of its dtype. NaN stays.

    Infinite fields cannot be computed with, because ∞ − ∞ and 0 · ∞ are NaN.
    """
    largest = jnp.finfo(x.dtype).max
    return jax.lax.clamp(-largest, x, largest)


def rescale(state: AttentionState, m: Float[jax.Array, "..."]) -> AttentionState:
    """The same state relative to the pivot `m`, which must not be below the state's own.

    The new pivot `m` gets no gradient and needs none, because the sums d·eᵐ and n·eᵐ of the result
    are the same for every m. They do depend on the old pivot, which gets its gradient through
    `weight`.
    """
    m = jax.lax.stop_gradient(m)
    weight = jnp.exp(finite(state.max) - finite(m))
    d = finite(state.denominator) * weight
    n = finite(state.numerator) * weight[..., None]
    return AttentionState(m, d, n)


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state of the union of two disjoint sets of keys.

    Associative up to rounding, commutative bit for bit, with `AttentionState.identity` as identity.
    The result has the wider of the two dtypes, and float32 for float16 with bfloat16. If the pivots
    of `a` and `b` are finite or −∞, and their sums hold no NaN, the result holds no NaN, even where
    a sum has overflowed: `merge` and `finalize` read ∞ as the dtype's largest number. Raises
    TypeError or ValueError if `a` or `b` is not a state, if its fields do not fit each other, or if
    the states differ in shape. (2024 §5.1, 2025 §5.1.)

    >>> a, b = from_output([[1.0]], [0.0]), from_output([[4.0]], [0.0])  # two keys of score 0
    >>> out, lse = finalize(merge(a, b))
    >>> print(out, lse.round(4))
    [[2.5]] [0.6931]
    """
    return _merge(a, b)


# Jitted, because outside jit the twenty operations one by one take a hundred times as long. The
# state is checked once for each shape.
@functools.partial(jax.jit, inline=True)
def _merge(a: AttentionState, b: AttentionState) -> AttentionState:
    check_state(a=a, b=b)
    check_shape(a.numerator.shape, b=b.numerator)
    if a.max.dtype != b.max.dtype:
        dtype = accumulation_dtype(a.max, b.max)  # float32 for float16 and bfloat16
        a, b = (jax.tree.map(lambda x: x.astype(dtype), state) for state in (a, b))
    m = jax.lax.stop_gradient(jnp.maximum(a.max, b.max))
    a_is_higher = a.max >= b.max
    high = where(a_is_higher, a, b)
    low = rescale(where(a_is_higher, b, a), m)
    # The higher state's weight, exp(high.max − m), is 1, and is not multiplied in. Otherwise d
    # would be a sum of two products, and a compiler could fuse either of them into the addition
    # (FMA), so merge(a, b) could round differently from merge(b, a). But `grad` needs the weight,
    # because m is a constant to it and high.max is not. So d · excess is added, with excess =
    # weight − 1: its value is 0, fused or not, and its derivative in high.max is that of the
    # weight.
    excess = jnp.expm1(finite(high.max) - finite(m))
    d = finite(high.denominator)
    d = d + d * excess
    n = finite(high.numerator)
    n = n + n * excess[..., None]
    return AttentionState(m, d + low.denominator, n + low.numerator)


def where(
    condition: Bool[jax.Array, "..."], a: AttentionState, b: AttentionState
) -> AttentionState:
    """For each query the state `a` where the condition holds, and `b` where it does not.

    condition: (...,) as the states' pivots, or a scalar for all queries
    """
    for_values = condition[..., None] if jnp.ndim(condition) else condition
    return jax.tree.map(jnp.where, AttentionState(condition, condition, for_values), a, b)


def finalize(state: AttentionState) -> tuple[Float[jax.Array, "... dv"], Float[jax.Array, "..."]]:
    """(out, lse): the attention n / d (..., dv), and log Σ exp(s) = m + log d (...,).

    out has the state's dtype; lse, a natural logarithm, is float32 or float64. The state of no
    keys gives (0, −∞). Sums beyond the dtype's range count as its largest finite number. Raises
    TypeError or ValueError if `state` is not a state.

    >>> out, lse = finalize(AttentionState.identity((2,), 3))
    >>> print(out[0], lse)
    [0. 0. 0.] [-inf -inf]
    """
    return _finalize(state)


@functools.partial(jax.jit, inline=True)
def _finalize(state: AttentionState):
    check_state(state=state)
    m, d, n = state
    empty = (d == 0) | (m == -jnp.inf)
    d = jnp.where(empty, 1, finite(d))
    # Not n / d, which some compilers turn into this product and others do not.
    out = finite(n) * finite(1 / d)[..., None]
    lse_dtype = accumulation_dtype(m)
    lse = m.astype(lse_dtype) + jnp.log(d.astype(lse_dtype))
    return jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, lse)


def from_output(
    out: Float[Array, "... dv"] | Numbers, lse: Float[Array, "..."] | Numbers
) -> AttentionState:
    """The state that finalizes to (out, lse), as a flash-attention kernel returns them.

    lse is a natural logarithm. −∞ means no keys, and `out` is ignored. An lse of +∞ has two
    meanings. If the query's `out` holds a NaN, the query's scores held a NaN, and the state is NaN.
    Otherwise the query saw no keys. FlashAttention-2 writes +∞ for both. The state's dtype is
    float64 if out's or lse's is, else float32. Raises TypeError for an lse in 16 bits, whose
    rounding changes weights by a percent, and TypeError or ValueError if dtypes or shapes do not
    fit.

    >>> state = from_output(jnp.ones((1, 2)), jnp.array([3.0]))
    >>> print(*finalize(state))
    [[1. 1.]] [3.]
    """
    return _from_output(as_array("out", out), as_array("lse", lse))


@functools.partial(jax.jit, inline=True)
def _from_output(out, lse) -> AttentionState:
    check_floating(out=out, lse=lse)
    if jnp.finfo(lse.dtype).bits < 32:
        raise TypeError(f"lse: expected float32 or float64, got {lse.dtype}")
    if out.ndim == 0:
        raise ValueError("out: expected axes (..., dv), got a scalar")
    check_shape(out.shape[:-1], lse=lse)
    dtype = accumulation_dtype(out, lse)
    out = out.astype(dtype)
    is_nan = (lse == jnp.inf) & jnp.any(jnp.isnan(out), axis=-1)
    empty = jnp.isinf(lse) & ~is_nan
    # With m the constant value of lse, exp(lse − m) is 1 but carries lse's gradient.
    lse = jnp.where(empty, 0, jnp.where(is_nan, jnp.nan, lse.astype(dtype)))
    m = jax.lax.stop_gradient(lse)
    d = jnp.where(empty, 0, jnp.exp(lse - m))
    out = jnp.where(empty[..., None], 0, out)
    return AttentionState(jnp.where(empty, -jnp.inf, m), d, out * d[..., None])


def reduce_chain(states: AttentionState, axis: int = 0) -> AttentionState:
    """Merge the states along `axis` one after another: p − 1 merges in p − 1 rounds.

    Raises TypeError or ValueError if `states` is not a state, or lacks the axis.

    >>> three = from_output(jnp.array([[1.0], [2.0], [6.0]]), jnp.zeros(3))
    >>> print(finalize(reduce_chain(three))[0])
    [3.]
    """
    states = _axis_first(states, axis)
    if len(states.max) == 0:
        dv = states.numerator.shape[-1]
        return AttentionState.identity(states.max.shape[1:], dv, states.max.dtype)
    first = jax.tree.map(lambda x: x[0], states)
    # scan wants a carry whose type does not change. Inside `shard_map` a type includes the mesh
    # axes that an array varies over, and a merged d or n varies over the pivots' axes, too.
    # Rescaling `first` to its own pivot gives it the same types, and changes no finite value.
    first = rescale(first, first.max)
    if len(states.max) == 1:  # under jax.disable_jit, scanning no states is an error
        return first
    return jax.lax.scan(_merge_next, first, _slice(states, 1))[0]


def _merge_next(merged: AttentionState, state: AttentionState) -> tuple[AttentionState, None]:
    """A step of `reduce_chain`. Not a lambda, which JAX would compile anew at each call."""
    return merge(merged, state), None


def reduce_tree(states: AttentionState, axis: int = 0, *, arity: int = 2) -> AttentionState:
    """Merge the states along `axis` as a tree with `arity` children per node.

    p states take p − 1 merges, in ⌈log_arity p⌉ rounds of up to arity − 1 merges in a row. This is
    Theorem 1 (2024 §10, 2025 App. E). Raises as `reduce_chain` does, and for an arity below 2.

    >>> three = from_output(jnp.array([[1.0], [2.0], [6.0]]), jnp.zeros(3))
    >>> print(finalize(reduce_tree(three))[0])
    [3.]
    """
    arity = integer("arity", arity, 2)
    states = _axis_first(states, axis)
    if len(states.max) == 0:
        return reduce_chain(states)
    while len(states.max) > 1:
        states = tree_round(states, arity)
    return jax.tree.map(lambda x: x[0], states)


def tree_round(states: AttentionState, arity: int) -> AttentionState:
    """One round of the tree: along axis 0, each group of `arity` neighbours becomes one state.

    Fields (p, ...) become (⌈p / arity⌉, ...). The last group may be smaller. The states of a
    group merge one after another.
    """
    parents = _slice(states, 0, None, arity)
    for child in range(1, min(arity, len(states.max))):
        children = _slice(states, child, None, arity)
        n = len(children.max)  # the last group may lack this child
        merged = merge(_slice(parents, 0, n), children)
        childless = _slice(parents, n)
        parents = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), merged, childless)
    return parents


def scan_states(states: AttentionState, axis: int = 0) -> AttentionState:
    """All prefixes along `axis`: entry i is the merge of the states 0 … i.

    If state i is that of key i alone, and all states belong to the same query, entry i is the state
    of that query over the keys 0 … i. So the causal attention of query j of a text is entry j of
    query j's own scan; a text of l queries needs l scans. p states take fewer than 2p merges, in at
    most 2 log₂ p rounds. Raises as `reduce_chain` does.

    >>> three = from_output(jnp.array([[1.0], [2.0], [6.0]]), jnp.zeros(3))
    >>> print(finalize(scan_states(three))[0].ravel())
    [1.  1.5 3. ]
    """
    scanned = jax.lax.associative_scan(merge, _axis_first(states, axis))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis % states.max.ndim), scanned)


def check_state(**states: AttentionState) -> None:
    """Raise TypeError or ValueError for the first argument that is not a valid state."""
    for name, state in states.items():
        if not isinstance(state, AttentionState):
            raise TypeError(f"{name}: expected an AttentionState, got {type(state).__name__}")
        fields = {f"{name}.{field}": x for field, x in state._asdict().items()}
        check_one_floating_dtype(**fields)
        m, d, n = (x.shape for x in state)
        if n == () or not m == d == n[:-1]:
            raise ValueError(
                f"{name}: expected shapes max (...,), denominator (...,) and numerator "
                f"(..., dv) with the same ..., got {m}, {d} and {n}"
            )


def _axis_first(states: AttentionState, axis: int) -> AttentionState:
    """The states with `axis`, an axis of `max`, moved to the front."""
    check_state(states=states)
    rank = states.max.ndim
    axis = integer("axis", axis, -rank, rank - 1)
    return jax.tree.map(lambda x: jnp.moveaxis(x, axis % rank, 0), states)


def _slice(states: AttentionState, start: int, stop: int | None = None, step: int = 1):
    """`states[start:stop:step]` along the first axis."""
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, stop, step), states)
