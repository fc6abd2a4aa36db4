"""The state of an attention that has seen some of the keys, and how two such states merge.

Attention of a query over keys with scores s_a and values v_a is n / d with

    d = Σ_a exp(s_a),    n = Σ_a exp(s_a) v_a.

Sums over disjoint sets of keys add, so every partition of the keys, reduced in any order,
gives the same attention. To stay in range, a state keeps both sums relative to a pivot m,
usually the largest score seen: (m, d, n) stands for (d·eᵐ, n·eᵐ), and `merge` adds what
two states stand for. (2024 §5.1; 2025 §5.1.)

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
    accumulation_dtype,
    as_array,
    check_floating,
    check_same_dtype,
    integer,
)


class AttentionState(NamedTuple):
    """Partial softmax sums over a set of keys, relative to a pivot.

    max:          (...,)     the pivot m; −∞ when the set is empty
    denominator:  (...,)     d = Σ_a exp(s_a − m)
    numerator:    (..., dv)  n = Σ_a exp(s_a − m) v_a

    >>> print(AttentionState(jnp.zeros(2), jnp.ones(2), jnp.ones((2, 3))).numerator.shape)
    (2, 3)
    """

    max: Float[Array, "..."]
    denominator: Float[Array, "..."]
    numerator: Float[Array, "... dv"]

    @staticmethod
    def identity(
        shape: tuple[int, ...], value_dim: int, dtype: DTypeLike = jnp.float32
    ) -> "AttentionState":
        """The state of no keys, (−∞, 0, 0), for `shape` queries and values of `value_dim`."""
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            expected = "a floating-point dtype of 16 bits or more"  # some of 8 bits have no −∞
            raise TypeError(f"dtype: expected {expected}, got {dtype}")
        if not isinstance(shape, tuple):
            raise TypeError(f"shape: expected a tuple, the queries' axes, got {shape!r}")
        return AttentionState(
            jnp.full(shape, -jnp.inf, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((*shape, value_dim), dtype),
        )


def finite(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x`, with ±∞ replaced by the largest finite numbers of its dtype. NaN stays.

    An infinite pivot is a sign, not a number to compute with: ∞ − ∞ and 0 · ∞ would be NaN.
    """
    largest = jnp.finfo(x.dtype).max
    return jax.lax.clamp(-largest, x, largest)


