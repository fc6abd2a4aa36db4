"""Flash-Decoding in one kernel: the blocks of a cluster merge through each other's shared memory.

    python -m labs.kernels.cluster_merge

An experiment for Hopper GPUs (H100, H200), for JAX 0.11.2 or newer. Each thread block of a cluster
attends to a share of the keys and leaves its state in its shared memory. Then the states merge
along a binary tree: in round r, block i reads the state of block i + 2ʳ where it lies, through what
NVIDIA calls distributed shared memory. Only the cluster's one state goes to global memory, where
split-K kernels (split_k.py) put all states, for a second kernel to merge.

Without such a GPU, Pallas interprets the kernel, slowly, and watches for races.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

import treeattn
from treeattn import AttentionState, reduce_tree

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    plgpu = None

ROWS = 64  # of a tile of queries: those of one wgmma instruction
KEYS = 64  # of a block of keys
STAGES = 3  # blocks of keys on their way at once
CLUSTER = 8  # thread blocks: the most that every Hopper GPU allows


def missing() -> str | None:
    """What this JAX lacks; None if it lacks nothing."""
    if hasattr(plgpu, "cluster_ref") and hasattr(plgpu, "InterpretGPUParams"):
        return None
    return f"the cluster's kernel needs JAX 0.11.2 or newer, and this is {jax.__version__}"


def on_hopper() -> bool:
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"


def cluster_attend(q, k, v, *, kv_lengths=None, cluster=CLUSTER, clusters=1) -> AttentionState:
    """The state of `treeattn.attend(q, k, v, kv_lengths=kv_lengths)`, by one kernel.

    q (b, l, h, d), k (b, n, h_kv, d), v (b, n, h_kv, dv) in bfloat16 or float16; d and dv 64 or
    128; l · h / h_kv up to 64. With several `clusters` a head, their states merge outside. What
    lies past the lengths is multiplied by 0, so it must be finite.
    """
    (b, l, h, d), (n, h_kv, dv) = q.shape, v.shape[1:]
    rows = l * h // h_kv
    if rows > ROWS or cluster & (cluster - 1):
        raise ValueError(f"q: {rows} rows, of {ROWS}; cluster: {cluster}, not a power of two")
    tile = q.reshape(b, l, h_kv, -1, d).swapaxes(1, 2).reshape(b, h_kv, rows, d)
    tile = jnp.pad(tile, [(0, 0), (0, 0), (0, ROWS - rows), (0, 0)])
    lengths = jnp.full(b, n) if kv_lengths is None else kv_lengths
    room = max(KEYS, -(-n // 8) * 8)  # the copies' layout has tiles of 8 keys
    k, v = (jnp.pad(x, [(0, 0), (0, room - n), (0, 0), (0, 0)]) if room > n else x for x in (k, v))

    f32, tiles = jnp.float32, (clusters, b, h_kv, ROWS)
    run = plgpu.kernel(
        functools.partial(_kernel, n=n, cluster=cluster, scale=d**-0.5),
        out_type=[jax.ShapeDtypeStruct(x, f32) for x in (tiles, tiles, (*tiles, dv))],
        scratch_types=dict(
            tile=plgpu.SMEM((ROWS, d), q.dtype),
            keys=plgpu.SMEM((STAGES, KEYS, d), k.dtype),
            values=plgpu.SMEM((STAGES, KEYS, dv), v.dtype),
            weights=plgpu.SMEM((2, ROWS, KEYS), v.dtype),
            mine=[plgpu.SMEM(x, f32) for x in ((ROWS,), (ROWS,), (ROWS, dv))],
            tile_there=plgpu.Barrier(),
            there=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            together=plgpu.ClusterBarrier(collective_axes=("block",)),
        ),
        grid=tiles[:3],
        grid_names=("cluster", "text", "head"),
        cluster=(cluster,),
        cluster_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
    )

    def of_heads(x):  # (clusters, b, h_kv, ROWS, …) to (clusters, b, l, h, …)
        x = x[:, :, :, :rows].reshape(clusters, b, h_kv, l, -1, *x.shape[4:])
        return jnp.moveaxis(x, 2, 3).reshape(clusters, b, l, h, *x.shape[5:])

    states = AttentionState(*map(of_heads, run(tile, k, v, lengths.astype(jnp.int32))))
    return reduce_tree(states) if clusters > 1 else jax.tree.map(lambda x: x[0], states)


def _kernel(
    q, k, v, lengths, *out, n, cluster, scale, tile, keys, values, weights, mine, **barriers
):
    """One thread block: its share of the keys, then its part in the tree."""
    tile_there, there = barriers["tile_there"], barriers["there"]
    here = group, text, head = tuple(map(lax.axis_index, ("cluster", "text", "head")))
    block, shares = lax.axis_index("block"), cluster * out[0].shape[0]
    length, room = jnp.clip(lengths[text], 0, n), k.shape[1]
    share = _ceil(_ceil(length, KEYS), shares) * KEYS
    start = (group * cluster + block) * share
    stop = jnp.minimum(start + share, length)
    blocks = _ceil(jnp.maximum(stop - start, 0), KEYS)

    def first(i):  # of the block's keys; the cache's last block overlaps the one before
        return pl.multiple_of(jnp.minimum(start + i * KEYS, room - KEYS), 8)

    def fetch(i):
        slot = lax.rem(i, jnp.int32(STAGES))
        for source, target in ((k, keys), (v, values)):
            source = source.at[text, pl.ds(first(i), KEYS), head]
            plgpu.copy_gmem_to_smem(source, target.at[slot], there.at[slot])

    def add_block(i, state):
        m, denominator, numerator = state
        slot = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(there.at[slot])
        s = _product((ROWS, KEYS), (tile, keys.at[slot].T)) * scale
        key = first(i) + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        s = jnp.where((key >= start + i * KEYS) & (key < stop), s, -jnp.inf)
        pivot = jnp.maximum(m, s.max(axis=1))
        weight = jnp.exp(_finite(m) - _finite(pivot))
        p = jnp.exp(s - _rows(_finite(pivot), s))
        weights[0] = p.astype(v.dtype)  # p is a sum of two numbers that tensor cores multiply
        weights[1] = (p - p.astype(v.dtype).astype(p.dtype)).astype(v.dtype)
        plgpu.commit_smem()
        added = _product(numerator.shape, *((weights.at[j], values.at[slot]) for j in (0, 1)))
        pl.when(i + STAGES < blocks)(lambda: fetch(i + STAGES))
        return pivot, denominator * weight + p.sum(axis=1), numerator * _rows(weight, added) + added

    plgpu.copy_gmem_to_smem(q.at[text, head], tile, tile_there)
    for i in range(STAGES):
        pl.when(i < blocks)(functools.partial(fetch, jnp.int32(i)))
    plgpu.barrier_wait(tile_there)
    none = AttentionState.identity((ROWS,), v.shape[3])
    none = map(plgpu.layout_cast, none, _layouts())
    _write(mine, lax.fori_loop(jnp.int32(0), blocks, add_block, tuple(none)))
    _merge_along_a_tree(mine, block, cluster, barriers["together"])

    @pl.when(block == 0)
    def _():
        plgpu.commit_smem()
        for source, target in zip(mine, out, strict=True):
            plgpu.copy_smem_to_gmem(source, target.at[here])
        plgpu.wait_smem_to_gmem(0)


def _merge_along_a_tree(mine, block, cluster: int, together) -> None:
    """Block 0's state becomes that of the whole cluster, in log₂ of its size rounds."""

    def round_of(distance):
        theirs = [plgpu.cluster_ref(ref, {"block": block + distance}) for ref in mine]
        _write(mine, _merge(_read(mine), _read(theirs)))

    for r in range(cluster.bit_length() - 1):
        _everybody(together)  # has written its state
        reads = lax.rem(block, jnp.int32(2 << r)) == 0
        pl.when(reads)(functools.partial(round_of, 1 << r))
    _everybody(together)  # stays until it has been read


