"""Flash-Decoding on a page: the keys are split over many programs, and each returns a state.

A decoding step has too few queries to keep a GPU busy, so the keys are split ("split-K"). One
program takes a tile of the queries that read one key head, and a split of that head's keys, a block
at a time. It returns an `AttentionState`. A second kernel merges the states of all splits
(splits.py). Sums are in float32 for every dtype of the inputs.

Triton compiles the kernel for CUDA devices. On other devices Pallas interprets it, which is slow,
and meant for tests and for study. There is no gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from labs.kernels.splits import merge_splits
from labs.kernels.tiles import (
    SIDE,
    Tiling,
    ceil,
    divide,
    dot,
    finite,
    grid,
    indices,
    keep_nan,
    largest_weight,
    load,
    load_rows,
    shrink_tile,
    side,
    store_state,
    tile_of,
    triton,
)
from treeattn import AttentionState

MAX_HEAD_DIM = 256
MAX_BATCH = (1 << 16) - 1  # the largest third dimension of a CUDA grid


def split_k_attend(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None) -> AttentionState:
    """The state of the queries after their keys, for `implementation=` of the core's functions.

    q, k, v are float16, bfloat16 or float32, with head_dims up to 256. The other arguments are as
    in `treeattn.attend`, and a mask or bias has four axes. The fields (b, l, h) and (b, l, h, dv)
    are float32. Raises ValueError, with the argument's name, if the kernel cannot take an argument.
    """
    if (reason := obstacle(q, v)) is not None:
        raise ValueError(reason)
    options = {"mask": mask, "bias": bias, "kv_lengths": kv_lengths}
    compiled, interpreted = (functools.partial(_call, interpret=x) for x in (False, True))
    arguments = q, k, v, jnp.asarray(scale, jnp.float32), options
    return AttentionState(*lax.platform_dependent(*arguments, cuda=compiled, default=interpreted))


def obstacle(q, v) -> str | None:
    """Why the kernel cannot take these arguments, naming the argument; None if it can."""
    if triton is None:
        return f"split-K needs jax.experimental.pallas.triton, which JAX {jax.__version__} lacks"
    if q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"q: the split-K kernel takes float16, bfloat16 or float32, got {q.dtype}"
    if len(q) > MAX_BATCH:
        return f"q: the split-K kernel takes at most {MAX_BATCH} rows, got {len(q)}"
    for name, d in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if d > MAX_HEAD_DIM:
            return f"{name}: the split-K kernel takes a head_dim up to {MAX_HEAD_DIM}, got {d}"
    return None


def _call(q, k, v, scale, options, *, interpret: bool) -> tuple:
    """The state's fields, (b, l, h), (b, l, h) and (b, l, h, dv)."""
    b, l, h, _ = q.shape
    h_kv, dv = v.shape[2:]
    tiling = tile_of(q, v)
    mask, bias = options["mask"], options["bias"]
    if bias is not None and bias.dtype == jnp.float64:  # too large for shared memory
        bias = bias.astype(jnp.float32)
    lengths = options["kv_lengths"]
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)[:, None]

    def head_spec(x):
        shape = None, x.shape[1], None, x.shape[3]
        return pl.BlockSpec(shape, lambda j, s, i: (i, 0, j % h_kv, 0))

    def result(*shape):
        rest = [0] * len(shape)
        spec = pl.BlockSpec((None, None, *shape), lambda _, s, i: (s, i, *rest))
        return spec, jax.ShapeDtypeStruct((tiling.splits, b, *shape), jnp.float32)

    by_row = mask, bias, lengths, scale.reshape(1, 1)
    out_specs, out_shape = zip(result(l, h), result(l, h), result(l, h, dv), strict=True)
    # A tile with one row of tensor cores waits for memory, so a third block is copied ahead. Larger
    # tiles need the shared memory. So do very wide heads, whose third block would not fit on GPUs
    # of compute capability 8.9 and 12.0.
    compiler_params = triton.CompilerParams(
        num_warps=4 if tiling.rows * side(dv) < 1 << 13 else 8,
        num_stages=3 if tiling.rows == SIDE < tiling.block else 2,
    )
    call = pl.pallas_call(
        functools.partial(_kernel, h_kv=h_kv, tiling=tiling),
        grid=(h_kv * tiling.tiles, tiling.splits, b),
        in_specs=[_row_spec(q), head_spec(k), head_spec(v), *map(_row_spec, by_row)],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=compiler_params,
        interpret=interpret,
        name="treeattn_split_k",
    )
    return merge_splits(call(q, k, v, *by_row), interpret)


