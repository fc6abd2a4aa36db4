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

from treeattn.idea.arrays import Array, as_array, check_floating, check_same_dtype, integer


class AttentionState(NamedTuple):
    """Partial softmax sums over a set of keys, relative to a pivot.

    max:          (...,)     the pivot m; −∞ when the set is empty
    denominator:  (...,)     d = Σ_a exp(s_a − m)
    numerator:    (..., dv)  n = Σ_a exp(s_a − m) v_a
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
    fields do not fit each other, or the two differ in shape.
    """
    check_state(a=a, b=b)
    if a.numerator.shape != b.numerator.shape:
        raise ValueError(
            f"b: expected a's numerator shape {a.numerator.shape}, got {b.numerator.shape}"
        )
    return _merge(a, b)


# One program where it is called by itself: some twenty operations would take a hundred times as
# long. Inside another program it leaves no trace.
@functools.partial(jax.jit, inline=True)
def _merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The merge of two states of one shape."""
    dtype = jnp.promote_types(a.max.dtype, b.max.dtype)
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
    """
    check_state(state=state)
    return _finalize(state)


@functools.partial(jax.jit, inline=True)
def _finalize(state: AttentionState):
    """(out, lse) of a state of fitting fields."""
    m, d, n = state
    empty = (d == 0) | (m == -jnp.inf)
    d = jnp.where(empty, 1, finite(d))
    out = jnp.where(empty[..., None], 0, finite(n) / d[..., None])
    lse_dtype = jnp.promote_types(m.dtype, jnp.float32)
    lse = m.astype(lse_dtype) + jnp.log(d.astype(lse_dtype))
    return out, jnp.where(empty, -jnp.inf, lse)


def from_output(out: Float[Array, "... dv"], lse: Float[Array, "..."]) -> AttentionState:
    """The state that finalizes to (out, lse): what a flash-attention kernel returns.

    lse is a natural logarithm. Where it is −∞, or +∞ as some kernels write it, there were no
    keys, and `out` is ignored. The state's dtype is lse's or out's, whichever is wider, and
    at least float32.
    """
    check_floating(out=out, lse=lse)
    if out.shape[:-1] != lse.shape or out.ndim == 0:
        raise ValueError(
            f"lse: expected out's shape without its last axis, {out.shape[:-1]}, got {lse.shape}"
        )
    dtype = jnp.promote_types(jnp.result_type(out, lse), jnp.float32)
    empty = jnp.isinf(lse)
    # Relative to its own constant value, exp(lse − m) is 1 and still carries lse's gradient.
    lse = jnp.where(empty, 0, lse.astype(dtype))
    m = jax.lax.stop_gradient(lse)
    d = jnp.where(empty, 0, jnp.exp(lse - m))
    out = jnp.where(empty[..., None], 0, out.astype(dtype))
    return AttentionState(jnp.where(empty, -jnp.inf, m), d, out * d[..., None])


def skip_bound(
    seen: AttentionState,
    skipped_lse: Float[Array, "..."] | float,
    radius: Float[Array, "..."] | float,
) -> Float[Array, "..."]:
    """The most that skipping some keys can have cost: no less than ‖out − seen's out‖, (...,).

    A merged output lies between the two outputs, nearer to the heavier. So one that lacks some keys
    is off by their weight, 1 / (1 + exp(lse − skipped_lse)), times the distance of the two outputs,
    which is at most ‖seen's out‖ + radius.

    seen:         (...,)  the state of the keys that were attended to
    skipped_lse:  (...,) or a number: log Σ exp(s) of the skipped keys, or what it is at most, as
                  log n + the largest score of n keys; −∞ for no keys
    radius:       (...,) or a number: the length of their longest value, at least

    In the dtype of lse. Raises a TypeError or ValueError when `seen` is no state, or the others are
    not real or do not fit it.
    """
    out, lse = finalize(seen)
    given = {"skipped_lse": skipped_lse, "radius": radius}
    given = {name: jnp.asarray(as_array(name, x)) for name, x in given.items()}
    check_floating(**given)
    for name, x in given.items():
        if x.shape not in ((), lse.shape):
            raise ValueError(f"{name}: expected a number or the shape {lse.shape}, got {x.shape}")
    skipped, radius = (x.astype(lse.dtype) for x in given.values())
    weight = jax.nn.sigmoid(finite(skipped) - finite(lse))
    distance = jnp.linalg.norm(out.astype(lse.dtype), axis=-1) + radius
    return jnp.where(skipped == -jnp.inf, 0, weight * distance)


def reduce_chain(states: AttentionState, axis: int = 0) -> AttentionState:
    """Merge the states along `axis` one after another: p − 1 merges in p − 1 rounds."""
    states = _axis_first(states, axis)
    if len(states.max) == 0:
        dv = states.numerator.shape[-1]
        return AttentionState.identity(states.max.shape[1:], dv, states.max.dtype)
    first = jax.tree.map(lambda x: x[0], states)
    # Rescaling to its own pivot changes nothing but the type: that of what merge returns.
    first = rescale(first, first.max)
    if len(states.max) == 1:  # under jax.disable_jit, a scan of nothing would be an error
        return first
    merged, _ = jax.lax.scan(lambda a, b: (merge(a, b), None), first, _slice(states, 1))
    return merged


def reduce_tree(states: AttentionState, axis: int = 0, *, arity: int = 2) -> AttentionState:
    """Merge the states along `axis` as a tree of `arity` children a node.

    p states take ⌈log_arity p⌉ rounds and p − 1 merges. (Theorem 1: 2024 §10, 2025 App. E.)
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
    than 2p merges, in at most 2 log₂ p rounds.
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