def rescale(state: AttentionState, m: Float[Array, "..."]) -> AttentionState:
    """The same state relative to the pivot `m`, which must not be below the state's own.

    The new pivot is a constant to differentiation. That loses nothing, for what a state
    stands for does not depend on its pivot; the weight carries the old pivot's gradient.
    """
    m = jax.lax.stop_gradient(m)
    weight = jnp.exp(finite(state.max) - finite(m))
    d = finite(state.denominator) * weight
    n = finite(state.numerator) * weight[..., None]
    return AttentionState(m, d, n)


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state of the union of two disjoint sets of keys.

    Associative up to rounding, commutative bit for bit, with `AttentionState.identity` as identity.
    The result has the wider of the two dtypes. Finite fields, or a pivot of −∞, never give a
    NaN: sums saturate. Raises a TypeError or ValueError when `a` or `b` is no state, its
    fields do not fit each other, or the two differ in shape. (2024 §5.1, 2025 §5.1.)

    >>> a, b = from_output([[1.0]], [0.0]), from_output([[4.0]], [0.0])  # two keys of score 0
    >>> out, lse = finalize(merge(a, b))
    >>> print(out, lse.round(4))
    [[2.5]] [0.6931]
    """
    return _merge(a, b)


# One program where it is called by itself: some twenty operations would take a hundred times as
# long, and what is wrong is looked for once a shape. Inside another program it leaves no trace.
@functools.partial(jax.jit, inline=True)
def _merge(a: AttentionState, b: AttentionState) -> AttentionState:
    check_state(a=a, b=b)
    if a.numerator.shape != b.numerator.shape:
        raise ValueError(
            f"b: expected a's numerator shape {a.numerator.shape}, got {b.numerator.shape}"
        )
    if a.max.dtype != b.max.dtype:
        dtype = accumulation_dtype(a.max, b.max)  # the wider one; of two halves, float32
        a, b = (jax.tree.map(lambda x: x.astype(dtype), state) for state in (a, b))
    m = jnp.maximum(a.max, b.max)
    a_is_higher = a.max >= b.max
    high = where(a_is_higher, a, b)
    low = rescale(where(a_is_higher, b, a), m)
    # Only the lower state is multiplied by its weight. With two products, a compiler that fuses one
    # of them into the sum, as it sees fit, gives the same merge other bits in other programs. The
    # weight of the higher one is 1: what it exceeds 1 by is 0, and carries its gradient.
    more = jnp.expm1(finite(high.max) - finite(low.max))
    d = finite(high.denominator)
    d = d + d * more
    n = finite(high.numerator)
    n = n + n * more[..., None]
    return AttentionState(low.max, d + low.denominator, n + low.numerator)


def where(condition: Bool[Array, "..."], a: AttentionState, b: AttentionState) -> AttentionState:
    """For each query the state `a` where the condition holds, and `b` where it does not.

    condition: (...,) as the states' pivots, or a scalar for all of them
    """
    for_values = condition[..., None] if jnp.ndim(condition) else condition
    return jax.tree.map(jnp.where, AttentionState(condition, condition, for_values), a, b)


def finalize(state: AttentionState) -> tuple[Float[Array, "... dv"], Float[Array, "..."]]:
    """(out, lse): the attention n / d (..., dv), and log Σ exp(s) = m + log d (...,).

    out has the state's dtype; lse, a natural logarithm, is never below float32. The state of
    no keys gives (0, −∞). Sums beyond the dtype's range count as its largest finite number.
    Raises a TypeError or ValueError for what is no state.

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
    # Not n / d: some compilers make a product with 1 / d of it, and others do not.
    out = finite(n) * finite(1 / d)[..., None]
    lse_dtype = accumulation_dtype(m)
    lse = m.astype(lse_dtype) + jnp.log(d.astype(lse_dtype))
    return jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, lse)


def from_output(out: Float[Array, "... dv"], lse: Float[Array, "..."]) -> AttentionState:
    """The state that finalizes to (out, lse): what a flash-attention kernel returns.

    lse is a natural logarithm. −∞ says that there were no keys, and `out` is ignored; so does +∞,
    as some kernels write it, unless `out` holds a NaN: FlashAttention-2 writes +∞ for a sum that is
    NaN, too, and that is not lost. The state's dtype is lse's or out's, whichever is wider, and at
    least float32. Raises a TypeError or ValueError for dtypes and shapes that do not fit.

    >>> state = from_output(jnp.ones((1, 2)), jnp.array([3.0]))
    >>> print(*finalize(state))
    [[1. 1.]] [3.]
    """
    return _from_output(as_array("out", out), as_array("lse", lse))


@functools.partial(jax.jit, inline=True)
def _from_output(out, lse) -> AttentionState:
    check_floating(out=out, lse=lse)
    if out.shape[:-1] != lse.shape or out.ndim == 0:
        raise ValueError(
            f"lse: expected out's shape without its last axis, {out.shape[:-1]}, got {lse.shape}"
        )
    dtype = accumulation_dtype(out, lse)
    out = out.astype(dtype)
    is_nan = (lse == jnp.inf) & jnp.any(jnp.isnan(out), axis=-1)
    empty = jnp.isinf(lse) & ~is_nan
    # Relative to its own constant value, exp(lse − m) is 1 and still carries lse's gradient.
    lse = jnp.where(empty, 0, jnp.where(is_nan, jnp.nan, lse.astype(dtype)))
    m = jax.lax.stop_gradient(lse)
    d = jnp.where(empty, 0, jnp.exp(lse - m))
    out = jnp.where(empty[..., None], 0, out)
    return AttentionState(jnp.where(empty, -jnp.inf, m), d, out * d[..., None])


