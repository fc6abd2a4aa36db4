"""Attention in plain JAX, a block of keys at a time.

A block's scores become a state, and the states of the blocks merge (the iteration of 2024
eq. 2–4, 2025 eq. 1–3, a block at a time, as in FlashAttention). The keys and values are read
once, where they lie; what is held besides them does not grow with their number. How the scores
of a block and its sums are computed, treeattn/kernel/products.py says.

Here queries are (b, h_kv, group, l, d), grouped by the key head that they read, and already
scaled; scores (b, h_kv, group, l, size); mask and bias (b, h_kv, group, l, n), or 1 for an
axis that shares them. Keys and values stay as they came, (b, n, h_kv, ·).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState, finite, merge
from treeattn.kernel import products
from treeattn.kernel.inputs import Inputs
from treeattn.kernel.products import BLOCK, STREAMS

SCORES = 1 << 20  # scores held at a time, about: more of them fall out of the caches


def attend_blockwise(inputs: Inputs) -> AttentionState:
    """The state of the queries after all keys that they see."""
    arrays = [x for x in inputs.arrays if x is not None]
    return _attend_blockwise(inputs, products.may_be_partitioned(*arrays))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _attend_blockwise(inputs: Inputs, partitioned: bool) -> AttentionState:
    (b, l, h, d), (n, h_kv) = inputs.q.shape, inputs.k.shape[1:3]
    if inputs.causal:
        below = jnp.tri(l, dtype=bool)[None, None]
        inputs = inputs.replace(mask=below if inputs.mask is None else inputs.mask & below)
    shape, dv, dtype = inputs.state_shape
    if n == 0 or inputs.q.size == 0:
        return varying_like(AttentionState.identity(shape, dv, dtype), *inputs.arrays)
    # Before the loop: a cast inside a branch would put its transpose, an Allreduce, into the
    # branch's backward pass, where devices that skip the block would leave the others waiting.
    q, k, v, mask, bias, lengths, factor = varying_like(inputs.arrays, *inputs.arrays)
    scale = inputs.scale if factor is None else inputs.scale * factor.astype(dtype)
    q = (q.astype(dtype) * scale).reshape(b, l, h_kv, h // h_kv, d).transpose(0, 2, 3, 1, 4)
    mask, bias = (x if x is None else _group_heads(x, h_kv) for x in (mask, bias))
    bias = bias if bias is None else bias.astype(dtype)
    how = inputs.by_row, inputs.stale, partitioned
    state = _attend(how, q, k, v, mask, bias, lengths)
    return jax.tree.map(
        lambda x: x.transpose(0, 3, 1, 2, *range(4, x.ndim)).reshape(b, l, h, *x.shape[4:]), state
    )


def _group_heads(x, h_kv: int):
    """(b, h, l, n) -> (b, h_kv, group, l, n), or (b, 1, 1, l, n) when all heads share it."""
    b, h, l, n = x.shape
    return x.reshape((b, 1, 1, l, n) if h == 1 else (b, h_kv, h // h_kv, l, n))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(how, q, k, v, mask, bias, lengths) -> AttentionState:
    """how: whether rows are computed one after another, whether hidden entries may be NaN, and
    whether XLA may partition the program."""
    by_row, stale, partitioned = how
    b = q.shape[0]
    if lengths is None or b == 1 or not by_row:
        return _attend_rows(0, b, stale, partitioned, q, k, v, mask, bias, lengths)

    def row(i):
        own = (
            x if x is None or x.shape[0] == 1 else lax.dynamic_slice_in_dim(x, i, 1)
            for x in (q, mask, bias, lengths)
        )
        q_i, mask_i, bias_i, length = own
        return _attend_rows(i, 1, stale, partitioned, q_i, k, v, mask_i, bias_i, length)

    states = lax.map(row, jnp.arange(b, dtype=jnp.int32))
    return jax.tree.map(lambda x: x[:, 0], states)


def _attend_rows(
    row, rows: int, stale: bool, partitioned: bool, q, k, v, mask, bias, lengths
) -> AttentionState:
    """The state of q's rows, whose keys and values are rows row … row + rows − 1 of k and v."""
    n = k.shape[1]
    size = _block_size(q, n)
    few = products.few_queries(q, n)
    small, half = shrink(q, partitioned)
    small = products.stream_queries(small) if few else small
    read = functools.partial(products.read, row=row, rows=rows, dtype=q.dtype)
    hides = not (mask is bias is lengths is None)

    def see(start):
        first, visible, added = _seen(start, size, n, mask, bias, lengths)
        keys = read(k, first, size)
        if few:
            s = products.stream_scores(small, keys, partitioned)
        else:
            s = products.matrix_scores(small, keys)
        s = limit(s * half * half, visible, added)
        m = products.row_max(s, partitioned)
        p = jnp.exp(s - finite(m)[..., None])
        hidden = _hidden_from_all(visible) if stale and hides else None

        def values(at, count):
            return _without(read(v, first + at, count), hidden, at)

        if few:  # a stream of values at a time
            denominator, numerator = products.stream_sums(p, values, partitioned)
        else:
            denominator, numerator = products.matrix_sums(p, values(0, size))
        m = jnp.where(jnp.isnan(denominator), denominator, m)  # the maximum may pass over a NaN
        # Values that others see may be NaN, and a query that sees none has 0 of each.
        numerator = jnp.where((m == -jnp.inf)[..., None], 0, finite(numerator))
        return AttentionState(m, denominator, numerator)

    if size == n and lengths is None:
        return see(jnp.int32(0))

    state = AttentionState.identity(q.shape[:-1], v.shape[-1], q.dtype)
    state = varying_like(state, q, k, v, mask, bias, lengths)
    return _over_blocks(lambda state, start: merge(state, see(start)), state, size, n, lengths)


