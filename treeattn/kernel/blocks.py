"""The loop over blocks of keys: how large a block is, and which blocks are read at all."""

import jax
import jax.numpy as jnp
from jax import lax

from treeattn.kernel.inputs import Grouped
from treeattn.kernel.intervals import blocks_seen, interval_block
from treeattn.kernel.products import BLOCK, STREAMS, few_queries

SCORES = 1 << 20  # scores held at a time, about: more of them fall out of the caches


def block_size(inputs: Grouped) -> int:
    """Keys a block, for queries (b, h_kv, group, l, d) and n keys.

    At most BLOCK, at most n, and nearly equal: 1,500 keys are two blocks of 750. For streams it is
    a multiple of STREAMS.
    """
    b, h_kv, group, l, _ = inputs.q.shape
    n = inputs.k.shape[1]
    if inputs.intervals is not None:
        return interval_block(n)
    if not few_queries(inputs.q, n):
        rows = b * h_kv * group * l
        most = min(max(SCORES // max(rows, 1), 128), BLOCK)
        return -(-n // -(-n // most))
    blocks = -(-n // BLOCK)
    size = -(-n // (blocks * STREAMS)) * STREAMS
    return size if size <= n else -(-n // ((blocks + 1) * STREAMS)) * STREAMS


def over_blocks(add_block, state, size: int, inputs: Grouped, *blocks):
    """add_block(…add_block(state, 0, *blocks[0])…), for the blocks that any row sees.

    add_block(state, start, *block) takes a block's first key, and what `blocks`, pytrees of arrays
    with a first axis of blocks, have for it.
    """
    n = inputs.k.shape[1]
    longest = n if inputs.lengths is None else _longest(inputs.lengths)
    starts = jnp.arange(0, n, size, dtype=jnp.int32)
    seen = None
    if inputs.intervals is not None:
        seen = blocks_seen(inputs.intervals, size)
        # What a branch keeps for its derivative, a skipped block writes as zeros: let it be little.
        add_block = jax.checkpoint(add_block)

    def visit(state, block):
        # The branch keeps blocks past the longest row from being read. It also keeps XLA:CPU
        # from moving the widening of half-precision keys out of the loop, which would write a
        # float32 copy of the whole cache.
        start, seen, *arrays = block
        more = start < lax.optimization_barrier(jnp.asarray(longest, jnp.int32))
        if seen is not None:
            more = more & seen
        return lax.cond(more, add_block, lambda state, *_: state, state, start, *arrays), None

    if seen is None:
        visit = jax.checkpoint(visit, prevent_cse=False)
    return lax.scan(visit, state, (starts, seen, *blocks))[0]


@jax.custom_batching.custom_vmap
def _longest(lengths):
    """The largest of all lengths (b,), those of the rows that `jax.vmap` adds, too: a scalar.

    So a batch skips the blocks that none of its rows sees. With a length for each, JAX would turn
    the branches into a selection from both, whose derivative it cannot transpose.
    """
    return jnp.max(lengths, initial=0)


@_longest.def_vmap
def _longest_of_a_batch(axis_size, in_batched, lengths):
    return _longest(lengths), False


def split_blocks(x, axis: int, size: int):
    """The blocks of `x` along `axis`, along a new first axis; the last is the last `size`.

    Keys (b, n, h_kv, d) become (⌈n / size⌉, b, size, h_kv, d).
    """
    n = x.shape[axis]
    whole = -(-n // size) - 1
    axis %= x.ndim
    head = lax.slice_in_dim(x, 0, whole * size, axis=axis)
    head = head.reshape(*x.shape[:axis], whole, size, *x.shape[axis + 1 :])
    last = lax.slice_in_dim(x, n - size, n, axis=axis)
    return jnp.concatenate([jnp.moveaxis(head, axis, 0), last[None]])
