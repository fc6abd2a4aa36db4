"""A kernel for GPUs in Pallas: the keys split over many programs, each of which returns a state.

A decoding step has too few queries to keep a GPU busy, so the keys are split ("split-K", as in
Flash-Decoding). One program takes a tile of queries, all those that read one key head, and a part
of that head's keys, a block at a time. What it returns is an `AttentionState`; a second kernel
merges those of all parts (treeattn/kernel/splits.py). Sums are in float32, whatever the inputs are.

Triton compiles the kernel for CUDA devices. Anywhere else Pallas interprets it, which is slow: for
tests, and to look at it. The derivative is the blockwise form's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import finite
from treeattn.kernel.inputs import Inputs, NewKeys
from treeattn.kernel.masks import mask_and_clip, shown_by
from treeattn.kernel.split_k import with_derivatives
from treeattn.kernel.splits import keep_nan, merge_splits
from treeattn.kernel.tiles import (
    SIDE,
    Tiling,
    ceil,
    divide,
    dot,
    grid,
    indices,
    load,
    load_rows,
    shrink_tile,
    side,
    store_state,
    tile_of,
    triton,
    untyped_array,
)

MAX_HEAD_DIM = 256


def obstacle(inputs: Inputs) -> str | None:
    """Why the kernel cannot take these arguments, naming the argument; None if it can."""
    if triton is None:
        return (
            "implementation: 'pallas' needs jax.experimental.pallas.triton, which "
            f"JAX {jax.__version__} does not have"
        )
    if inputs.intervals is not None:
        return "ends: the pallas kernel takes none; use implementation='blockwise'"
    if inputs.q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"q: the pallas kernel takes float16, bfloat16 or float32, got {inputs.q.dtype}"
    for name, d in (("q", inputs.q.shape[-1]), ("v", inputs.v.shape[-1])):
        if d > MAX_HEAD_DIM:
            return f"{name}: the pallas kernel takes a head_dim up to {MAX_HEAD_DIM}, got {d}"
    return None


def _run(inputs: Inputs, output_dtype=None, new: NewKeys | None = None) -> tuple:
    """What `_call` returns, compiled for CUDA, interpreted for anything else."""
    arrays = (*inputs.arrays, new)
    arguments = varying_like(arrays, *jax.tree.leaves(arrays))
    options = {"scale": inputs.scale, "causal": inputs.causal, "output_dtype": output_dtype}
    call = functools.partial(_call, **options)
    compiled = functools.partial(call, interpret=False)
    interpreted = functools.partial(call, interpret=True)
    found = lax.platform_dependent(*arguments, cuda=compiled, default=interpreted)
    return varying_like(found, *jax.tree.leaves(arrays))


pallas_attend, pallas_attention, pallas_attention_with_new = with_derivatives(_run)


def _call(*arrays, interpret: bool, output_dtype=None, **options) -> tuple:
    """The state's fields (b, l, h), (b, l, h) and (b, l, h, dv), or its output alone.

    arrays: as `Inputs.arrays`, then `NewKeys` if there are any; options: scale and causal
    """
    states = _split_states(*arrays, interpret=interpret, **options)
    return merge_splits(states, interpret, output_dtype)


def _split_states(
    q,
    k,
    v,
    mask,
    bias,
    lengths,
    factor,
    new=None,
    *,
    scale: float,
    causal: bool,
    interpret: bool,
):
    """The states of all splits: fields (splits, b, l, h), and (splits, b, l, h, dv)."""
    b, l, h, _ = q.shape
    h_kv, dv = v.shape[2:]
    tiling = tile_of(q, v)
    if bias is not None and bias.dtype == jnp.float64:  # no room for it in shared memory
        bias = bias.astype(jnp.float32)
    lengths = _column(lengths)
    factor = None if factor is None else factor.astype(jnp.float32).reshape(1, 1)
    new = NewKeys(None, None) if new is None else new._replace(lengths=_column(new.lengths))

    def head_spec(x):
        if x is None:
            return None
        shape = None, x.shape[1], None, x.shape[3]
        return pl.BlockSpec(shape, lambda j, s, i: (i, 0, j % h_kv, 0))

    def result(*shape):
        rest = [0] * len(shape)
        spec = pl.BlockSpec((None, None, *shape), lambda _, s, i: (s, i, *rest))
        return spec, untyped_array("float32", tiling.splits, b, *shape)

    by_row = mask, bias, lengths, factor
    in_specs = [_row_spec(q), head_spec(k), head_spec(v), *map(_row_spec, by_row)]
    new_specs = head_spec(new.k), head_spec(new.v), _row_spec(new.mask), _row_spec(new.lengths)
    out_specs, out_shape = zip(result(l, h), result(l, h), result(l, h, dv), strict=True)
    # A single row of tensor cores waits for memory; several need room instead, and so do heads so
    # wide that a third block would not fit in what GPUs of 8.9 and 12.0 have.
    compiler_params = triton.CompilerParams(
        num_warps=4 if tiling.rows * side(dv) < 1 << 13 else 8,
        num_stages=3 if tiling.rows == SIDE < tiling.block else 2,
    )
    call = pl.pallas_call(
        functools.partial(_kernel, h_kv=h_kv, scale=scale, causal=causal, tiling=tiling),
        grid=(h_kv * tiling.tiles, tiling.splits, b),
        in_specs=[*in_specs, *new_specs],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=compiler_params,
        interpret=interpret,
        name="treeattn_split_k",
    )
    return call(q, k, v, *by_row, *new)


def _column(lengths):
    """(b,) as (b, 1); None if it is None."""
    return None if lengths is None else lengths[:, None]


def _row_spec(x):
    """What a program is given of `x`, (b, …): its row, or what all rows share."""
    if x is None:
        return None
    each = int(len(x) > 1)
    rest = [0] * (x.ndim - 1)
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, s, i: (i * each, *rest))


def _kernel(
    q,
    k,
    v,
    mask,
    bias,
    length,
    factor,
    new_k,
    new_v,
    new_mask,
    new_length,
    *out,
    h_kv: int,
    scale: float,
    causal: bool,
    tiling: Tiling,
):
    """One program: the state of a tile of queries after one split of a head's keys.

    References to q (l, h, d), to k (n, d) and v (n, dv) of one head, mask and bias (h, l, n), an
    axis being 1 where all share an entry, length (1,) and factor (1,); new_k and the others the
    same of a few keys more, or None. out: the state's fields, (l, h), (l, h) and (l, h, dv).
    """
    l, heads, d = q.shape
    n, dv = v.shape
    rows, _, block, splits = tiling
    tile, head = divide(pl.program_id(0), h_kv)
    group = heads // h_kv
    query, member = divide(tile * rows + indices(rows), group)
    place = query, head * group + member
    is_query = query < l  # past the last one is padding
    queries, root = shrink_tile(load_rows(q, place, is_query, d), d)
    root_and_scale = root * (scale if factor is None else scale * factor[0])

    length = jnp.int32(n) if length is None else length[0]
    keys_a_split = ceil(ceil(length, block), splits) * block
    start = pl.program_id(1) * keys_a_split
    stop = jnp.minimum(start + keys_a_split, length)
    if causal:
        last, _ = divide(tile * rows + rows - 1, group)
        stop = jnp.minimum(stop, last + 1)
    # Weights divided by at least their number keep the sum of values in float32's range.
    more = 0 if new_k is None else len(new_k)
    most = 1 if v.dtype == jnp.float16 else pl.next_power_of_2(n + more)

    def add(state, k, v, key, is_key, mask, bias, causal, stale):
        m, denominator, numerator = state
        keys = load_rows(k, (key,), is_key, d)
        there = is_query[:, None] & is_key[None]
        visible, added = _visibility(there, place, key, mask, bias, causal)
        if stale and not mask is bias is None:  # what nobody sees may be NaN
            is_key = is_key & (jnp.max(visible.astype(jnp.int32), axis=0) > 0)
        values = load_rows(v, (key,), is_key, dv)
        s = _mask_and_keep_nan(dot(queries, keys, 1) * root * root_and_scale, visible, added)
        pivot = jnp.maximum(m, jnp.max(s, axis=1))
        weight = jnp.exp(finite(m) - finite(pivot))
        p = jnp.exp(s - finite(pivot)[:, None])
        denominator = denominator * weight + jnp.sum(p, axis=1)
        numerator = numerator * weight[:, None] + dot(p / most, values, 0)
        return pivot, denominator, numerator

    def add_block(i, state):
        key = start + i * block + indices(block)
        return add(state, k, v, key, key < stop, mask, bias, causal, True)

    def add_new(i, state):
        size = min(side(more), block)
        key = i * size + indices(size)
        count = more if new_length is None else new_length[0]
        return add(state, new_k, new_v, key, key < count, new_mask, None, False, False)

    m = jnp.full(rows, -jnp.inf, jnp.float32)
    numerator = jnp.zeros((rows, side(dv)), jnp.float32)
    blocks = ceil(stop - start, block)  # none, where the split begins past the end
    state = m, jnp.zeros_like(m), numerator
    state = lax.fori_loop(jnp.int32(0), blocks, add_block, state)
    if more:  # the last split's keys are the fewest
        blocks = jnp.int32(pl.cdiv(more, min(side(more), block)))
        blocks = jnp.where(pl.program_id(1) == splits - 1, blocks, 0)
        state = lax.fori_loop(jnp.int32(0), blocks, add_new, state)
    store_state(out, _without_loss(*state, most), place, is_query)


def _visibility(there, place, key, mask, bias, causal: bool):
    """(visible, added) of a tile of scores: who sees which key, and the bias, or None.

    there: whether both the query and the key are there; place: the queries', and their heads
    """
    query, head = place

    def entries(x):  # of a mask or bias (heads, queries, keys); all share an axis of 1
        at = zip((head, query, key), x.shape, strict=True)
        return load(x, grid(*(i * min(size - 1, 1) for i, size in at)), there)

    visible = there
    if causal:
        visible = visible & (key[None] <= query[:, None])
    if mask is not None:
        visible = visible & entries(mask)
    if bias is None:
        return visible, None
    added = entries(bias).astype(jnp.float32)
    return visible & shown_by(added), added


# Triton makes instructions of max, min and clamp that drop a NaN: of a number and a NaN they give
# the number. So in the kernel's loop the pivot is that of the other scores, while the sums are NaN.


def _mask_and_keep_nan(s, visible, added):
    """`mask_and_clip`; a visible score that was NaN, or has a bias that is, is NaN still."""
    lost = s != s
    if added is not None:
        lost = lost | (added != added)
    return jnp.where(visible & lost, jnp.nan, mask_and_clip(s, visible, added))


def _without_loss(m, denominator, numerator, most: int):
    """The state to write, of a numerator that was divided by `most`."""
    return keep_nan(m, denominator, numerator * most)
