"""Decoding by a kernel in Pallas's other backend, Mosaic GPU, with explicit copies and barriers.

An example for GPUs of compute capability 9.0 and newer (H100, B200) and JAX 0.11.2 or newer: a few
queries a key head, float16 or bfloat16, lengths, and nothing else. A program takes all queries that
read one key head, and a split of its keys. It starts the copies of keys and values into shared
memory some blocks ahead, and waits for each copy. Triton generates this pipeline, Mosaic does not:

    fetch keys, fetch values           of the first blocks
    for each block:
        wait for its keys              scores of a product, weights
        commit; fetch keys             of the block that will take their slot
        wait for its values            weighted sums of a product
        commit; fetch values

The core's `reduce_tree` merges the states of all splits. A product of tensor cores has 64 rows, 16
for each of four warps, and 8 columns. A key head has few queries, so keys are the rows, and queries
the columns.

Without such a GPU Pallas interprets the kernel, slowly, on one device, and looks for races.
"""

import functools

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from labs.kernels.tiles import ceil, finite, largest_weight, split_float
from treeattn import AttentionState, reduce_tree

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    plgpu = None

KEYS = 64  # keys of a block
ROWS = 8  # rows of keys that are contiguous in shared memory, so n is a multiple of it
COLUMNS = 8  # the fewest columns of a product of tensor cores
CHUNK = 64  # numbers of a head_dim that are in registers at a time
MOST_QUERIES = 32  # queries of a key head whose sums fit in registers
ROOM = 64 << 10  # bytes of slots for keys and values, so three programs fit on a multiprocessor
PROGRAMS = 512  # programs that share the keys, about four for each multiprocessor of an H100
KEYS_A_SPLIT = 256  # about the fewest keys of a split; the number of splits is rounded up


def missing() -> str | None:
    """Why this JAX is too old; None if it is new enough."""
    if all(hasattr(plgpu, name) for name in ("mma", "cluster_ref", "InterpretGPUParams")):
        return None
    return f"Mosaic's kernels need JAX 0.11.2 or newer, and this is {jax.__version__}"


def is_compiled() -> bool:
    """Whether Mosaic compiles the kernel, for JAX's device or for the abstract mesh's device."""
    about = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if about is not None:
        return about.platform in ("cuda", "gpu")
    return hasattr(jax.extend.backend.get_default_device(), "compute_capability")


def obstacle(q, k, v) -> str | None:
    """Why the kernel cannot take these arguments, naming the argument; None if it can."""
    if (lacking := missing()) is not None:
        return lacking
    capability = getattr(jax.extend.backend.get_default_device(), "compute_capability", "9.0")
    if float(capability) < 9:
        return f"Mosaic's kernel needs compute capability 9.0 or newer, and this is {capability}"
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return f"q: Mosaic's kernel takes float16 or bfloat16, got {q.dtype}"
    queries = q.shape[1] * q.shape[2] // k.shape[2]
    if queries > MOST_QUERIES:
        return f"q: Mosaic's kernel takes {MOST_QUERIES} queries a key head, got {queries}"
    for name, d in (("q", q.shape[3]), ("v", v.shape[3])):
        if d % CHUNK or d > 256:
            return f"{name}: Mosaic's kernel takes head_dims of 64, 128, 192 or 256, got {d}"
    if k.shape[1] < KEYS or k.shape[1] % ROWS:
        return f"k: Mosaic's kernel takes 64 keys or more, a multiple of 8, got {k.shape[1]}"
    return None


def mosaic_attend(q, k, v, *, scale, kv_lengths=None) -> AttentionState:
    """The state of the queries, for `implementation=` of the core's functions.

    q (b, l, h, d), k (b, n, h_kv, d), v (b, n, h_kv, dv), kv_lengths (b,). Keys and values past the
    lengths may hold any numbers. No gradient. Raises ValueError, with the argument's name, if the
    kernel cannot take an argument.
    """
    return attend_by(q, k, v, scale, kv_lengths)