def reduce_chain(states: AttentionState, axis: int = 0) -> AttentionState:
    """Merge the states along `axis` one after another: p − 1 merges in p − 1 rounds.

    Raises a TypeError or ValueError for what are no states, and for an axis they lack.

    >>> three = from_output(jnp.array([[1.0], [2.0], [6.0]]), jnp.zeros(3))
    >>> print(finalize(reduce_chain(three))[0])
    [3.]
    """
    states = _axis_first(states, axis)
    if len(states.max) == 0:
        dv = states.numerator.shape[-1]
        return AttentionState.identity(states.max.shape[1:], dv, states.max.dtype)
    first = jax.tree.map(lambda x: x[0], states)
    # Rescaling to its own pivot changes nothing but the type: that of what merge returns.
    first = rescale(first, first.max)
    if len(states.max) == 1:  # under jax.disable_jit, a scan of nothing would be an error
        return first
    return jax.lax.scan(_merge_next, first, _slice(states, 1))[0]


def _merge_next(merged: AttentionState, state: AttentionState) -> tuple[AttentionState, None]:
    """A step of `reduce_chain`, which JAX would compile anew for a lambda made at each call."""
    return merge(merged, state), None


def reduce_tree(states: AttentionState, axis: int = 0, *, arity: int = 2) -> AttentionState:
    """Merge the states along `axis` as a tree of `arity` children a node.

    p states take ⌈log_arity p⌉ rounds and p − 1 merges. (Theorem 1: 2024 §10, 2025 App. E.)
    Raises a TypeError or ValueError for what are no states, an axis they lack, an arity below 2.

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
    """One round of the tree: along axis 0, each `arity` neighbours become one state.

    Fields (p, ...) become (⌈p / arity⌉, ...). The last group may be smaller. The children of a
    node merge one after another.
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

    With one state a key this is attention as a recurrence: entry i has seen the keys 0 … i.
    For each query its own row of such states, entry i of row i, is causal attention. Fewer
    than 2p merges, in at most 2 log₂ p rounds. Raises as `reduce_chain` does.

    >>> three = from_output(jnp.array([[1.0], [2.0], [6.0]]), jnp.zeros(3))
    >>> print(finalize(scan_states(three))[0].ravel())
    [1.  1.5 3. ]
    """
    scanned = jax.lax.associative_scan(merge, _axis_first(states, axis))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis % states.max.ndim), scanned)


def check_state(**states: AttentionState) -> None:
    """Raise a TypeError or ValueError naming the first that is no state of fitting fields."""
    for name, state in states.items():
        if not isinstance(state, AttentionState):
            raise TypeError(f"{name}: expected an AttentionState, got {type(state).__name__}")
        fields = {f"{name}.{field}": x for field, x in state._asdict().items()}
        check_floating(**fields)
        check_same_dtype(**fields)
        m, d, n = (x.shape for x in state)
        if n == () or not m == d == n[:-1]:
            raise ValueError(
                f"{name}: expected shapes max (...,), denominator (...,) and numerator "
                f"(..., dv) with the same ..., got {m}, {d} and {n}"
            )


def _axis_first(states: AttentionState, axis: int) -> AttentionState:
    """The states with the batch axis `axis` (one of those of `max`) moved to the front."""
    check_state(states=states)
    axis = integer("axis", axis)
    rank = states.max.ndim
    if not -rank <= axis < rank:
        raise ValueError(f"axis: expected one of the {rank} axes of states.max, got {axis}")
    return jax.tree.map(lambda x: jnp.moveaxis(x, axis % rank, 0), states)


def _slice(states: AttentionState, start: int, stop: int | None = None, step: int = 1):
    """`states[start:stop:step]` along the first axis."""
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, stop, step), states)
