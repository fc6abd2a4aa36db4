"""Scores of a block of keys and weighted sums of its values, in forms that XLA:CPU runs fast.

A decoding step does little arithmetic, so it can be as fast as memory, and these forms are near to
that. With plain products and sums in their place, the loop over blocks takes, for one query in
float32 on two cores:

    16 heads of 128, 16 key heads, 16,384 keys   2.4 times as long
    16 heads of 128,  4 key heads, 16,384 keys   7.7 times
     9 heads of  64,  3 key heads,  8,192 keys   2.5 times

Comments below say what XLA needs; benchmarks/local_attention.py times the result. Many queries, and
GPUs, use matrix products. For few queries the arrays are cut into at most 8 slices, called lanes:
queries and keys along head_dim for the scores, weights and values along the block's keys for the
sums. Lane i of one is multiplied elementwise with lane i of the other. The products are added
up to one array, and this array is summed along the axis that was cut.

Queries are (b, h_kv, group, l, d), keys and values (b, size, h_kv, ·), scores and weights
(b, h_kv, group, l, size), as in treeattn/blocks.py. `may_split` says that XLA may split the arrays
over devices: the fast reductions are not recognized by XLA's partitioner.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 1024  # the most keys of a block on a CPU
LANES = 8  # products added in one expression; XLA:CPU does not fuse sums of 16
EXACT = lax.Precision.HIGHEST  # by default XLA rounds to TensorFloat-32 on a GPU


def compiled_for() -> str:
    """The platform to write a program for: "cpu", "gpu" or "tpu".

    Inside `shard_map` and `jax.set_mesh` that of the mesh, whose devices may be described only, as
    when a CPU compiles for a TPU. Elsewhere that of the process.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    kind = device.device_kind.lower()
    return kind if kind == "cpu" else "tpu" if kind.startswith("tpu") else "gpu"


def few_queries(q, n: int) -> bool:
    """Whether sums over lanes are faster than matrix products, for these queries and n keys.

    True on a CPU for up to d / 16 queries for each key head (8 for a head_dim of 128) and at least
    512 keys, if head_dim is at most 256 and a multiple of 8.
    """
    _, _, group, l, d = q.shape
    if compiled_for() != "cpu":
        return False
    return 16 * group * l <= d <= 256 and d % 8 == 0 and n >= BLOCK // 2


def reads_bits(dtype) -> bool:
    """Whether `read_block` reads arrays of this dtype as integers, which have no derivative."""
    return dtype == jnp.bfloat16 or jnp.dtype(dtype).itemsize == 1


def read_block(x, first, size: int, *, text, texts: int, dtype):
    """(texts, size, h_kv, ·) of keys or values (b, n, h_kv, ·), in the accumulation dtype.

    The texts are text … text + texts − 1, the keys first … first + size − 1. XLA:CPU cannot slice
    bfloat16 and float8: it would widen all of x first, so the slice is one of integers.
    """
    given = x.dtype
    if reads_bits(given):
        x = lax.bitcast_convert_type(x, jnp.uint16 if given == jnp.bfloat16 else jnp.uint8)
    start = [jnp.asarray(i, jnp.int32) for i in (text, first, 0, 0)]
    x = lax.dynamic_slice(x, start, (texts, size, *x.shape[2:]))
    if given == jnp.bfloat16:  # the upper half of a float32
        x = lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    elif reads_bits(given):
        x = lax.bitcast_convert_type(x, given)
    return x.astype(dtype)


def row_max(s, may_split: bool):
    """max over the last axis: (…, size) -> (…). It may ignore a NaN; the sums do not.

    jnp.max propagates NaN, which keeps XLA from vectorizing it. This reduction is vectorized.
    """
    if may_split:
        return jnp.max(s, axis=-1)
    start = np.asarray(-np.inf, s.dtype)
    return lax.reduce(s, start, lambda a, b: lax.select(a > b, a, b), (s.ndim - 1,))


