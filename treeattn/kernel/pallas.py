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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.arrays import varying_like
from treeattn.idea.state import AttentionState, finite, reduce_tree
from treeattn.kernel.blockwise import attend_blockwise, limit, shrink
from treeattn.kernel.inputs import Inputs

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since JAX 0.11.0
    triton = None

MAX_HEAD_DIM = 256
SIDE = 16  # of a tile, at least: what tensor cores take
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
    cuda, default = (functools.partial(call, interpret=interpret) for interpret in (False, True))
    states = lax.platform_dependent(*arguments, cuda=cuda, default=default)
    return reduce_tree(AttentionState(*varying_like(states, *inputs.arrays)), arity=CHILDREN)


pallas_attend.defvjp(
    lambda inputs: (pallas_attend(inputs), inputs),
    lambda inputs, cotangent: jax.vjp(attend_blockwise, inputs)[1](cotangent),
)


def _call(q, k, v, mask, bias, lengths, factor, *, scale: float, causal: bool, interpret: bool):
    """The states of all splits: fields (splits, b, l, h), and (splits, b, l, h, dv)."""
    (b, l, h, d), (n, h_kv, dv) = q.shape, v.shape[1:]
    width, queries = max(_side(d), _side(dv)) * q.dtype.itemsize, l * h // h_kv
    rows = min(_side(queries), max(TILE // width, SIDE))
    tiles = pl.cdiv(queries, rows)  # of one key head's queries
    splits = pl.next_power_of_2(min(pl.cdiv(PROGRAMS, b * h_kv * tiles), pl.cdiv(n, KEYS)))
    once = twice = jnp.ones((b, l, h), jnp.float32)
    if q.dtype != jnp.float16:  # whose products are all within float32's range
        small, half = shrink(q.astype(jnp.float32))
        q, once, twice = small.astype(q.dtype), half[..., 0], half[..., 0]
    twice = twice * scale * (1 if factor is None else factor.astype(jnp.float32))
    lengths = None if lengths is None else lengths[:, None]

    def whole(x):  # a row's, or what all rows share
        own = 0 if x is None else int(len(x) > 1)
        return x if x is None else pl.BlockSpec(
            (None, *x.shape[1:]), lambda _, s, i: (i * own, *[0] * (x.ndim - 1)))  # fmt: skip

    def one_head(x):
        return pl.BlockSpec((None, n, None, x.shape[3]), lambda j, s, i: (i, 0, j % h_kv, 0))

    def result(*shape):
        spec = pl.BlockSpec((None, None, *shape), lambda _, s, i: (s, i, *[0] * len(shape)))
        # No ShapeDtypeStruct: inside shard_map, JAX would ask it along which axes it varies.
        return spec, SimpleNamespace(shape=(splits, b, *shape), dtype=jnp.dtype("float32"))

    sizes = {"rows": rows, "block": min(_side(n), max(TILE // width, SIDE)), "splits": splits}
    out_specs, out_shape = zip(result(l, h), result(l, h), result(l, h, dv), strict=True)
    # A single row of tensor cores waits for memory; several need room instead.
    tuned = {"num_warps": 4 if rows * _side(dv) < 1 << 13 else 8, "num_stages": 2 + (rows == SIDE)}
    return pl.pallas_call(
        functools.partial(_kernel, h_kv=h_kv, causal=causal, **sizes),
        grid=(h_kv * tiles, splits, b),
        in_specs=[*map(whole, (q, once, twice)), *map(one_head, (k, v)),
                  *map(whole, (mask, bias, lengths))],
        out_specs=out_specs, out_shape=out_shape, compiler_params=triton.CompilerParams(**tuned),
        interpret=interpret, name="treeattn_split_k",
    )(q, once, twice, k, v, mask, bias, lengths)  # fmt: skip


def _kernel(q, once, twice, k, v, mask, bias, length, *out, h_kv, causal, rows, block, splits):
    """One program: the state of a tile of queries after one split of a head's keys."""
    (l, heads, d), (n, dv) = q.shape, v.shape
    tile, head = _divide(pl.program_id(0), h_kv)
    group = heads // h_kv
    query, member = _divide(tile * rows + _range(rows), group)  # past the last query is padding
    own, real = (query, head * group + member), query < l
    queries = _load_rows(q, own, real, d)
    once, twice = (_load(x, own, real)[:, None] for x in (once, twice))

    length = jnp.int32(n) if length is None else length[0]
    each = _ceil(_ceil(length, block), splits) * block  # keys a split
    start = pl.program_id(1) * each
    stop = jnp.minimum(start + each, length)
    if causal:
        stop = jnp.minimum(stop, _divide(tile * rows + rows - 1, group)[0] + 1)

    def add_block(i, state):
        m, denominator, numerator = state
        key = start + i * block + _range(block)
        there = real[:, None] & (key < stop)[None]
        keys, values = (_load_rows(x, (key,), key < stop, size) for x, size in ((k, d), (v, dv)))

        def entry(x):  # of a mask or bias (heads, queries, keys); all share an axis of 1
            at = (i * min(size - 1, 1) for i, size in zip((*own[::-1], key), x.shape, strict=True))
            return _load(x, _grid(*at), there)

        visible = there & (key[None] <= query[:, None]) if causal else there
        visible = visible if mask is None else visible & entry(mask)
        added = None if bias is None else entry(bias).astype(jnp.float32)
        visible = visible if bias is None else visible & (added != -jnp.inf)
        s = _limit(_dot(queries, keys, 1) * once * twice, visible, added)
        pivot = jnp.maximum(m, jnp.max(s, axis=1))
        weight, p = jnp.exp(finite(m) - finite(pivot)), jnp.exp(s - finite(pivot)[:, None])
        denominator = denominator * weight + jnp.sum(p, axis=1)
        return pivot, denominator, numerator * weight[:, None] + _dot(p / most, values, 0)

    # Weights divided by at least their number keep the sum of values in float32's range.
    most = 1 if v.dtype == jnp.float16 else pl.next_power_of_2(n)
    m, zeros = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros((rows, _side(dv)), jnp.float32)
    blocks = _ceil(stop - start, block)  # none, where the split begins past the end
    state = lax.fori_loop(jnp.int32(0), blocks, add_block, (m, jnp.zeros_like(m), zeros))
    column = _range(_side(dv))
    places = own, own, _grid(*own, column)
    real = real, real, real[:, None] & (column < dv)[None]
    results = _without_loss(*state, most)
    for ref, at, x, written in zip(out, places, results, real, strict=True):
        triton.store(ref.at[at], x, mask=written)


# Triton makes instructions of max, min and clamp that drop a NaN: of a number and a NaN they give
# the number. So in the kernel's loop the pivot is that of the other scores, while the sums are NaN.


def _limit(s, visible, added):
    """`limit`, after which a visible score that was NaN, or has a bias that is, is NaN still."""
    lost = s != s if added is None else (s != s) | (added != added)
    return jnp.where(visible & lost, jnp.nan, limit(s, visible, added))


def _without_loss(m, denominator, numerator, most):
    """The state to write: a NaN stays one, and a query without keys has seen none of the values."""
    m = jnp.where(denominator != denominator, denominator, m)
    total = numerator * most
    total = jnp.where(total != total, total, finite(total))
    # A weight of 0 times a value that is NaN is NaN.
    return m, denominator, jnp.where(denominator[:, None] == 0, 0, total)


def _dot(a, b, axis: int):
    """Σ over a's axis 1 and b's `axis`, as in float32, for a of float32 or of b's dtype.

    Tensor cores multiply no float32, but its first bits only. So a factor is a sum of two that they
    do multiply, and the product of the two smaller ones is left out: at most 2⁻²⁰ of the whole one,
    on average of the order of what float32 rounds. A weight, for values in bfloat16, is off by
    2⁻¹⁵ at most.
    """
    contracted, once = (((1,), (axis,)), ((), ())), lax.Precision.DEFAULT  # whatever JAX is set to
    a, b = _parts(a, b.dtype), _parts(b, b.dtype)
    pairs = [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < 2]
    return sum(lax.dot_general(x, y, contracted, once, jnp.float32) for x, y in pairs)


def _parts(x, dtype):
    """Numbers of `dtype`, for float32 of TensorFloat-32's precision, that add up to x."""
    if x.dtype != jnp.float32:
        return (x,)
    bits = jnp.int32(-1 << (16 if dtype == jnp.bfloat16 else 13))  # those of x in the first number
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & bits, x.dtype)
    return high.astype(dtype), (x - high).astype(dtype)


def _load_rows(x, at, there, size: int):
    """Rows of `size` elements, with zeros up to the side of a tile; zeros if not `there`."""
    column = _range(_side(size))
    return _load(x, _grid(*at, column), there[:, None] & (column < size)[None])


def _load(x, at, there):
    return triton.load(x.at[at], mask=there, other=jnp.zeros((), x.dtype))


def _grid(*at):
    """Indices of a tile: the last one's axis becomes its columns, the others' its rows."""
    return *(jnp.asarray(i)[:, None] for i in at[:-1]), at[-1][None]


def _side(n: int) -> int:
    return max(SIDE, pl.next_power_of_2(n))


def _range(n: int):
    return jnp.arange(n, dtype=jnp.int32)


def _divide(x, n: int):
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def _ceil(x, n: int):
    return lax.div(x + (n - 1), jnp.int32(n))
