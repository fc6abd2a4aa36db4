"""Attention in plain JAX, a block of keys at a time.

A block's scores become a state, and the states of the blocks merge (the iteration of 2024
eq. 2–4, 2025 eq. 1–3, a block at a time, as in FlashAttention). The keys and values are read
once, where they lie; what is held besides them does not grow with their number. Beside this file:

    blocks     how large a block is, and which are read at all
    products   how its scores and its sums are computed
    masks      who sees which of its keys
    intervals  which of them, in a tree, by two integers a token; gradient: that of such a loop

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
from treeattn.idea.state import AttentionState, finalize, finite, merge
from treeattn.kernel import products
from treeattn.kernel.blocks import block_size, over_blocks, split_blocks
from treeattn.kernel.gradient import gradients_of_sums, with_transpose
from treeattn.kernel.inputs import Grouped, Inputs, NewKeys
from treeattn.kernel.intervals import by_query_blocks
from treeattn.kernel.masks import (
    and_visible,
    block_visibility,
    hidden_from_all,
    mask_and_clip,
    shown_by,
    zero_hidden,
)


def attend_blockwise(inputs: Inputs) -> AttentionState:
    """The state of the queries after all keys that they see: (b, l, h) and (b, l, h, dv)."""
    arrays = [x for x in inputs.arrays if x is not None]
    return _attend_blockwise(inputs, products.may_be_partitioned(*arrays))


def blockwise_attention(inputs: Inputs, new: NewKeys | None = None):
    """The output (b, l, h, dv) after the keys of both, in the queries' dtype."""
    state = attend_blockwise(inputs)
    if new is not None:
        state = merge(state, attend_blockwise(new.inputs(inputs)))
    return finalize(state)[0].astype(inputs.q.dtype)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _attend_blockwise(inputs: Inputs, partitioned: bool) -> AttentionState:
    """As `attend_blockwise`: one program where it is called by itself."""
    inputs = hide_future(inputs)
    if inputs.q.size == 0 or inputs.k.shape[1] == 0:
        return varying_like(AttentionState.identity(*inputs.state_shape), *inputs.arrays)
    state = _attend(group_heads(inputs, partitioned))
    return jax.tree.map(_ungroup_heads, state)


def hide_future(inputs: Inputs) -> Inputs:
    """The inputs with causality in their mask."""
    if not inputs.causal:
        return inputs
    below = jnp.tri(inputs.q.shape[1], dtype=bool)[None, None]
    return inputs.replace(mask=below if inputs.mask is None else inputs.mask & below, causal=False)


