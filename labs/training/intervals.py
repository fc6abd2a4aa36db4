"""Who sees whom in a tree whose nodes are in depth-first order: two integers a token, and no mask.

In that order the subtree of node j is the interval j … ends[j] − 1 of nodes, so query i sees key j,
which is i itself or one of its ancestors, exactly when j ≤ i < ends[j] (`treeattn.trees.rows`). A
block of queries reads the blocks of keys of which it may see some, and skips the others. Memory is
proportional to the number of tokens, forward and backward.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeattn.idea.arrays import pad_axis
from treeattn.kernel.inputs import NOBODY, Grouped, Intervals

INTERVAL_BLOCK = 256  # queries, and keys, a block: of smaller ones more are skipped


def visible_keys(intervals: Intervals, first, size: int):
    """(b, 1, 1, l, size) bool: which of the keys first … first + size − 1 each query sees.

    A block that all of its queries see whole is masked like any other: on a CPU that takes 1 to 4 %
    of the block's time.
    """
    key = lax.dynamic_slice_in_dim(intervals.keys, first, size)[None, None]
    end = lax.dynamic_slice_in_dim(intervals.ends, first, size, axis=1)[:, None]
    query = intervals.queries[None, :, None]
    visible = (key <= query) & (query < end)
    return visible[:, None, None]


def blocks_seen(intervals: Intervals, size: int):
    """(⌈n / size⌉,) bool: of which blocks of keys some query of some row may see some.

    None of the queries sees a block whose subtrees all end before the first of them, or whose nodes
    all come after the last.
    """
    rows, n = intervals.ends.shape
    missing = -n % size
    keys = jnp.pad(intervals.keys, (0, missing), constant_values=NOBODY)
    ends = jnp.pad(intervals.ends, ((0, 0), (0, missing)))
    first_key = jnp.min(keys.reshape(-1, size), axis=1)
    last_end = _of_all_rows(jnp.max(ends.reshape(rows, -1, size), axis=(0, 2)))
    queries = intervals.queries
    last_query = jnp.max(jnp.where(queries == NOBODY, -1, queries))
    return (last_end > jnp.min(queries)) & (first_key <= last_query)


@jax.custom_batching.custom_vmap
def _of_all_rows(last_end):
    """`last_end` (blocks,), the latest of all rows: of those that `jax.vmap` adds, too.

    So a batch skips the blocks that none of its rows sees. (See `blocks._longest`.)
    """
    return last_end


@_of_all_rows.def_vmap
def _of_all_rows_of_a_batch(axis_size, in_batched, last_end):
    return _of_all_rows(jnp.max(last_end, axis=0)), False


def by_query_blocks(f, inputs: Grouped, *arrays):
    """f(inputs, *arrays) a block of queries at a time, where there are intervals.

    `arrays`, like the queries (b, h_kv, group, l, d), and what f returns have l as axis 3.
    """
    l = inputs.q.shape[3]
    if inputs.intervals is None or l <= INTERVAL_BLOCK:
        return f(inputs, *arrays)
    size = interval_block(l)
    blocks = -(-l // size)

    def split(x):  # (…, l, …) -> (blocks, …, size, …)
        x = pad_axis(x, 3, blocks * size)
        x = x.reshape(*x.shape[:3], blocks, size, *x.shape[4:])
        return jnp.moveaxis(x, 3, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], blocks * size, *x.shape[5:])[:, :, :, :l]

    missing = blocks * size - l  # queries that only fill the last block, and are dropped
    queries = jnp.pad(inputs.intervals.queries, (0, missing), constant_values=NOBODY)

    @jax.checkpoint  # or each block of queries would keep all keys and values
    def of_block(block):
        q, queries, *arrays = block
        intervals = inputs.intervals.replace(queries=queries)
        return f(inputs.replace(q=q, intervals=intervals), *arrays)

    queries = queries.reshape(blocks, size)
    found = lax.map(of_block, (split(inputs.q), queries, *map(split, arrays)))
    return jax.tree.map(join, found)


def interval_block(n: int) -> int:
    """Nodes a block, of n: at most `INTERVAL_BLOCK`, all nearly equal (260 are two of 130)."""
    return max(-(-n // max(-(-n // INTERVAL_BLOCK), 1)), 1)


def blocks_visited(ends, size: int | None = None) -> int:
    """How many blocks of size × size scores attention computes for a tree of those ends (n,).

    Block I of queries visits block J of keys where J ≤ I, and some subtree of J's nodes ends after
    the first node of I. A text without branches visits all of them, b(b + 1) / 2 for b blocks.
    """
    ends = np.asarray(ends)
    size = interval_block(len(ends)) if size is None else size
    starts = np.arange(0, len(ends), size)
    last_end = np.array([ends[start : start + size].max() for start in starts])
    visited = (last_end[None] > starts[:, None]) & (starts[None] <= starts[:, None])
    return int(visited.sum())
