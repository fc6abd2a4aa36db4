"""The attention of plain.py, a block of keys at a time: the same values in bounded memory.

The scores of a block become a state, and the states of the blocks merge (the iteration of 2024
eq. 2–4, 2025 eq. 1–3, a block at a time, as in FlashAttention). Without causal order and without
derivatives, keys and values are read once, in the layout that they have, and temporary memory does
not grow with their number.

Inside, queries are (b, h_kv, group, l, d), grouped by the key head that they read, and already
scaled. Scores of a block of `size` keys are (b, h_kv, group, l, size). Masks and biases (b, h, l,
n), keys and values (b, n, h_kv, ·) keep their layout.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from treeattn import products
from treeattn.inputs import (
    Inputs,
    by_key_head,
    by_query,
    pad_axis,
    unused_keys,
    visible_keys,
)
from treeattn.state import AttentionState, finite, merge

SCORES = 1 << 20  # about the most scores of a block: more do not fit a CPU's caches
# Causal texts of more tokens than this are halved. In a text that is not halved, half of the scores
# that are computed are hidden.
CAUSAL_BLOCK = 128


def attend_blockwise(inputs: Inputs) -> AttentionState:
    """The state of checked queries after all keys that they see: (b, l, h) and (b, l, h, dv).

    Expects at least one query and one key.
    """
    without_options = inputs.mask is inputs.bias is inputs.lengths is None
    if inputs.causal and without_options and inputs.q.shape[1] > CAUSAL_BLOCK:
        return _attend_causal(inputs)
    return jax.tree.map(by_query, _attend(_group_heads(inputs)))


def _attend_causal(inputs: Inputs) -> AttentionState:
    """The state of causal queries, without mask, bias and lengths.

    The text is cut into two halves, and each half attends to itself, by this function again while
    it has more than CAUSAL_BLOCK tokens: 1,000 tokens become 8 parts of 125. Then the queries of
    the second half attend to all keys of the first, and these states merge with those that they
    have from their own half. This tree over the text computes few hidden scores.
    """
    b, length = inputs.q.shape[:2]
    size = -(-length // 2)

    def halves(x):  # each half becomes a text; padded keys come last, so no real query sees them
        return pad_axis(x, 1, 2 * size).reshape(2 * b, size, *x.shape[2:])

    def half(both, which):  # the first (0) or the second (1) half of each text
        return jax.tree.map(lambda x: x.reshape(b, 2, *x.shape[1:])[:, which], both)

    q, k, v = (halves(x) for x in (inputs.q, inputs.k, inputs.v))
    own = attend_blockwise(inputs.replace(q=q, k=k, v=v))
    before = inputs.replace(q=half(q, 1), k=half(k, 0), v=half(v, 0), causal=False)
    second = merge(attend_blockwise(before), half(own, 1))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1)[:, :length], half(own, 0), second)


def _group_heads(inputs: Inputs) -> Inputs:
    """The inputs in the layout of the loop, with queries scaled and in the accumulation dtype.

    Queries are (b, h_kv, group, l, d), with group = h // h_kv.
    """
    q, k, v, bias = _varying_as(inputs, (inputs.q, inputs.k, inputs.v, inputs.bias))
    b, l, h, d = q.shape
    h_kv = k.shape[2]
    q = finite(q.astype(inputs.dtype) * inputs.total_scale).reshape(b, l, h_kv, h // h_kv, d)
    return inputs.replace(q=q.transpose(0, 2, 3, 1, 4), k=k, v=v, bias=bias, traced_scale=None)


@jax.custom_jvp
def _attend(inputs: Inputs) -> AttentionState:
    """The state of the queries: fields (b, h_kv, group, l) and (b, h_kv, group, l, dv)."""
    b = inputs.q.shape[0]
    # On a CPU the texts go one after another, so that a text of 10 keys does not read as many
    # blocks as a text of 10,000. On a GPU all texts go at once, to keep it busy.
    if inputs.lengths is None or b == 1 or products.compiled_for() != "cpu":
        return _attend_texts(inputs, 0)

    def attend_text(i):
        def cut(x):
            return x if x.shape[0] == 1 else lax.dynamic_slice_in_dim(x, i, 1)

        text = jax.tree.map(cut, inputs.replace(k=None, v=None))
        return _attend_texts(text.replace(k=inputs.k, v=inputs.v), i)

    states = lax.map(attend_text, jnp.arange(b, dtype=jnp.int32))
    return jax.tree.map(lambda x: x[:, 0], states)


def _attend_texts(inputs: Inputs, first_text) -> AttentionState:
    """The state of the queries: text i of q attends to text `first_text` + i of k and v.

    k and v are whole, so the queries of one text, (1, h_kv, group, l, d), read its keys in place.
    """
    q = inputs.q
    n = inputs.k.shape[1]
    size = block_size(inputs)
    few = products.few_queries(q, n)
    may_split = inputs.may_split
    query_lanes = products.lane_queries(q) if few else None

    def read(x, first, count):
        return products.read_block(x, first, count, text=first_text, texts=len(q), dtype=q.dtype)

    def state_of_block(start):
        first, visible, bias = _visibility(inputs, start, size)
        keys = read(inputs.k, first, size)
        if few:
            s = products.lane_scores(query_lanes, keys, may_split)
        else:
            s = products.matrix_scores(q, keys)
        s = _mask_and_clip(s, visible, bias)
        m = products.row_max(lax.stop_gradient(s), may_split)
        p = jnp.exp(s - finite(m)[..., None])
        unused = None if visible is None else unused_keys(visible)

        def values(at, count):
            return _zero_unused(read(inputs.v, first + at, count), unused, at)

        if few:  # a lane of values at a time
            width = size // products.LANES
            value_lanes = [values(at, width) for at in range(0, size, width)]
            denominator, numerator = products.lane_sums(p, value_lanes, may_split)
        else:
            denominator, numerator = products.matrix_sums(p, values(0, size))
        m = jnp.where(jnp.isnan(denominator), denominator, m)  # row_max may ignore a NaN
        # A query that sees no key has weights of 0, but 0 times another query's NaN is NaN.
        numerator = jnp.where((m == -jnp.inf)[..., None], 0, finite(numerator))
        return AttentionState(m, denominator, numerator)

    def add_block(state, start):
        return merge(state, state_of_block(start))

    # With lengths, keep the loop even for one block: without it XLA slices the query anew for every
    # score, which took 1.5 to 1.7 times as long (9 query heads and 3 key heads of head_dim 64, a
    # cache of 1,024 slots with 512 keys).
    if size == n and inputs.lengths is None:
        return state_of_block(jnp.int32(0))
    nothing = AttentionState.identity(q.shape[:-1], inputs.v.shape[-1], q.dtype)
    return _over_blocks(add_block, _varying_as(inputs, nothing), size, inputs)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(primals, tangents):
    """Differentiates `_sums`, a second pass over the blocks, instead of the first pass.

    `_sums` is relative to the final pivot. The pivot is constant, so the blocks only add up, and no
    block's scores have to be kept. Second derivatives of a `lax.scan` that calls this function
    bypass this rule: JAX then differentiates the first pass.
    """
    (inputs,) = primals
    (given,) = tangents
    state = _attend(inputs)
    directions = {name: x for name, x in vars(given).items() if isinstance(x, jax.Array)}
    moving = {name: getattr(inputs, name) for name in directions}  # others have symbolic zeros

    def sums(moving):
        return _sums(inputs.replace(**moving), state.max)

    values, (d, n) = jax.jvp(sums, (moving,), (directions,))
    empty = (state.max == -jnp.inf)[..., None]
    if products.reads_bits(inputs.k.dtype):
        # The first pass reads the keys as bits, which have no derivative. So that the returned
        # state can be differentiated again, its sums are those of the second pass.
        state = AttentionState(state.max, values[0], jnp.where(empty, 0, finite(values[1])))
    n = jnp.where(empty, 0, n)  # a hidden value may be NaN
    return state, AttentionState(jnp.zeros_like(state.max), d, n)


def _sums(inputs: Inputs, m):
    """(Σ exp(s − m), Σ exp(s − m) v) with m constant: the sums of a state, to be differentiated.

    m and the first are (b, h_kv, group, l), the second (b, h_kv, group, l, dv).
    """
    q, bias = inputs.q, inputs.bias
    n = inputs.k.shape[1]
    size = block_size(inputs)
    m = lax.stop_gradient(finite(m))[..., None]
    # The loop scans over one array of stacked blocks, so their gradient is one array, too. The
    # gradient of slices would be a sum of arrays of the cache's size.
    blocks = {"k": _split_blocks(inputs.k, 1, size), "v": _split_blocks(inputs.v, 1, size)}
    if bias is not None and bias.shape[-1] == n:
        blocks["bias"] = _split_blocks(bias, -1, size)

    def sums_of_block(start, block):
        own = inputs.replace(bias=block.get("bias", bias))
        _, visible, added = _visibility(own, start, size)
        unused = None if visible is None else unused_keys(visible)
        keys = _zero_unused(block["k"].astype(q.dtype), unused)
        values = _zero_unused(block["v"].astype(q.dtype), unused)
        s = _mask_and_clip(products.matrix_scores(q, keys), visible, added)
        return products.matrix_sums(jnp.exp(s - m), values)

    def add_block(sums, start, block):
        return jax.tree.map(jnp.add, sums, sums_of_block(start, block))

    if size == n:
        return sums_of_block(jnp.int32(0), jax.tree.map(lambda x: x[0], blocks))
    d = jnp.zeros(m.shape[:-1], q.dtype)
    nothing = d, jnp.zeros((*d.shape, inputs.v.shape[-1]), q.dtype)
    return _over_blocks(add_block, _varying_as(inputs, nothing), size, inputs, blocks)


def _varying_as(inputs: Inputs, tree):
    """`tree` with the varying type of all inputs together, for loops inside `shard_map`.

    A loop's carry must vary over the same mesh axes before and after its body. Arrays are cast
    before the loop, because the transpose of a cast is an Allreduce. If this Allreduce were inside
    the loop's branch, the devices that take the branch would wait forever for those that skip it.
    Adding an empty sum changes the varying type, not the value; XLA removes it. The empty sum is an
    integer, so it has no gradient.
    """
    empty = [x[None][:0].astype(jnp.int32) for x in jax.tree.leaves(inputs)]
    zero = jnp.asarray(sum(jnp.sum(x) for x in empty))
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


def block_size(inputs: Inputs) -> int:
    """The number of keys in a block, for queries (b, h_kv, group, l, d) and n keys.

    Blocks are nearly equal: 1,500 keys are two blocks of 750. On a CPU a block has at most BLOCK
    keys; fewer, but at least 128, if BLOCK keys would have more than SCORES scores. On a GPU, where
    each block launches kernels, BLOCK and SCORES are 16 times as large. With lengths, and if matrix
    products are used, more than BLOCK / 2 keys are cut into at least two blocks, so that the empty
    half of a half-full cache is not read. For lanes the size is a multiple of LANES.
    """
    q = inputs.q
    n = inputs.k.shape[1]
    factor = 1 if products.compiled_for() == "cpu" else 16
    multiple = products.LANES if products.few_queries(q, n) else 1
    queries = q.size // q.shape[-1]
    most = min(max(factor * SCORES // queries, 128), factor * products.BLOCK)
    blocks = -(-n // most)
    half_may_be_empty = inputs.lengths is not None and n > factor * products.BLOCK // 2
    if n % multiple or (multiple == 1 and half_may_be_empty):
        blocks = max(blocks, 2)
    return -(-n // (blocks * multiple)) * multiple


def _over_blocks(add_block, nothing, size: int, inputs: Inputs, *blocks):
    """The state after add_block(state, start, *block) for each block that any text sees.

    start is the first key that the block adds: the last block begins earlier if it would not be
    whole. blocks are pytrees of arrays, whose first axis is the blocks.
    """
    n = inputs.k.shape[1]
    longest = n if inputs.lengths is None else _longest(inputs.lengths)

    @jax.checkpoint
    def visit(state, block):
        # The branch skips blocks past the longest text. It also stops XLA:CPU from hoisting the
        # cast of half-precision keys out of the loop, which would write a float32 copy of the
        # cache.
        start, *arrays = block
        more = start < lax.optimization_barrier(jnp.asarray(longest, jnp.int32))
        return lax.cond(more, add_block, lambda state, *_: state, state, start, *arrays), None

    starts = jnp.arange(0, n, size, dtype=jnp.int32)
    return lax.scan(visit, nothing, (starts, *blocks))[0]


@jax.custom_batching.custom_vmap
def _longest(lengths):
    """The largest of the lengths (b,), a scalar. Under `jax.vmap`, the largest of the whole batch.

    So a batch skips the blocks that none of its texts sees. If each element of the batch had a
    scalar of its own, `vmap` would turn the branch into a select of both sides, whose derivative
    JAX cannot transpose.
    """
    return jnp.max(lengths, initial=0)


@_longest.def_vmap
def _longest_of_a_batch(axis_size, in_batched, lengths):
    return _longest(lengths), False


def _split_blocks(x, axis: int, size: int):
    """`x` cut into blocks of `size` along `axis`, and the blocks stacked along a new first axis.

    Keys (b, n, h_kv, d) become (⌈n / size⌉, b, size, h_kv, d). The last block ends with the last
    entry, and may overlap the block before.
    """
    n = x.shape[axis]
    if size == n:  # JAX cannot reshape arrays of no entries that are sharded along an Explicit axis
        return x[None]
    whole = -(-n // size) - 1
    axis %= x.ndim
    head = lax.slice_in_dim(x, 0, whole * size, axis=axis)
    head = head.reshape(*x.shape[:axis], whole, size, *x.shape[axis + 1 :])
    last = lax.slice_in_dim(x, n - size, n, axis=axis)
    return jnp.concatenate([jnp.moveaxis(head, axis, 0), last[None]])


def _visibility(inputs: Inputs, start, size: int):
    """(first, visible, bias): the block's first key, which keys each query sees, and their bias.

    `visible` is None where nothing can hide a key: every query sees every key. The last block
    starts early enough to be whole, and hides the keys of the block before: of 10 keys in blocks of
    4, the last block is 6 … 9, and hides 6 and 7.
    """
    n = inputs.k.shape[1]
    first = jnp.minimum(start, n - size)
    position = first + jnp.arange(size, dtype=jnp.int32)

    def cut(x):
        whole = x is None or x.shape[-1] in (1, size)
        return x if whole else lax.dynamic_slice_in_dim(x, first, size, axis=-1)

    mask, bias = cut(inputs.mask), cut(inputs.bias)
    visible = visible_keys(inputs.replace(mask=mask, bias=bias), position)
    if n % size:
        new = (position >= start)[None, None, None, None]
        visible = new if visible is None else visible & new
    return first, visible, None if bias is None else by_key_head(bias, inputs.k.shape[2])


def _mask_and_clip(s, visible, bias):
    """The scores with their bias, within the dtype's range (∞ − ∞ is NaN); −∞ where hidden."""
    s = finite(s)
    if bias is not None:
        s = finite(s + bias)
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def _zero_unused(x, unused, first: int = 0):
    """Keys `first`, `first` + 1, … of a block, or their values (b, count, h_kv, ·); 0 where unused.

    A cache may hold anything there, and 0 · NaN is NaN.
    """
    if unused is None:
        return x
    if unused.shape[1] > 1:
        unused = unused[:, first : first + x.shape[1]]
    return jnp.where(unused, 0, x)
