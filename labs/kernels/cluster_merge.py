"""A merge within a GPU: the blocks of a cluster read each other's shared memory along a tree.

An experiment for Hopper GPUs (H100, H200), with JAX 0.11.2 or newer. Each thread block of a cluster
attends to a share of the keys (mosaic_decode.py) and leaves its state in its shared memory. Then
the states merge along a binary tree. In round r, block i reads the state of block i + 2ʳ from that
block's shared memory; NVIDIA calls this distributed shared memory. Only the merged state goes to
global memory. Split-K kernels write all states there, and a second kernel merges them.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from labs.kernels.mosaic_decode import attend_by, columns, missing, plgpu, read, write
from labs.kernels.tiles import finite
from treeattn import AttentionState

CLUSTER = 8  # thread blocks; the largest cluster that every Hopper GPU allows


def obstacle() -> str | None:
    """Why the kernel cannot run on this device; None if it can."""
    hopper = getattr(jax.devices()[0], "compute_capability", "") == "9.0"
    return missing() or (None if hopper else "it needs a GPU of compute capability 9.0")


def cluster_attend(q, k, v, *, scale, kv_lengths=None, cluster=CLUSTER) -> AttentionState:
    """`mosaic_attend` by one kernel: each thread block of a cluster takes a split, and they merge.

    cluster: the number of thread blocks, a power of two
    """
    if cluster & (cluster - 1):
        raise ValueError(f"cluster: expected a power of two, got {cluster}")
    return attend_by(q, k, v, scale, kv_lengths, cluster, merge_along_a_tree)


def merge_along_a_tree(mine: list, cluster: int, together) -> None:
    """Merges all states of a cluster into block 0's state, in log₂(cluster) rounds.

    mine: references to the block's own state, in shared memory
    together: a barrier of the cluster
    """
    block = lax.axis_index("split")

    def round_of(distance):
        theirs = [plgpu.cluster_ref(ref, {"split": block + distance}) for ref in mine]
        write(mine, _merge(read(mine), read(theirs)))

    for r in range(cluster.bit_length() - 1):
        _everybody(together)  # every block has written its state
        reads = lax.rem(block, jnp.int32(2 << r)) == 0
        pl.when(reads)(functools.partial(round_of, 1 << r))
    _everybody(together)  # no block exits while another reads its state


def _everybody(together) -> None:
    plgpu.barrier_arrive(together)
    plgpu.barrier_wait(together)


def _merge(a, b):
    """`treeattn.merge`, with operations that Mosaic supports."""
    m = jnp.maximum(a[0], b[0])
    x, y = (jnp.exp(finite(state[0]) - finite(m)) for state in (a, b))
    numerators = zip(a[2:], b[2:], strict=True)
    sums = (columns(x, p) * p + columns(y, q) * q for p, q in numerators)
    return m, a[1] * x + b[1] * y, *sums


# Without a Hopper GPU.


@contextlib.contextmanager
def interpreted():
    """A context in which Pallas's interpreter runs kernels with clusters.

    The interpreter of JAX 0.11.2 and 0.12 has clusters and their barriers, but refuses
    `cluster_ref`. It keeps the buffers of all blocks under keys that contain the block's number.
    Here a reference to another block's buffer becomes the key with that block's number.
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
        yield
    finally:
        jaxpr_interpret.resolve_ref = plain