def matrix_scores(q, k):
    """q·k of all queries and keys, (b, h_kv, group, l, size), as a matrix product."""
    if q.shape[2] * q.shape[3] < q.shape[4]:
        # XLA:CPU transposes the second factor, so the smaller one comes second.
        s = lax.dot_general(k, q, (((3,), (4,)), ((0, 2), (0, 1))), EXACT)
        return jnp.moveaxis(s, 2, -1)
    return jnp.einsum("bkgld,bnkd->bkgln", q, k, precision=EXACT)


def matrix_sums(p, v):
    """(Σ p, Σ p v), with p at most 1: (b, h_kv, group, l) and (b, h_kv, group, l, dv).

    To keep the sum in range, each value is divided by a power of two that is at least the number of
    values.
    """
    terms = 1 << (p.shape[-1] - 1).bit_length()
    ones = jnp.ones(p.shape[-1], p.dtype)
    total = jnp.einsum("bkgln,n->bkgl", p, ones, precision=EXACT)  # faster than jnp.sum
    weighted = jnp.einsum("bkgln,bnkd->bkgld", p, v / terms, precision=EXACT) * terms
    return total, weighted


# Few queries: for a matrix product XLA would transpose the keys, and for a sum over more than 32
# terms it would write the products to memory before adding them. Each of the sums below compiles to
# one loop over the keys, vectorized, on all cores.


def _sum(x, axis: int, may_split: bool):
    """The sum over an axis, fused with the loop that computes x.

    From JAX 0.10 on, XLA:CPU calls a library for plain sums, and writes the summands to memory for
    it, which takes three times as long. XLA:CPU does not recognize the sum if each addition is
    followed by a rounding to the dtype's own precision, which changes nothing. XLA's partitioner
    does not recognize it either.
    """
    if may_split:
        return jnp.sum(x, axis=axis)
    about = jnp.finfo(x.dtype)

    def add(a, b):
        return lax.reduce_precision(a + b, about.nexp, about.nmant)

    return lax.reduce(x, np.asarray(0, x.dtype), add, (axis % x.ndim,))


def lane_queries(q):
    """`q` for `lane_scores`: pairs (start, lane), each lane (b, 1, h_kv, group, l, width).

    For d = 128 the slices begin at 0, 16, 32, … 112, and are 16 wide.

    Call it before the loop over blocks: inside, XLA would slice q anew for every score.
    """
    d = q.shape[-1]
    terms = max(t for t in range(1, LANES + 1) if d % (8 * t) == 0)
    width = d // terms
    starts = range(0, d, width)
    if 24 < d <= 64:
        # LLVM unrolls sums of up to 64 products, and then does not vectorize them. Three slices
        # that overlap have 72 products.
        width = 24
        starts = 0, (d - 24) // 2, d - 24
    lanes = []
    done = 0
    for start in starts:
        end = start + width
        not_yet = jnp.arange(start, end) >= done  # slices may overlap
        lanes.append((start, jnp.where(not_yet, q[:, None, ..., start:end], 0)))
        done = end
    return lanes


def lane_scores(lanes, k, may_split: bool):
    """q·k of all queries and keys, (b, h_kv, group, l, size), as a sum of elementwise products."""
    k = k[:, :, :, None, None]
    s = sum(q * k[..., start : start + q.shape[-1]] for start, q in lanes)
    return jnp.moveaxis(_sum(s, -1, may_split), 1, -1)


def lane_sums(p, lanes, may_split: bool):
    """(Σ p, Σ p v), with p at most 1: (b, h_kv, group, l) and (b, h_kv, group, l, dv).

    lanes:   the block's values in LANES runs of neighbouring keys, (b, size / LANES, h_kv, dv)

    To keep the sum in range, each weight is divided by BLOCK, which is at least the number of
    weights. The runs are contiguous, because XLA does not vectorize strided slices.
    """
    total = jnp.sum(p, axis=-1)
    weights = jnp.moveaxis(p / BLOCK, -1, 1)[..., None]
    weights = jnp.split(weights, LANES, axis=1)
    products = [w * v[:, :, :, None, None] for w, v in zip(weights, lanes, strict=True)]
    return total, _sum(sum(products), 1, may_split) * BLOCK