def _over_blocks(add_block, state, size: int, n: int, lengths, *blocks):
    """add_block(…add_block(state, 0, *blocks[0])…), for the blocks that any row sees."""
    longest = n if lengths is None else _longest(lengths)

    def visit(state, block):
        # The branch keeps blocks past the longest row from being read. It also keeps XLA:CPU
        # from moving the widening of half-precision keys out of the loop, which would write a
        # float32 copy of the whole cache.
        more = block[0] < lax.optimization_barrier(jnp.asarray(longest, jnp.int32))
        return lax.cond(more, add_block, lambda state, *_: state, state, *block), None

    starts = jnp.arange(0, n, size, dtype=jnp.int32)
    return lax.scan(jax.checkpoint(visit, prevent_cse=False), state, (starts, *blocks))[0]


@jax.custom_batching.custom_vmap
def _longest(lengths):
    """The largest of all lengths, those of the rows that `jax.vmap` adds, too.

    So a batch skips the blocks that none of its rows sees. With a length for each, JAX would turn
    the branches into a selection from both, whose derivative it cannot transpose.
    """
    return jnp.max(lengths, initial=0)


@_longest.def_vmap
def _longest_of_a_batch(axis_size, in_batched, lengths):
    return _longest(lengths), False


def _block_size(q, n: int) -> int:
    """Keys a block: at most BLOCK, at most n, nearly equal; for streams a multiple of STREAMS."""
    b, h_kv, group, l, _ = q.shape
    most = BLOCK
    if not products.few_queries(q, n):
        most = min(max(SCORES // max(b * h_kv * group * l, 1), 128), BLOCK)
        return -(-n // -(-n // most))
    blocks = -(-n // most)
    size = -(-n // (blocks * STREAMS)) * STREAMS
    return size if size <= n else -(-n // ((blocks + 1) * STREAMS)) * STREAMS


def _seen(start, size: int, n: int, mask, bias, lengths):
    """(first, visible, bias): the block's first key, who sees which of its keys, its bias.

    visible is None when everybody sees all. The last block starts early enough to be whole, and
    hides what was seen before.
    """
    first = jnp.minimum(start, n - size)
    position = (first + jnp.arange(size, dtype=jnp.int32))[None, None, None, None]
    visible = position >= start if n % size else None
    if lengths is not None:
        visible = _both(visible, position < lengths[:, None, None, None, None])

    def cut(x):
        return x if x.shape[-1] == 1 else lax.dynamic_slice_in_dim(x, first, size, axis=-1)

    if mask is not None:
        visible = _both(visible, cut(mask))
    if bias is not None:
        bias = cut(bias)
        visible = _both(visible, bias != -jnp.inf)  # a NaN hides nothing
    return first, visible, bias


def _hidden_from_all(visible):
    """(b, size, h_kv, 1) for a block's (b, h_kv, group, l, size), or 1 for an axis that shares its
    entries: whether no query that reads a key sees it."""
    hidden = ~jnp.any(visible, axis=(2, 3))
    return jnp.moveaxis(hidden, -1, 1)[..., None]


def _without(x, hidden, at: int = 0):
    """Keys or values of a block from its key `at` on; 0 where they are hidden. There a cache may
    hold anything, and 0 · NaN would be NaN."""
    if hidden is None:
        return x
    if hidden.shape[1] > 1:
        hidden = hidden[:, at : at + x.shape[1]]
    return jnp.where(hidden, 0, x)


def _both(visible, more):
    return more if visible is None else visible & more


def shrink(q, partitioned: bool = True):
    """(q / f², f): f a power of two for each query, so that no partial sum of q·k overflows.

    |q·k| ≤ d · max|q| · max|k|: with f² ≥ d · max|q|, the scores of q / f² stay below max|k|, which
    is in range. They are multiplied by f twice, after which the largest may be clipped.
    """
    largest = products.row_max(jnp.abs(q), partitioned)[..., None]
    exponent = jnp.ceil(jnp.maximum(jnp.log2(largest) + jnp.log2(q.shape[-1]), 0) / 2)
    exponent, one = lax.stop_gradient(exponent).astype(jnp.int32), jnp.ones_like(largest)
    f, inverse = jnp.ldexp(one, exponent), jnp.ldexp(one, -exponent)
    return q * inverse * inverse, f  # XLA would make q / f / f a division by f², which overflows


def limit(s, visible, bias):
    """The scores with their bias, within the dtype's range (∞ − ∞ is NaN); −∞ where hidden."""
    top = jnp.finfo(s.dtype).max
    s = jnp.clip(s, -top, top)
    if bias is not None:
        s = jnp.clip(s + bias, -top, top)
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(how, primals, tangents):
    """The derivative: that of a second pass over the blocks, relative to the final pivot.

    The pivot is constant, so the blocks only add up: nothing has to be kept of each.
    """
    state = _attend(how, *primals)
    q, k, v, mask, bias, lengths = primals
    arguments = {"q": q, "k": k, "v": v, "bias": bias}
    tangents = dict(zip(arguments, (*tangents[:3], tangents[4]), strict=True))
    tangents = {
        name: t for name, t in tangents.items() if t is not None and not isinstance(t, SymbolicZero)
    }

    def sums(moving):
        return _sums(**arguments | moving, mask=mask, lengths=lengths, m=state.max)

    moving = {name: arguments[name] for name in tangents}
    _, (d, n) = jax.jvp(sums, (moving,), (tangents,))
    n = jnp.where((state.max == -jnp.inf)[..., None], 0, n)  # what it does not see may be NaN
    return state, AttentionState(jnp.zeros_like(state.max), d, n)


def _sums(q, k, v, bias, *, mask, lengths, m):
    """(Σ exp(s − m), Σ exp(s − m) v), m constant: what a state holds, made to be differentiated."""
    n = k.shape[1]
    size = _block_size(q, n)
    m = lax.stop_gradient(finite(m))[..., None]
    small, half = shrink(q)
    hides = not (mask is bias is lengths is None)
    # Handed to the loop as blocks: each then gets its gradient in its place, where slices of
    # one array would add up arrays of its size.
    blocks = {"k": _blocks(k, 1, size), "v": _blocks(v, 1, size)}
    if bias is not None and bias.shape[-1] == n:
        blocks["bias"] = _blocks(bias, -1, size)

    def add_block(sums, start, block):
        _, visible, _ = _seen(start, size, n, mask, None, lengths)
        added = block.get("bias", bias)
        if added is not None:
            visible = _both(visible, added != -jnp.inf)
        hidden = _hidden_from_all(visible) if hides else None
        keys = _without(block["k"].astype(q.dtype), hidden)
        values = _without(block["v"].astype(q.dtype), hidden)
        s = limit(products.matrix_scores(small, keys) * half * half, visible, added)
        p = jnp.exp(s - m)
        return jax.tree.map(jnp.add, sums, products.matrix_sums(p, values))

    zeros = jnp.zeros(m.shape[:-1], m.dtype), jnp.zeros((*m.shape[:-1], v.shape[-1]), m.dtype)
    zeros = varying_like(zeros, q, k, v, mask, bias, lengths)
    return _over_blocks(add_block, zeros, size, n, lengths, blocks)


def _blocks(x, axis: int, size: int):
    """The blocks of `x` along `axis`, along a new first axis; the last is the last `size`."""
    n = x.shape[axis]
    whole = -(-n // size) - 1
    axis %= x.ndim
    head = lax.slice_in_dim(x, 0, whole * size, axis=axis)
    head = head.reshape(*x.shape[:axis], whole, size, *x.shape[axis + 1 :])
    last = lax.slice_in_dim(x, n - size, n, axis=axis)
    return jnp.concatenate([jnp.moveaxis(head, axis, 0), last[None]])