def _everybody(together) -> None:
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)


def _finite(x):
    """±∞ as the largest finite numbers: an infinite pivot is a sign, not one to compute with."""
    largest = jnp.finfo(x.dtype).max
    return lax.clamp(-largest, x, largest)


def _merge(a, b):
    """`treeattn.merge`, of what a kernel can compute."""
    m = jnp.maximum(a[0], b[0])
    x, y = (jnp.exp(_finite(state[0]) - _finite(m)) for state in (a, b))
    return m, a[1] * x + b[1] * y, a[2] * _rows(x, a[2]) + b[2] * _rows(y, b[2])


def _product(shape, *pairs):
    """Σ of the products of matrices in shared memory, in float32."""

    def run(sums):
        for a, b in pairs:
            plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _ceil(x, n: int):
    return lax.div(x + (n - 1), jnp.int32(n))


def _rows(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _layouts():
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    return of_rows, of_rows, plgpu.Layout.WGMMA


def _read(refs):
    return [plgpu.layout_cast(plgpu.load(x), y) for x, y in zip(refs, _layouts(), strict=True)]


def _write(refs, state):
    for ref, x in zip(refs, state, strict=True):
        ref[...] = x


# Without a Hopper GPU.


@contextlib.contextmanager
def interpreted():
    """What is called and compiled within runs in Pallas's interpreter, which looks for races.

    The interpreter of JAX 0.11.2 and 0.12 has clusters and their barriers, but refuses
    `cluster_ref`. It keeps the buffers of all blocks side by side, by a key that says whose it is:
    so here a reference to another block's is looked up by the key with that block's number.
    """
    from jax._src.pallas.mosaic_gpu.core import ClusterRefTransform
    from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey

    plain = jaxpr_interpret.resolve_ref
    whose = [x.name for x in dataclasses.fields(HostAllocationKey)].index("block_id")

    def resolve_ref(aval, key, transforms):
        for x in transforms:
            key = key.at[whose].set(x.idxs[0]) if isinstance(x, ClusterRefTransform) else key
        rest = tuple(x for x in transforms if not isinstance(x, ClusterRefTransform))
        return plain(aval, key, rest)

    jaxpr_interpret.resolve_ref = resolve_ref
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        jaxpr_interpret.resolve_ref = plain


def draw(h: int, n: int, h_kv: int, d: int = 128):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, 1, h, d), (1, n, h_kv, d), (1, n, h_kv, d)
    return [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]


def main() -> None:
    if missing():
        print(missing())
        return
    # A block that waits holds a thread, of which the interpreter has one for each CPU device.
    jax.config.update("jax_num_cpu_devices", CLUSTER)
    hopper = on_hopper()
    print("on", jax.devices()[0].device_kind if hopper else "no Hopper GPU: interpreted, small")
    q, k, v = draw(32, 100_000, 8) if hopper else draw(4, 500, 2, d=64)
    n = k.shape[1] - 7
    with contextlib.nullcontext() if hopper else interpreted():
        state = jax.jit(cluster_attend)(q, k, v, kv_lengths=jnp.array([n]))
        jax.block_until_ready(state)  # before anything else wants a thread
    with jax.enable_x64(True):
        exact = treeattn.attention(*(np.asarray(x, float) for x in (q, k[:, :n], v[:, :n])))
    close = np.allclose(treeattn.finalize(state)[0], exact, atol=1e-4)
    print(f"{n} keys, {CLUSTER} blocks a head, allclose to float64: {close}")


if __name__ == "__main__":
    main()