def group_heads(inputs: Inputs, partitioned: bool) -> Grouped:
    """The inputs as the loop reads them, queries scaled and in the accumulation dtype.

    They are cast before the loop: a cast inside a branch would put its transpose, an Allreduce,
    into the branch's backward pass, where devices that skip the block would leave the others
    waiting.
    """
    q, k, v, mask, bias, lengths, factor = varying_like(inputs.arrays, *inputs.arrays)
    b, l, h, d = q.shape
    h_kv = k.shape[2]
    _, _, dtype = inputs.state_shape
    scale = inputs.scale if factor is None else inputs.scale * factor.astype(dtype)
    q = (q.astype(dtype) * scale).reshape(b, l, h_kv, h // h_kv, d)

    def group(x):  # (b, h, l, n) -> (b, h_kv, group, l, n), or (b, 1, 1, l, n)
        heads = (1, 1) if x.shape[1] == 1 else (h_kv, h // h_kv)
        return x.reshape(len(x), *heads, *x.shape[2:])

    scales = inputs.key_scale, inputs.value_scale
    scales = jax.tree.map(lambda x: x.astype(dtype)[..., None], scales)
    key_scale, value_scale = varying_like(scales, *inputs.arrays, *scales)
    return Grouped(
        q=q.transpose(0, 2, 3, 1, 4),
        k=k,
        v=v,
        mask=None if mask is None else group(mask),
        bias=None if bias is None else group(bias).astype(dtype),
        lengths=lengths,
        intervals=inputs.intervals,
        key_scale=key_scale,
        value_scale=value_scale,
        by_row=inputs.by_row,
        stale=inputs.stale,
        partitioned=partitioned,
    )


def _ungroup_heads(x):
    """(b, h_kv, group, l, …) -> (b, l, h, …)."""
    b, h_kv, group, l, *rest = x.shape
    x = x.transpose(0, 3, 1, 2, *range(4, x.ndim))
    return x.reshape(b, l, h_kv * group, *rest)


MOVING = "q", "k", "v", "bias", "key_scale", "value_scale"  # what has a gradient


@jax.custom_jvp
def _attend(inputs: Grouped) -> AttentionState:
    """The state of the queries: fields (b, h_kv, group, l) and (b, h_kv, group, l, dv)."""
    b = inputs.q.shape[0]
    alike = inputs.lengths is None and inputs.intervals is None
    if alike or b == 1 or not inputs.by_row:
        return _attend_rows_by_queries(inputs, 0)

    def attend_row(i):
        def cut(x):
            shared = x is None or x.shape[0] == 1
            return x if shared else lax.dynamic_slice_in_dim(x, i, 1)

        def cut_intervals(intervals):
            return intervals and intervals.replace(ends=cut(intervals.ends))

        row = inputs.replace(
            q=cut(inputs.q),
            mask=cut(inputs.mask),
            bias=cut(inputs.bias),
            lengths=cut(inputs.lengths),
            intervals=cut_intervals(inputs.intervals),
        )
        return _attend_rows_by_queries(row, i)

    states = lax.map(attend_row, jnp.arange(b, dtype=jnp.int32))
    return jax.tree.map(lambda x: x[:, 0], states)


def _attend_rows_by_queries(inputs: Grouped, row) -> AttentionState:
    """As `_attend_rows`."""
    return by_query_blocks(functools.partial(_attend_rows, row=row), inputs)


def _attend_rows(inputs: Grouped, row) -> AttentionState:
    """The state of the queries, whose keys and values begin with row `row` of k and v.

    So a single row of queries, (1, h_kv, group, l, d), reads its keys where they lie.
    """
    q = inputs.q
    partitioned = inputs.partitioned
    n = inputs.k.shape[1]
    size = block_size(inputs)
    few = products.few_queries(q, n) and inputs.intervals is None
    shrunk, root = products.shrink(q, partitioned)
    streams = products.stream_queries(shrunk) if few else None
    read = functools.partial(products.read_block, row=row, rows=len(q), dtype=q.dtype)

    def scale_of_block(x, first, hidden=None):
        if x is None or x.shape[1] == 1:
            return x if x is None else read(x, 0, 1)
        return zero_hidden(read(x, first, size), hidden)

    def state_of_block(start):
        first, visible, bias = block_visibility(inputs, start, size)
        keys = read(inputs.k, first, size)
        if few:
            s = products.stream_scores(streams, keys, partitioned)
        else:
            s = products.matrix_scores(shrunk, keys)
        s = products.times_scale(s, scale_of_block(inputs.key_scale, first))
        s = mask_and_clip(s * root * root, visible, bias)
        m = products.row_max(s, partitioned)
        p = jnp.exp(s - finite(m)[..., None])
        hidden = hidden_from_all(visible) if inputs.stale and inputs.hides else None
        value_scale = scale_of_block(inputs.value_scale, first, hidden)

        def values(at: int, count: int):
            return zero_hidden(read(inputs.v, first + at, count), hidden, at)

        if few:  # a stream of values at a time
            width = size // products.STREAMS
            parts = [values(at, width) for at in range(0, size, width)]
            denominator, numerator = products.stream_sums(p, parts, partitioned, value_scale)
        else:
            denominator, numerator = products.matrix_sums(p, values(0, size), value_scale)
        m = jnp.where(jnp.isnan(denominator), denominator, m)  # the maximum may pass over a NaN
        # Values that others see may be NaN, and a query that sees none has 0 of each.
        numerator = jnp.where((m == -jnp.inf)[..., None], 0, finite(numerator))
        return AttentionState(m, denominator, numerator)

    if size == n and inputs.lengths is None and inputs.intervals is None:
        return state_of_block(jnp.int32(0))

    def add_block(state, start):
        return merge(state, state_of_block(start))

    state = AttentionState.identity(q.shape[:-1], inputs.v.shape[-1], q.dtype)
    state = varying_like(state, *inputs.arrays)
    return over_blocks(add_block, state, size, inputs)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(primals, tangents):
    """The derivative: that of a second pass over the blocks, relative to the final pivot.

    The pivot is constant, so the blocks only add up: nothing has to be kept of each.
    """
    (inputs,) = primals
    (given,) = tangents
    state = _attend(inputs)
    tangents = {name: getattr(given, name) for name in MOVING}
    tangents = {
        name: t for name, t in tangents.items() if t is not None and not isinstance(t, SymbolicZero)
    }
    moving = {name: getattr(inputs, name) for name in tangents}

    def sums(moving):
        return by_query_blocks(_sums, inputs.replace(**moving), state.max)

    def derivative(tangents):
        return jax.jvp(sums, (moving,), (tangents,))[1]

    def gradient(cotangents):
        found = gradients_of_sums(inputs, state.max, *cotangents)
        return {name: found[name] for name in tangents}

    if inputs.intervals is None:
        d, n = derivative(tangents)
    else:
        d, n = with_transpose(derivative, gradient, tangents)
    n = jnp.where((state.max == -jnp.inf)[..., None], 0, n)  # what it does not see may be NaN
    return state, AttentionState(jnp.zeros_like(state.max), d, n)


def _sums(inputs: Grouped, m):
    """(Σ exp(s − m), Σ exp(s − m) v), m constant: what a state holds, made to be differentiated.

    m and the first are (b, h_kv, group, l), the second (b, h_kv, group, l, dv).
    """
    q = inputs.q
    bias = inputs.bias
    n = inputs.k.shape[1]
    size = block_size(inputs)
    m = lax.stop_gradient(finite(m))[..., None]
    shrunk, root = products.shrink(q)
    # Handed to the loop as blocks: each then gets its gradient in its place, where slices of
    # one array would add up arrays of its size.
    blocks = {"k": split_blocks(inputs.k, 1, size), "v": split_blocks(inputs.v, 1, size)}
    if bias is not None and bias.shape[-1] == n:
        blocks["bias"] = split_blocks(bias, -1, size)
    scales = {"key_scale": inputs.key_scale, "value_scale": inputs.value_scale}
    own = {name: x for name, x in scales.items() if x is not None and x.shape[1] == n}
    blocks |= {name: split_blocks(x, 1, size) for name, x in own.items()}
    without_bias = inputs.replace(bias=None)

    def add_block(sums, start, block):
        _, visible, _ = block_visibility(without_bias, start, size)
        added = block.get("bias", bias)
        if added is not None:
            visible = and_visible(visible, shown_by(added))
        hidden = hidden_from_all(visible) if inputs.hides else None
        keys = zero_hidden(block["k"].astype(q.dtype), hidden)
        values = zero_hidden(block["v"].astype(q.dtype), hidden)
        of_block = {name: zero_hidden(block[name], hidden) for name in own}
        key_scale, value_scale = (scales | of_block).values()
        s = products.times_scale(products.matrix_scores(shrunk, keys), key_scale)
        s = mask_and_clip(s * root * root, visible, added)
        p = jnp.exp(s - m)
        return jax.tree.map(jnp.add, sums, products.matrix_sums(p, values, value_scale))

    denominator = jnp.zeros(m.shape[:-1], m.dtype)
    numerator = jnp.zeros((*m.shape[:-1], inputs.v.shape[-1]), m.dtype)
    zeros = varying_like((denominator, numerator), *inputs.arrays)
    return over_blocks(add_block, zeros, size, inputs, blocks)
