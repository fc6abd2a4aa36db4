"""One device: queries and keys in, an `ExactState` out, a block of keys at a time."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from labs.exact.digits import (
    LEVELS,
    digits_from,
    dot,
    position_of,
    unfused,
    value_digits,
    weight_of,
)
from labs.exact.state import EMPTY, MAX_KEYS, NO_NUMBER, ExactState, Sums, in_halves
from treeattn import AttentionState

BLOCK = 512  # keys: the products of digits below 256 and up to 128 add up to less than 2^24
PRODUCTS = 1 << 24  # products of queries' and keys' entries held at a time, about


def exact_state(
    q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False
) -> ExactState:
    """The state of each query over its visible keys, shapes (b, l, h): no order moves a bit.

    q, k, v and options are as the core passes them to its `implementation`:
    q (b, l, h, d), k (b, n, h_kv, d), v (b, n, h_kv, dv) of float16, bfloat16 or float32; mask and
    bias broadcast to (b, h, l, n); kv_lengths (b,); causal: query i sees keys 0 … i.

    A key loses at most 2^−39 of the largest weight, and 2^−35 of the largest weighted value. A
    value is rounded to 2^−30 of the **largest entry of its row**, and smaller entries are lost. So
    outputs are near to the true ones relative to the largest entry, not entry by entry. Scores are
    clipped to ±2^26. A NaN in a score or a value that a query sees makes its output NaN. There is
    no gradient: jax.grad raises a TypeError.

    Raises ValueError for float64 and for more than 2^28 keys.
    """
    if q.dtype == jnp.float64:
        raise ValueError("q: exact sums take float16, bfloat16 or float32, got float64")
    if k.shape[1] > MAX_KEYS:
        raise ValueError(f"k: exact sums take at most {MAX_KEYS} keys, got {k.shape[1]}")
    options = {"mask": mask, "bias": bias, "kv_lengths": kv_lengths}
    return _exact_state(q, k, v, jnp.asarray(scale, jnp.float32), options, causal)


def exact_attend(q, k, v, **options) -> AttentionState:
    """`exact_state`, rounded: the state (lse, 1, out), for `attend`'s `implementation`."""
    return exact_state(q, k, v, **options).rounded()


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _exact_state(q, k, v, scale, options, causal):
    b, l, h, d = q.shape
    n, h_kv, dv = v.shape[1:]
    if q.size == 0 or n == 0:
        return ExactState.identity((b, l, h), dv)
    queries = q.astype(jnp.float32).reshape(b, l, h_kv, h // h_kv, d).transpose(0, 2, 3, 1, 4)
    size = min(n, BLOCK, max(1, PRODUCTS // q.size))
    start = ExactState.identity(queries.shape[:-1], dv)
    varying = sum(0 * jnp.sum(x.ravel()[:1] != 0, dtype=jnp.int32) for x in (q, k, v))
    start = jax.tree.map(lambda x: x + varying, start)  # its type inside shard_map

    def add_block(i, state):
        first = jnp.minimum(i * size, n - size)  # the last block may overlap the one before
        keys = first + jnp.arange(size)
        read = functools.partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=size)
        bias, visible = _hidden_and_seen(options, causal, keys, (l, h_kv), read)
        visible &= keys >= i * size
        scores = unfused(dot(queries[..., None, :], _by_head(read(k, axis=1))) * scale)
        if bias is not None:
            scores += jnp.maximum(bias, jnp.finfo(jnp.float32).min)
        values = _by_head(read(v, axis=1))[:, :, 0, 0]
        return state.merge(_block_state(scores, values, visible))

    longest = n if options["kv_lengths"] is None else jnp.max(options["kv_lengths"])

    def add_if_seen(i, state):
        # In a branch, XLA:CPU does not widen all bfloat16 keys before the loop.
        return lax.cond(i * size < longest, add_block, lambda _, state: state, i, state)

    state = lax.fori_loop(0, -(-n // size), add_if_seen, start)
    return _ungrouped(state, (b, l, h))


@_exact_state.defjvp
def _no_gradient(causal, primals, tangents):
    raise TypeError("exact sums have no gradient; differentiate treeattn.attend by another way")


def _by_head(x):
    """Keys or values (b, size, h_kv, ·) as float32 (b, h_kv, 1, 1, size, ·)."""
    return jnp.moveaxis(x.astype(jnp.float32), 1, 2)[:, :, None, None]


def _hidden_and_seen(options, causal, keys, shape, read):
    """(bias or None, visible) of a block's scores, both broadcasting to (b, h_kv, group, l, size).

    shape: (l, h_kv); read(x, axis=…) cuts out the block
    """
    l, h_kv = shape

    def of_block(x):  # (b, h, l, n), any of them 1
        x = jnp.asarray(x)
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        x = x if x.shape[-1] == 1 else read(x, axis=3)
        heads = (1, 1) if x.shape[1] == 1 else (h_kv, -1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    visible = jnp.ones(len(keys), bool)
    if options["mask"] is not None:
        visible &= of_block(options["mask"])
    if options["kv_lengths"] is not None:
        visible &= keys < options["kv_lengths"][:, None, None, None, None]
    if causal:
        visible &= keys <= jnp.arange(l)[:, None]
    if options["bias"] is None:
        return None, visible
    bias = of_block(options["bias"]).astype(jnp.float32)
    return bias, visible & (bias > -jnp.inf)


def _block_state(scores, values, visible) -> ExactState:
    """The state of a block: scores (b, h_kv, group, l, size), values (b, h_kv, size, dv)."""
    unknown = visible & (scores != scores)
    seen = visible & (scores == scores)
    power, mantissa = weight_of(jnp.where(seen, scores, 0))
    mantissa = jnp.where(seen, mantissa, 0)
    power_w = jnp.where(unknown, 8 * NO_NUMBER, jnp.where(seen, power, 8 * EMPTY))
    top = jnp.max(position_of(power_w), axis=-1)
    digits = digits_from(top[..., None], power_w, mantissa)
    weights = Sums(top, in_halves(jnp.sum(digits, axis=-1, keepdims=True, dtype=jnp.int32)))

    entries, value_power, number = value_digits(values)
    value_power, number = value_power[:, :, None, None], number[:, :, None, None]
    nothing = jnp.all(values == 0, axis=-1)[:, :, None, None]
    power_v = jnp.where(seen & ~nothing, power + value_power, 8 * EMPTY)
    power_v = jnp.where(unknown | (visible & ~number), 8 * NO_NUMBER, power_v)
    top = jnp.max(position_of(power_v), axis=-1)
    digits = digits_from(top[..., None], power_v, mantissa)
    return ExactState(weights, Sums(top, in_halves(_weighted_sums(digits, entries))))


def _weighted_sums(weights, values):
    """Σ weight · value over the keys by level, int32 (6, b, h_kv, group, l, dv).

    weights: the digits (6, b, h_kv, group, l, size); values: four of (b, h_kv, size, dv).
    The product of digits i and j is at level i + j. A matrix product in float32 adds whole
    numbers below 2^24 exactly, in any order.
    """
    _, b, h_kv, group, l, size = weights.shape
    rows = jnp.moveaxis(weights.astype(jnp.float32), 0, 2).reshape(b, h_kv, -1, size)
    levels = jnp.zeros((b, h_kv, LEVELS, group, l, values[0].shape[-1]), jnp.int32)
    for j, digits in enumerate(values):
        some = rows[:, :, : (LEVELS - j) * group * l]
        exact = lax.Precision.HIGHEST
        sums = jnp.einsum("bkrn,bknc->bkrc", some, digits.astype(jnp.float32), precision=exact)
        sums = sums.astype(jnp.int32).reshape(b, h_kv, -1, *levels.shape[3:])
        levels += jnp.pad(sums, [(0, 0), (0, 0), (j, 0), (0, 0), (0, 0), (0, 0)])
    return jnp.moveaxis(levels, 2, 0)


def _ungrouped(state: ExactState, shape) -> ExactState:
    """The state's axes (b, h_kv, group, l) as (b, l, h)."""

    def of_sums(sums):
        top = jnp.moveaxis(sums.top, 3, 1).reshape(shape)
        levels = jnp.moveaxis(sums.levels, 5, 3)
        return Sums(top, levels.reshape(*levels.shape[:2], *shape, -1))

    return ExactState(*map(of_sums, state))