def _row_spec(x):
    """The block of `x` (b or 1, …) for a program: its own row, or the row that all share."""
    if x is None:
        return None
    each = int(len(x) > 1)
    rest = [0] * (x.ndim - 1)
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, s, i: (i * each, *rest))


def _kernel(q, k, v, mask, bias, length, scale, *out, h_kv: int, tiling: Tiling):
    """One program: the state of a tile of queries after one split of a head's keys.

    References to q (l, h, d), to k (n, d) and v (n, dv) of one head, to mask and bias (h, l, n),
    whose axes may be 1, to length (1,) and scale (1,). out: references to the state's fields,
    (l, h), (l, h) and (l, h, dv).
    """
    l, heads, d = q.shape
    n, dv = v.shape
    rows, _, block, splits = tiling
    tile, head = divide(pl.program_id(0), h_kv)
    group = heads // h_kv
    query, member = divide(tile * rows + indices(rows), group)
    place = query, head * group + member
    is_query = query < l  # rows past the last query are padding
    queries, root = shrink_tile(load_rows(q, place, is_query, d), d)

    length = jnp.int32(n) if length is None else length[0]
    keys_a_split = ceil(ceil(length, block), splits) * block
    start = pl.program_id(1) * keys_a_split
    stop = jnp.minimum(start + keys_a_split, length)
    most = largest_weight(v.dtype, n)

    def add_block(i, state):
        m, denominator, numerator = state
        key = start + i * block + indices(block)
        is_key = key < stop
        keys = load_rows(k, (key,), is_key, d)
        there = is_query[:, None] & is_key[None]
        visible, added = _visibility(there, place, key, mask, bias)
        if not mask is bias is None:  # hidden values may be NaN
            is_key = is_key & (jnp.max(visible.astype(jnp.int32), axis=0) > 0)
        values = load_rows(v, (key,), is_key, dv)
        s = _hidden_and_clipped(dot(queries, keys, 1) * root * (root * scale[0]), visible, added)
        pivot = jnp.maximum(m, jnp.max(s, axis=1))
        weight = jnp.exp(finite(m) - finite(pivot))
        p = jnp.exp(s - finite(pivot)[:, None])
        denominator = denominator * weight + jnp.sum(p, axis=1)
        numerator = numerator * weight[:, None] + dot(p / most, values, 0)
        return pivot, denominator, numerator

    m = jnp.full(rows, -jnp.inf, jnp.float32)
    state = m, jnp.zeros_like(m), jnp.zeros((rows, side(dv)), jnp.float32)
    blocks = ceil(stop - start, block)  # 0 if the split begins past the end
    m, denominator, numerator = lax.fori_loop(jnp.int32(0), blocks, add_block, state)
    store_state(out, keep_nan(m, denominator, numerator * most), place, is_query)


def _visibility(there, place, key, mask, bias):
    """(visible, added) for a tile of scores: which query sees which key, and the bias, or None.

    there: whether the query and the key exist
    place: the indices of the queries and of their heads
    """
    query, head = place

    def entries(x):  # of a mask or bias (heads, queries, keys), whose axes of 1 broadcast
        at = zip((head, query, key), x.shape, strict=True)
        return load(x, grid(*(i * min(size - 1, 1) for i, size in at)), there)

    visible = there
    if mask is not None:
        visible = visible & entries(mask)
    if bias is None:
        return visible, None
    added = entries(bias).astype(jnp.float32)
    return visible & (added != -jnp.inf), added


def _hidden_and_clipped(s, visible, added):
    """Finite scores with their bias, and −∞ for hidden keys. A visible NaN stays NaN.

    Triton's clamp alone would drop the NaN.
    """
    lost = s != s
    s = finite(s)
    if added is not None:
        lost = lost | (added != added)
        s = finite(s + added)
    return jnp.where(visible, jnp.where(lost, jnp.nan, s), -jnp.inf)
