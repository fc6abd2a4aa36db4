"""The state of an attention that has seen some of the keys, and how two such states merge.

Attention of a query over keys with scores s_a and values v_a is n / d with

    d = Σ_a exp(s_a),    n = Σ_a exp(s_a) v_a.

Sums over disjoint sets of keys add, so every partition of the keys, reduced in any order,
gives the same attention. To stay in range, a state keeps both sums relative to a pivot m,
usually the largest score seen: (m, d, n) stands for (d·eᵐ, n·eᵐ), and `merge` adds what
two states stand for. (v1 §5.1; v2 §5.1.)

**No keys** is the state (−∞, 0, 0), the identity of `merge`. It finalizes to output 0 and
lse −∞, and its gradients are zeros.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from treeattn.arrays import Array, check_floating


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
        shape: tuple[int, ...], value_dim: int, dtype: jnp.dtype = jnp.float32
    ) -> "AttentionState":
        """The state of no keys, (−∞, 0, 0), for `shape` queries and values of `value_dim`."""
        return AttentionState(
            jnp.full(shape, -jnp.inf, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((*shape, value_dim), dtype),
        )


def pivot(m: Float[Array, "..."]) -> Float[Array, "..."]:
    """`m` as exponents may be taken relative to it: a constant, and 0 where it is −∞.

    A state's value does not depend on its pivot, so stopping the gradient loses nothing;
    and −∞ − (−∞), the one NaN that merging could make, becomes −∞ − 0.
    """
    m = jax.lax.stop_gradient(m)
    return jnp.where(m == -jnp.inf, 0, m)


def rescale(state: AttentionState, m: Float[Array, "..."]) -> AttentionState:
    """The same state relative to the pivot `m`, which must not be below the state's own."""
    weight = jnp.exp(state.max - pivot(m))
    return AttentionState(m, state.denominator * weight, state.numerator * weight[..., None])


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state of the union of two disjoint sets of keys.

    Associative and commutative up to rounding, with `AttentionState.identity` as identity.
    """
    m = jax.lax.stop_gradient(jnp.maximum(a.max, b.max))
    a, b = rescale(a, m), rescale(b, m)
    return AttentionState(m, a.denominator + b.denominator, a.numerator + b.numerator)


def finalize(state: AttentionState) -> tuple[Float[Array, "... dv"], Float[Array, "..."]]:
    """(out, lse): the attention n / d (..., dv), and log Σ exp(s) = m + log d (...,).

    out has the state's dtype; lse, a natural logarithm, is never below float32. The state of
    no keys gives (0, −∞).
    """
    m, d, n = state
    empty = d == 0
    d = jnp.where(empty, 1, d)
    out = jnp.where(empty[..., None], 0, n / d[..., None])
    lse_dtype = jnp.promote_types(m.dtype, jnp.float32)
    lse = m.astype(lse_dtype) + jnp.log(d.astype(lse_dtype))
    return out, jnp.where(empty, -jnp.inf, lse)


def from_output(out: Float[Array, "... dv"], lse: Float[Array, "..."]) -> AttentionState:
    """The state that finalizes to (out, lse): what a flash-attention kernel returns.

    An lse of −∞, or of +∞ as some kernels write it, means no keys; `out` is then ignored.
    The state's dtype is lse's or out's, whichever is wider, and at least float32.
    """
    check_floating(out=out, lse=lse)
    if out.shape[:-1] != lse.shape:
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


def take(states: AttentionState, index, axis: int = 0) -> AttentionState:
    """`states[index]` along `axis` of the batch axes (those of `max`)."""
    where = (slice(None),) * (axis % states.max.ndim) + (index,)
    return jax.tree.map(lambda x: x[where], states)


def reduce_chain(states: AttentionState, axis: int = 0) -> AttentionState:
    """Merge the states along `axis` one after another: p − 1 merges in p − 1 rounds."""
    axis = axis % states.max.ndim
    states = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), states)
    start = AttentionState.identity(
        states.max.shape[1:], states.numerator.shape[-1], states.max.dtype
    )
    return jax.lax.scan(lambda a, b: (merge(a, b), None), start, states)[0]


def reduce_tree(states: AttentionState, axis: int = 0, *, arity: int = 2) -> AttentionState:
    """Merge the states along `axis` as an `arity`-ary tree: p − 1 merges in ⌈log_arity p⌉ rounds.

    Each round merges groups of `arity` neighbours; the last group may be smaller. (v1 §10.)
    """
    if arity < 2:
        raise ValueError(f"arity: expected at least 2, got {arity}")
    axis = axis % states.max.ndim
    states = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), states)
    if len(states.max) == 0:
        return reduce_chain(states)
    while len(states.max) > 1:
        parents = take(states, slice(0, None, arity))
        for child in range(1, arity):
            children = take(states, slice(child, None, arity))
            n = len(children.max)  # the last group may lack this child
            merged, rest = merge(take(parents, slice(n)), children), take(parents, slice(n, None))
            parents = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), merged, rest)
        states = parents
    return take(states, 0)


def scan_states(states: AttentionState, axis: int = 0) -> AttentionState:
    """All prefixes along `axis`: entry i is the merge of the states 0 … i.

    One state a key, scanned along the keys, is causal attention. 2p merges in 2 log₂ p rounds.
    """
    return jax.lax.associative_scan(merge, states, axis=axis % states.max.ndim)
