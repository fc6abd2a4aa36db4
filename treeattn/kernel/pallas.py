"""A kernel for GPUs in Pallas: the keys split over many programs, each of which returns a state.

A decoding step has too few queries to keep a GPU busy, so the keys are split ("split-K", as in
Flash-Decoding). One program takes a tile of queries, all those that read one key head, and a part
of that head's keys, a block at a time. What it returns is an `AttentionState`; the states of all
parts merge as any others do. Sums are in float32, whatever the inputs are.

Triton compiles the kernel for CUDA devices. Anywhere else Pallas interprets it, which is slow: for
tests, and to look at it. The derivative is the blockwise form's.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState, finite, reduce_tree
from treeattn.kernel.blockwise import attend_blockwise
from treeattn.kernel.inputs import Inputs
from treeattn.kernel.masks import mask_and_clip, shown_by
from treeattn.kernel.products import shrink
from treeattn.kernel.tiles import SIDE, ceil, divide, dot, indices, side

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since JAX 0.11.0
    triton = None

MAX_HEAD_DIM = 256
TILE = 1 << 14  # bytes of queries, and of keys: so all fits in the shared memory of any GPU
PROGRAMS = 512  # that the keys are split over, about: four for each multiprocessor of an H100
KEYS = 256  # for each of them, at least
CHILDREN = 8  # of a node of the tree that merges their states: XLA makes a round one kernel


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


@jax.custom_vjp
def pallas_attend(inputs: Inputs) -> AttentionState:
    """The state by the kernel, of inputs that have no `obstacle`."""
    if 0 in (*inputs.q.shape, *inputs.v.shape):
        return attend_blockwise(inputs)
    arguments = varying_like(inputs.arrays, *inputs.arrays)
    call = functools.partial(_call, scale=inputs.scale, causal=inputs.causal)
    compiled = functools.partial(call, interpret=False)
    interpreted = functools.partial(call, interpret=True)
    states = lax.platform_dependent(*arguments, cuda=compiled, default=interpreted)
    return reduce_tree(AttentionState(*varying_like(states, *inputs.arrays)), arity=CHILDREN)


pallas_attend.defvjp(
    lambda inputs: (pallas_attend(inputs), inputs),
    lambda inputs, cotangent: jax.vjp(attend_blockwise, inputs)[1](cotangent),
)


class Tiling(NamedTuple):
    """How the work is divided.

    rows:   queries a program takes, of those that read one key head
    tiles:  programs that these queries need
    block:  keys a program reads at a time
    splits: parts of a head's keys, a program for each
    """

    rows: int
    tiles: int
    block: int
    splits: int


def _tile(q, v) -> Tiling:
    """The tiling for queries (b, l, h, d) and values (b, n, h_kv, dv)."""
    b, l, h, d = q.shape
    n, h_kv, dv = v.shape[1:]
    width = max(side(d), side(dv)) * q.dtype.itemsize
    most = max(TILE // width, SIDE)
    queries = l * h // h_kv
    rows = min(side(queries), most)
    tiles = pl.cdiv(queries, rows)
    wanted = pl.cdiv(PROGRAMS, b * h_kv * tiles)
    splits = pl.next_power_of_2(min(wanted, pl.cdiv(n, KEYS)))
    return Tiling(rows, tiles, min(side(n), most), splits)


def _scale_queries(q, scale):
    """(queries, root, root · scale): q·k is (queries · k) · root · (root · scale).

    The factors are (b, l, h). float16 needs no root: its products are all within float32's range.
    """
    one = jnp.ones(q.shape[:3], jnp.float32)
    if q.dtype == jnp.float16:
        return q, one, one * scale
    shrunk, root = shrink(q.astype(jnp.float32))
    root = root[..., 0]
    return shrunk.astype(q.dtype), root, root * scale


def _call(q, k, v, mask, bias, lengths, factor, *, scale: float, causal: bool, interpret: bool):
    """The states of all splits: fields (splits, b, l, h), and (splits, b, l, h, dv)."""
    b, l, h, _ = q.shape
    n, h_kv, dv = v.shape[1:]
    tiling = _tile(q, v)
    scale = scale * (1 if factor is None else factor.astype(jnp.float32))
    q, root, root_and_scale = _scale_queries(q, scale)
    lengths = None if lengths is None else lengths[:, None]

    def head_spec(x):
        return pl.BlockSpec((None, n, None, x.shape[3]), lambda j, s, i: (i, 0, j % h_kv, 0))

    def result(*shape):
        rest = [0] * len(shape)
        spec = pl.BlockSpec((None, None, *shape), lambda _, s, i: (s, i, *rest))
        # No ShapeDtypeStruct: inside shard_map, JAX would ask it along which axes it varies.
        of_all = (tiling.splits, b, *shape)
        return spec, SimpleNamespace(shape=of_all, dtype=jnp.dtype("float32"))

    by_row = q, root, root_and_scale
    shared = mask, bias, lengths
    out_specs, out_shape = zip(result(l, h), result(l, h), result(l, h, dv), strict=True)
    # A single row of tensor cores waits for memory; several need room instead.
    compiler_params = triton.CompilerParams(
        num_warps=4 if tiling.rows * side(dv) < 1 << 13 else 8,
        num_stages=3 if tiling.rows == SIDE else 2,
    )
    call = pl.pallas_call(
        functools.partial(_kernel, h_kv=h_kv, causal=causal, tiling=tiling),
        grid=(h_kv * tiling.tiles, tiling.splits, b),
        in_specs=[*map(_row_spec, by_row), head_spec(k), head_spec(v), *map(_row_spec, shared)],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=compiler_params,
        interpret=interpret,
        name="treeattn_split_k",
    )
    return call(*by_row, k, v, *shared)


def _row_spec(x):
    """What a program is given of `x`, (b, …): its row, or what all rows share."""
    if x is None:
        return None
    each = int(len(x) > 1)
    rest = [0] * (x.ndim - 1)
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, s, i: (i * each, *rest))


def _kernel(
    q, root, root_and_scale, k, v, mask, bias, length, *out, h_kv: int, causal: bool, tiling: Tiling
):
    """One program: the state of a tile of queries after one split of a head's keys.

    References to q (l, h, d) with its two factors (l, h), to k (n, d) and v (n, dv) of one head,
    mask and bias (h, l, n), an axis being 1 where all share an entry, and length (1,). out: the
    state's fields, (l, h), (l, h) and (l, h, dv).
    """
    l, heads, d = q.shape
    n, dv = v.shape
    rows, _, block, splits = tiling
    tile, head = divide(pl.program_id(0), h_kv)
    group = heads // h_kv
    query, member = divide(tile * rows + indices(rows), group)
    place = query, head * group + member
    is_query = query < l  # past the last one is padding
    queries = _load_rows(q, place, is_query, d)
    root = _load(root, place, is_query)[:, None]
    root_and_scale = _load(root_and_scale, place, is_query)[:, None]

    length = jnp.int32(n) if length is None else length[0]
    keys_a_split = ceil(ceil(length, block), splits) * block
    start = pl.program_id(1) * keys_a_split
    stop = jnp.minimum(start + keys_a_split, length)
    if causal:
        last, _ = divide(tile * rows + rows - 1, group)
        stop = jnp.minimum(stop, last + 1)
    # Weights divided by at least their number keep the sum of values in float32's range.
    most = 1 if v.dtype == jnp.float16 else pl.next_power_of_2(n)

    def add_block(i, state):
        m, denominator, numerator = state
        key = start + i * block + indices(block)
        is_key = key < stop
        keys = _load_rows(k, (key,), is_key, d)
        values = _load_rows(v, (key,), is_key, dv)
        there = is_query[:, None] & is_key[None]
        visible, added = _visibility(there, place, key, mask, bias, causal)
        s = _mask_and_keep_nan(dot(queries, keys, 1) * root * root_and_scale, visible, added)
        pivot = jnp.maximum(m, jnp.max(s, axis=1))
        weight = jnp.exp(finite(m) - finite(pivot))
        p = jnp.exp(s - finite(pivot)[:, None])
        denominator = denominator * weight + jnp.sum(p, axis=1)
        numerator = numerator * weight[:, None] + dot(p / most, values, 0)
        return pivot, denominator, numerator

    m = jnp.full(rows, -jnp.inf, jnp.float32)
    numerator = jnp.zeros((rows, side(dv)), jnp.float32)
    blocks = ceil(stop - start, block)  # none, where the split begins past the end
    state = m, jnp.zeros_like(m), numerator
    state = lax.fori_loop(jnp.int32(0), blocks, add_block, state)
    _store(out, _without_loss(*state, most), place, is_query)


def _visibility(there, place, key, mask, bias, causal: bool):
    """(visible, added) of a tile of scores: who sees which key, and the bias, or None.

    there: whether both the query and the key are there; place: the queries', and their heads
    """
    query, head = place

    def entries(x):  # of a mask or bias (heads, queries, keys); all share an axis of 1
        at = zip((head, query, key), x.shape, strict=True)
        return _load(x, _grid(*(i * min(size - 1, 1) for i, size in at)), there)

    visible = there
    if causal:
        visible = visible & (key[None] <= query[:, None])
    if mask is not None:
        visible = visible & entries(mask)
    if bias is None:
        return visible, None
    added = entries(bias).astype(jnp.float32)
    return visible & shown_by(added), added


def _store(out, state, place, is_query):
    """Write the state's fields where the tile's queries have their places in them."""
    dv = out[2].shape[-1]
    column = indices(side(dv))
    is_entry = is_query[:, None] & (column < dv)[None]
    m, denominator, numerator = state
    triton.store(out[0].at[place], m, mask=is_query)
    triton.store(out[1].at[place], denominator, mask=is_query)
    triton.store(out[2].at[_grid(*place, column)], numerator, mask=is_entry)


# Triton makes instructions of max, min and clamp that drop a NaN: of a number and a NaN they give
# the number. So in the kernel's loop the pivot is that of the other scores, while the sums are NaN.


def _mask_and_keep_nan(s, visible, added):
    """`mask_and_clip`; a visible score that was NaN, or has a bias that is, is NaN still."""
    lost = s != s
    if added is not None:
        lost = lost | (added != added)
    return jnp.where(visible & lost, jnp.nan, mask_and_clip(s, visible, added))


def _without_loss(m, denominator, numerator, most):
    """The state to write: a NaN stays one, and a query without keys has seen none of the values."""
    m = jnp.where(denominator != denominator, denominator, m)
    total = numerator * most
    total = jnp.where(total != total, total, finite(total))
    # A weight of 0 times a value that is NaN is NaN.
    return m, denominator, jnp.where(denominator[:, None] == 0, 0, total)


def _load_rows(x, at, there, size: int):
    """Rows of `size` elements, with zeros up to the side of a tile; zeros if not `there`."""
    column = indices(side(size))
    return _load(x, _grid(*at, column), there[:, None] & (column < size)[None])


def _load(x, at, there):
    """The elements of `x` at these indices; zeros if not `there`."""
    return triton.load(x.at[at], mask=there, other=jnp.zeros((), x.dtype))


def _grid(*at):
    """Indices of a tile: the last one's axis becomes its columns, the others' its rows."""
    return *(jnp.asarray(i)[:, None] for i in at[:-1]), at[-1][None]
