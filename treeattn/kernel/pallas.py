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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState, finite, reduce_tree
from treeattn.kernel.blockwise import attend_blockwise, shrink
from treeattn.kernel.inputs import Inputs

MAX_HEAD_DIM = 256
SMALLEST = 16  # side of a tile that tensor cores take
TILE_BYTES = BLOCK_BYTES = 1 << 14  # of queries, and of keys: with these the kernel fits everywhere
PROGRAMS = 512  # that the keys are split into, about: some four for each multiprocessor of an H100
KEYS = 256  # keys a program, at least
CHILDREN = 8  # states that merge in one go: XLA makes each round of the tree one kernel


class Plan(NamedTuple):
    """What is known of a call when it is compiled. Sides of tiles are powers of two."""

    group: int  # query heads that read the same key head
    rows: int  # queries a tile
    tiles: int  # of one key head's queries
    block: int  # keys
    splits: int
    scale: float
    causal: bool


def obstacle(inputs: Inputs) -> str | None:
    """Why the kernel cannot take these arguments, naming the argument; None if it can."""
    if inputs.q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"q: the pallas kernel takes float16, bfloat16 or float32, got {inputs.q.dtype}"
    for name, x in (("q", inputs.q), ("v", inputs.v)):
        if not 0 < x.shape[-1] <= MAX_HEAD_DIM:
            return f"{name}: the pallas kernel takes a head_dim of 1 … {MAX_HEAD_DIM}, got {x.shape}"
    return None


@jax.custom_vjp
def pallas_attend(inputs: Inputs) -> AttentionState:
    """The state by the kernel, of inputs that have no `obstacle`."""
    if 0 in inputs.q.shape + inputs.k.shape:
        return attend_blockwise(inputs)
    arguments = varying_like(inputs.arrays, *inputs.arrays)
    call = functools.partial(_call, plan=_plan(inputs))
    cuda, default = (functools.partial(call, interpret=interpret) for interpret in (False, True))
    states = lax.platform_dependent(*arguments, cuda=cuda, default=default)
    return reduce_tree(AttentionState(*varying_like(states, *inputs.arrays)), arity=CHILDREN)


def _backward(inputs: Inputs, cotangent):
    below = jnp.tri(inputs.q.shape[1], dtype=bool)[None, None] if inputs.causal else True
    mask = inputs.mask & below if inputs.mask is not None else below if inputs.causal else None
    return jax.vjp(lambda x: attend_blockwise(x.replace(mask=mask)), inputs)[1](cotangent)


pallas_attend.defvjp(lambda inputs: (pallas_attend(inputs), inputs), _backward)