def attend_by(q, k, v, scale, kv_lengths, cluster: int = 0, merge=None) -> AttentionState:
    """`mosaic_attend`, also by clusters of `cluster` thread blocks, if it is not 0.

    Each block of a cluster takes a split, and `merge` merges their states (cluster_merge.py).
    """
    if (reason := obstacle(q, k, v)) is not None:
        raise ValueError(reason)
    (b, l, h, d), (n, h_kv, dv) = q.shape, v.shape[1:]
    rows = max(pl.next_power_of_2(l * h // h_kv), COLUMNS)
    splits = pl.next_power_of_2(min(pl.cdiv(PROGRAMS, b * h_kv), pl.cdiv(n, KEYS_A_SPLIT)))
    # Mosaic reverses the grid, so heads become CUDA's first dimension, the only large one.
    grid = {"grid": (b, splits, h_kv), "grid_names": ("text", "split", "head")}
    if cluster:
        grid = {"grid": (b, h_kv), "grid_names": ("text", "head")}
        grid |= {"cluster": (cluster,), "cluster_names": ("split",)}
    stages = max(1, min(4, ROOM // (KEYS * (d + dv) * 2)))
    scratch = _scratch(q.dtype, d, dv, rows, stages)
    if cluster:
        shapes = [(rows,), (rows,)] + [(CHUNK, rows)] * (dv // CHUNK)
        scratch["mine"] = [plgpu.SMEM(shape, jnp.float32) for shape in shapes]
        scratch["together"] = plgpu.ClusterBarrier(collective_axes=("split",))
    # The queries of a key head as columns of a product: (b, h_kv, d, rows).
    tile = by_key_heads(q, h_kv, rows).swapaxes(2, 3)
    lengths = jnp.full(b, n) if kv_lengths is None else kv_lengths
    flat = (x.reshape(b, n, -1) for x in (k, v))
    interpret = not is_compiled()
    each = 1 if cluster else splits, b, h_kv
    call = plgpu.kernel(
        functools.partial(_program, splits=cluster or splits, merge=merge, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((*each, rows), (*each, rows), (*each, dv, rows))
        ],
        scratch_types=scratch,
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="treeattn_mosaic_split_k",
        **grid,
        **({"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}),
    )
    scale = jnp.asarray(scale, jnp.float32).reshape(1)
    m, denominator, numerator = call(tile, *flat, lengths.astype(jnp.int32), scale)
    states = (m, denominator, jnp.swapaxes(numerator, 3, 4))
    return reduce_tree(AttentionState(*(by_heads(x, l, h) for x in states)))


def by_key_heads(q, h_kv: int, rows: int):
    """Queries (b, l, h, d) as a tile for each key head, (b, h_kv, rows, d), padded by zeros."""
    b, l, _, d = q.shape
    tile = jnp.moveaxis(q.reshape(b, l, h_kv, -1, d), 2, 1).reshape(b, h_kv, -1, d)
    return jnp.pad(tile, [(0, 0), (0, 0), (0, rows - tile.shape[2]), (0, 0)])


def by_heads(x, l: int, h: int):
    """Results of such tiles, (splits, b, h_kv, rows, …), as (splits, b, l, h, …)."""
    splits, b, h_kv = x.shape[:3]
    x = x[:, :, :, : l * h // h_kv].reshape(splits, b, h_kv, l, -1, *x.shape[4:])
    return jnp.moveaxis(x, 2, 3).reshape(splits, b, l, h, *x.shape[5:])


def _scratch(dtype, d: int, dv: int, rows: int, stages: int) -> dict:
    """A program's shared memory, and its barriers."""
    # Tensor cores read eight contiguous rows of 128 bytes, swizzled to avoid bank conflicts.
    transforms = plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(128)
    return {
        "tile": plgpu.SMEM((d, rows), dtype),
        "keys": plgpu.SMEM((stages, KEYS, d), dtype, transforms=transforms),
        "values": plgpu.SMEM((stages, KEYS, dv), dtype, transforms=transforms),
        "weights": [plgpu.SMEM((KEYS, rows), dtype) for _ in range(2)],
        "keys_there": plgpu.Barrier(num_barriers=stages),
        "values_there": plgpu.Barrier(num_barriers=stages),
    }


def _program(q, k, v, lengths, scale, *out, splits: int, merge, interpret: bool, **scratch):
    """One program: the state of the queries of a key head after one split of its keys.

    References to q (b, h_kv, d, rows), k (b, n, h_kv · d), v (b, n, h_kv · dv), lengths (b,), scale
    (1,). out: references to the state's fields, (splits, b, h_kv, rows) and (splits, b, h_kv, dv,
    rows). splits is 1 there if the blocks of a cluster merge their states.
    """
    tile, keys, values, weights = (scratch[x] for x in ("tile", "keys", "values", "weights"))
    keys_there, values_there = scratch["keys_there"], scratch["values_there"]
    text, split, head = map(lax.axis_index, ("text", "split", "head"))
    (d, rows), (stages, _, dv), n = tile.shape, values.shape, k.shape[1]
    length = jnp.clip(lengths[text], 0, n)
    keys_a_split = ceil(ceil(length, KEYS), splits) * KEYS
    start = split * keys_a_split
    stop = jnp.minimum(start + keys_a_split, length)
    blocks = ceil(jnp.maximum(stop - start, 0), KEYS)
    most = largest_weight(v.dtype, n)
    multiply = functools.partial(_product, interpret=interpret)

    def first(i):  # the block's first key; the cache's last block overlaps the one before
        return jnp.minimum(start + i * KEYS, n - KEYS)

    def fetch(source, target, there, i):
        """Start the copy of block i, if it exists, to its slot."""
        slot, width = lax.rem(i, jnp.int32(stages)), target.shape[2]

        @pl.when(i < blocks)
        def _():
            block = source.at[text, pl.ds(first(i), KEYS), pl.ds(head * width, width)]
            plgpu.copy_gmem_to_smem(block, target.at[slot], there.at[slot])

    def counts(i, shape, axis: int):
        """Whether each key along the axis belongs to block i."""
        key = first(i) + plgpu.broadcasted_iota(jnp.int32, shape, axis)
        return (key >= start + i * KEYS) & (key < stop)

    def scores(i, slot):
        s = _sums(jnp.zeros((KEYS, rows), jnp.float32))
        for chunk in _chunks(d):
            s = multiply(s, _first_factor(keys.at[slot, :, chunk]), _second_factor(tile.at[chunk]))
        s = finite(s * scale[0])
        return jnp.where(counts(i, s.shape, 0), s, jnp.full_like(s, -jnp.inf))

    def add_values(i, slot, chunk, sums):
        turned = _first_factor(values.at[slot, :, chunk].T)
        # Memory past the lengths may be NaN, and 0 · NaN is NaN.
        turned = jnp.where(counts(i, turned.shape, 1), turned, jnp.zeros_like(turned))
        for part in weights:
            sums = multiply(sums, turned, _second_factor(part))
        return sums

    def add_block(i, state):
        m, denominator, numerator = state
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(keys_there.at[slot])
        s = scores(i, slot)
        pivot = jnp.maximum(m, jnp.max(s, axis=0))
        weight = jnp.exp(finite(m) - finite(pivot))
        p = jnp.exp(s - columns(finite(pivot), s))
        for target, part in zip(weights, split_float(p * (1 / most), v.dtype), strict=True):
            target[...] = part
        plgpu.commit_smem()  # the weights are written, and the keys have been read
        fetch(k, keys, keys_there, i + stages)
        plgpu.barrier_wait(values_there.at[slot])
        numerator = tuple(
            add_values(i, slot, chunk, x * columns(weight, x))
            for chunk, x in zip(_chunks(dv), numerator, strict=True)
        )
        plgpu.commit_smem()  # the values have been read
        fetch(v, values, values_there, i + stages)
        return pivot, denominator * weight + jnp.sum(p, axis=0), numerator

    for i in range(stages):
        fetch(k, keys, keys_there, jnp.int32(i))
        fetch(v, values, values_there, jnp.int32(i))
    for chunk in _chunks(d):
        tile[chunk, :] = _load(q.at[text, head, chunk], plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    m = _sums(jnp.full(rows, -jnp.inf, jnp.float32))
    numerator = tuple(_sums(jnp.zeros((x.size, rows), jnp.float32)) for x in _chunks(dv))
    state = m, jnp.zeros_like(m), numerator
    m, denominator, numerator = lax.fori_loop(jnp.int32(0), blocks, add_block, state)
    totals = (finite(x * most) for x in numerator)
    numerator = (jnp.where(columns(denominator, x) != 0, x, jnp.zeros_like(x)) for x in totals)
    state = m, denominator, *numerator
    if merge is None:
        _store_state(out, (split, text, head), state)
    else:
        write(scratch["mine"], state)
        merge(scratch["mine"], splits, scratch["together"])
        pl.when(split == 0)(lambda: _store_state(out, (0, text, head), read(scratch["mine"])))


def _store_state(out, here, state) -> None:
    m, denominator, *numerator = state
    _store(out[0].at[here], m)
    _store(out[1].at[here], denominator)
    for chunk, x in zip(_chunks(out[2].shape[3]), numerator, strict=True):
        _store(out[2].at[*here, chunk], x)


# Reads, writes and products. Mosaic searches for layouts, that is, for which thread holds which
# numbers. In a long program the search takes too long, so the layouts of sums and factors are given
# here, and the others follow from them.


def _chunks(d: int):
    return [pl.ds(i, CHUNK) for i in range(0, d, CHUNK)]


def _sums(x):
    """x in the layout of sums of products; an array of one axis in the layout of their columns."""
    layout = plgpu.Layout.WGMMA
    return plgpu.layout_cast(x, layout.reduce(0) if x.ndim == 1 else layout)


def columns(x, like):
    """x, a number for each column, broadcast to the shape of `like`."""
    return _sums(lax.broadcast_in_dim(x, like.shape, [1]))


def _first_factor(x):
    return plgpu.load(x, layout=plgpu.Layout.MMA_LHS(x.dtype))


def _second_factor(x):
    return plgpu.load(x, layout=plgpu.Layout.MMA_RHS(x.dtype))


def _product(sums, a, b, *, interpret: bool):
    if interpret:
        return sums + lax.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, a, b)


def read(refs):
    """The fields of a state (m, d and the chunks of n), from shared memory."""
    return [_sums(plgpu.load(ref)) for ref in refs]


def write(refs, state) -> None:
    for ref, x in zip(refs, state, strict=True):
        ref[...] = x


def _load(x, layout):
    """An array from global memory. Each thread loads its own elements."""
    return plgpu.load(x, layout=layout, optimized=False)


def _store(target, x) -> None:
    """Writes to global memory. Since JAX 0.12, optimized=False must be given here, too."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, x, optimized=False)
    else:
        target[...] = x