def _plan(inputs: Inputs) -> Plan:
    (b, l, h, d), (n, h_kv), dv = inputs.q.shape, inputs.k.shape[1:3], inputs.v.shape[-1]
    group = h // h_kv
    width = max(_side(d), _side(dv)) * inputs.q.dtype.itemsize
    rows = min(_side(l * group), max(SMALLEST, TILE_BYTES // width))
    tiles = -(-l * group // rows)
    wanted = pl.next_power_of_2(-(-PROGRAMS // (b * h_kv * tiles)))
    return Plan(
        group=group,
        rows=rows,
        tiles=tiles,
        block=max(SMALLEST, min(BLOCK_BYTES // width, _side(n))),
        splits=min(wanted, pl.next_power_of_2(-(-n // KEYS))),
        scale=inputs.scale,
        causal=inputs.causal,
    )


def _side(n: int) -> int:
    return max(SMALLEST, pl.next_power_of_2(n))


def _call(q, k, v, mask, bias, lengths, factor, *, plan: Plan, interpret: bool):
    """The fields of the states of all splits: (splits, b, l, h), and (splits, b, l, h, dv)."""
    (b, l, h, d), (n, h_kv), dv = q.shape, k.shape[1:3], v.shape[-1]
    once = twice = jnp.ones((b, l, h), jnp.float32)
    if q.dtype != jnp.float16:  # whose products are all in float32's range
        small, half = shrink(q.astype(jnp.float32))
        q, once, twice = small.astype(q.dtype), half[..., 0], half[..., 0]
    twice = twice * plan.scale * (1 if factor is None else factor)

    def whole(x):  # one row of it, or what all rows share
        if x is None:
            return None
        own = int(len(x) > 1)
        return pl.BlockSpec((None, *x.shape[1:]), lambda _, s, i: (i * own, *[0] * (x.ndim - 1)))

    def one_head(x):
        return pl.BlockSpec((None, n, None, x.shape[-1]), lambda j, s, i: (i, 0, j % h_kv, 0))

    def result(*shape):
        own = pl.BlockSpec((None, None, *shape), lambda _, s, i: (s, i, *[0] * len(shape)))
        # No ShapeDtypeStruct: inside shard_map JAX would ask it where the result varies.
        return own, SimpleNamespace(shape=(plan.splits, b, *shape), dtype=np.dtype(np.float32))

    lengths = None if lengths is None else lengths[:, None]
    out_specs, out_shape = zip(result(l, h), result(l, h), result(l, h, dv), strict=True)
    # One row of tensor cores waits for memory; more of them need registers and shared memory.
    warps = 8 if plan.rows * _side(dv) >= 1 << 13 else 4
    stages = 3 if plan.rows == SMALLEST else 2
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(h_kv * plan.tiles, plan.splits, b),
        in_specs=[*map(whole, (q, once, twice)), one_head(k), one_head(v),
                  *map(whole, (mask, bias, lengths))],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="treeattn_split_k",
    )(q, once, twice, k, v, mask, bias, lengths)  # fmt: skip


def _kernel(q, once, twice, k, v, mask, bias, length, m_out, d_out, n_out, *, plan: Plan):
    """One program: the state of a tile of queries after one split of a head's keys."""
    (l, h, d), (n, dv), h_kv = q.shape, v.shape, q.shape[1] // plan.group
    first, split = lax.div(pl.program_id(0), _int(h_kv)) * plan.rows, pl.program_id(1)
    row = first + _range(plan.rows)  # (query, head of the group); beyond the last query is padding
    query, head = lax.div(row, _int(plan.group)), lax.rem(row, _int(plan.group))
    head += lax.rem(pl.program_id(0), _int(h_kv)) * plan.group
    own, real = (query, head), query < l
    queries = _rows(q, own, real, d)
    once, twice = (_load(x, own, real)[:, None] for x in (once, twice))

    length = _int(n) if length is None else length[0]
    each = pl.cdiv(pl.cdiv(length, _int(plan.block)), _int(plan.splits)) * plan.block
    start = split * each
    stop = jnp.minimum(start + each, length)
    if plan.causal:
        stop = jnp.minimum(stop, lax.div(first + plan.rows - 1, _int(plan.group)) + 1)

    def add_block(i, state):
        key = start + i * plan.block + _range(plan.block)
        here = key < stop
        keys, values = _rows(k, (key,), here, d), _rows(v, (key,), here, dv)
        s = _limit(_dot(queries, keys, 1) * once * twice)
        visible = jnp.broadcast_to(here[None], s.shape)
        entry = functools.partial(_entry, head=head, query=query, key=key, there=(real, here))
        if bias is not None:
            added = entry(bias).astype(jnp.float32)
            s, visible = _limit(s + added), visible & (added > -jnp.inf)
        if mask is not None:
            visible &= entry(mask)
        if plan.causal:
            visible &= key[None] <= query[:, None]
        return _add(state, jnp.where(visible, s, -jnp.inf), values, shrink=_shrink_values(v))

    m, lacking = jnp.full(plan.rows, -jnp.inf, jnp.float32), jnp.zeros(plan.rows, jnp.float32)
    numerator = jnp.zeros((plan.rows, _side(dv)), jnp.float32)
    steps = pl.cdiv(stop - start, _int(plan.block))  # none where the split begins past the end
    state = lax.fori_loop(_int(0), steps, add_block, (m, lacking, numerator))
    triton.store(m_out.at[own], state[0], mask=real)
    triton.store(d_out.at[own], state[1], mask=real)
    column = _range(_side(dv))
    at, there = _grid(own, column), real[:, None] & (column < dv)[None]
    triton.store(n_out.at[at], finite(state[2] / _shrink_values(v)), mask=there)


def _add(state, s, values, *, shrink: float):
    """`merge` with the state of a block, of scores s (rows, block): one pivot for both."""
    m, d, n = state
    pivot = jnp.maximum(m, jnp.max(s, axis=1))
    weight = jnp.exp(finite(m) - finite(pivot))
    p = jnp.exp(s - finite(pivot)[:, None])
    d = d * weight + jnp.sum(p, axis=1)
    return pivot, d, n * weight[:, None] + _dot(p * shrink, values, 0)


def _shrink_values(v) -> float:
    """A power of two by which weights are multiplied, so that no sum leaves float32's range."""
    return 1.0 if v.dtype == jnp.float16 else 1 / pl.next_power_of_2(v.shape[0])


def _dot(a, b, axis: int):
    """Σ over a's axis 1 and b's `axis`, as in float32, for a of float32 or b's dtype.

    Tensor cores multiply no float32 (of their TensorFloat-32 they keep 10 bits, and so would JAX).
    Each factor is a sum of two that they do multiply; the product of the two small ones is left
    out, being smaller than what float32 rounds.
    """
    dimensions = (((1,), (axis,)), ((), ()))
    dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
    return sum(
        dot(x, y, dimensions)
        for i, x in enumerate(_parts(a, b.dtype))
        for j, y in enumerate(_parts(b, b.dtype))
        if i + j < 2
    )


def _parts(x, dtype):
    """Numbers of `dtype`, or for float32 of TensorFloat-32, that add up to x."""
    if x.dtype != jnp.float32:
        return (x,)
    cut = _int(-1 << (16 if dtype == jnp.bfloat16 else 13))  # the bits of x that the first keeps
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & cut, x.dtype)
    return high.astype(dtype), (x - high).astype(dtype)


def _limit(s):
    """The scores, within the range of float32: ∞ − ∞ is NaN."""
    return lax.clamp(_LOWEST, s, -_LOWEST)


_LOWEST = jnp.finfo(jnp.float32).min


def _rows(x, at, there, size: int):
    """Rows of x, padded with zeros to the side of a tile; where they are not `there`, all zeros."""
    column = _range(_side(size))
    return _load(x, _grid(at, column), there[:, None] & (column < size)[None])


def _entry(x, head, query, key, there):
    """What a mask or bias (heads, queries, keys), an axis being 1 where all share an entry, has
    for each row of a tile and each key of a block."""
    rows = (0 if size == 1 else index for size, index in zip(x.shape, (head, query), strict=False))
    key = key if x.shape[2] > 1 else jnp.zeros_like(key)
    rows = [jnp.broadcast_to(jnp.int32(i), head.shape) for i in rows]
    return _load(x, _grid(rows, key), there[0][:, None] & there[1][None])


def _grid(rows, columns):
    """Indices of a tile: one array of each of `rows` for its rows, one for its columns."""
    shape = *rows[0].shape, *columns.shape
    return (*(jnp.broadcast_to(i[:, None], shape) for i in rows),
            jnp.broadcast_to(columns[None], shape))  # fmt: skip


def _load(x, at, there):
    return triton.load(x.at[at], mask=there, other=jnp.zeros((), x.dtype))


def _range(n: int):
    return jnp.arange(n, dtype=jnp.int32)


def _int(x: int):  # of the width that programs count in, whatever Python's integers become
    return jnp.int32(x)
