"""The gradient of attention by intervals, written out: FlashAttention-2's second pass, in trees.

JAX could derive it. But what it derives copies every block that a branch reads, for the visited
blocks and for those that are skipped, and takes twice as long. Here the scores of a visited block
are computed anew, and with them its share of three gradients: five products where the state took
two. Nothing is kept of a block, so that memory stays proportional to the number of tokens.

With p = exp(q·k − m), a state holds D = Σ p and N = Σ p v, and their cotangents d and n give

    v:  Σ p n        over the queries
    k:  Σ p c q      over the queries, c = d + n·v
    q:  Σ p c k      over the keys

Arrays are as in treeattn/kernel/blockwise.py, but for those that come in blocks, along a first
axis, of `size` queries or keys.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeattn.idea.arrays import pad_axis, varying_like
from treeattn.idea.state import finite
from treeattn.kernel.inputs import NOBODY, Grouped, Intervals
from treeattn.kernel.intervals import blocks_seen, interval_block, visible_keys
from treeattn.kernel.masks import hidden_from_all, mask_and_clip, zero_hidden
from treeattn.kernel.products import EXACT, shrink


def with_transpose(f, transpose, x):
    """f(x), for a linear f of pytrees, whose transpose JAX takes to be `transpose`.

    (x, f(x)) is the solution (u, w) of the linear system u = x, w − f(u) = 0, and of a system that
    is linear JAX lets one say how to solve its transpose. Knowing the system, it can do the rest:
    derivatives forward, batches, and derivatives of derivatives, which it derives from f.
    """

    def system(pair):
        u, w = pair
        y = f(u)
        moving = zeros_from(y, u)  # or JAX would not find what it derives from f in all of it
        return jax.tree.map(jnp.add, u, moving), jax.tree.map(jnp.subtract, w, y)

    def solve(_, pair):
        u, w = pair
        return u, jax.tree.map(jnp.add, w, f(u))

    def solve_transpose(_, pair):
        u, w = pair
        return jax.tree.map(jnp.add, u, transpose(w)), w

    zeros = zeros_from(x, jax.eval_shape(f, x))
    return lax.custom_linear_solve(system, (x, zeros), solve, solve_transpose)[1]


def zeros_from(x, like):
    """Zeros like `like`, which JAX takes to depend on x: sums of none of its entries.

    It asks that of all that stands on the right of a linear system.
    """
    zero = sum(jnp.sum(leaf.reshape(-1)[:0]) for leaf in jax.tree.leaves(x))
    return jax.tree.map(lambda y: jnp.broadcast_to(zero.astype(y.dtype), y.shape), like)


def gradients_of_sums(inputs: Grouped, m, d, n) -> dict:
    """The cotangents of q, k and v, from those of (Σ exp(s − m), Σ exp(s − m) v), m constant.

    m and d (b, h_kv, group, l), n (b, h_kv, group, l, dv); d and n are cotangents.
    """
    rows = len(inputs.q)
    if rows == 1 or not inputs.by_row:
        return _gradients_of_rows(inputs, m, d, n)

    def of_row(row):
        q, k, v, ends, m, d, n = jax.tree.map(lambda x: x[None], row)
        one = inputs.replace(q=q, k=k, v=v, intervals=inputs.intervals.replace(ends=ends))
        return jax.tree.map(lambda x: x[0], _gradients_of_rows(one, m, d, n))

    row = inputs.q, inputs.k, inputs.v, inputs.intervals.ends, m, d, n
    return lax.map(of_row, row)  # each skips what it does not see


def _gradients_of_rows(inputs: Grouped, m, d, n) -> dict:
    """`gradients_of_sums` of rows that skip the same blocks."""
    q = inputs.q
    dtype = q.dtype
    l = q.shape[3]
    keys = inputs.k.shape[1]
    intervals = inputs.intervals
    numbers = jnp.pad(intervals.queries, (0, -l % interval_block(l)), constant_values=NOBODY)
    of_queries = [_split(x, 3, interval_block(l)) for x in (q, finite(m), d, n)]
    size = interval_block(keys)
    k, v = (_split(x.swapaxes(1, 2), 2, size) for x in (inputs.k, inputs.v))
    numbers_of_keys = jnp.pad(intervals.keys, (0, -keys % size), constant_values=NOBODY)
    ends = pad_axis(intervals.ends, 1, len(numbers_of_keys))  # nobody sees what is added

    def add_queries(sums, block):
        q, m, d, n, numbers = block
        own = Intervals(numbers, numbers_of_keys, ends)
        seen = blocks_seen(own, size)
        visited = jnp.argsort(~seen, stable=True)
        queries = q, *shrink(q, inputs.partitioned), m, d, n

        def visit(step, sums):
            of_k, of_v, of_q = sums
            at = visited[step]
            visible = visible_keys(own, at * size, size)
            of_at = k[at].astype(dtype), v[at].astype(dtype), visible
            for_k, for_v, for_q = _gradients_of_block(queries, *of_at, stale=inputs.stale)
            return of_k.at[at].add(for_k), of_v.at[at].add(for_v), of_q + for_q

        of_k, of_v, of_q = lax.fori_loop(0, jnp.sum(seen), visit, (*sums, jnp.zeros_like(q)))
        return (of_k, of_v), of_q

    def zeros_like(x):  # (blocks, b, h_kv, ·, size): transposed, as their products are
        return jnp.zeros((*x.shape[:-2], x.shape[-1], size), dtype)

    sums = varying_like((zeros_like(k), zeros_like(v)), *inputs.arrays, d, n)
    blocks = (*of_queries, numbers.reshape(-1, interval_block(l)))
    (of_k, of_v), of_q = lax.scan(add_queries, sums, blocks)

    def as_they_came(x):  # keys and values, (b, n, h_kv, ·)
        x = jnp.moveaxis(x, (0, 4), (1, 2))  # (b, blocks, size, h_kv, ·)
        return x.reshape(len(x), -1, *x.shape[3:])[:, :keys]

    of_q = jnp.moveaxis(of_q, 0, 3)
    of_q = of_q.reshape(*q.shape[:3], -1, q.shape[4])[:, :, :, :l]
    return {
        "q": of_q,
        "k": as_they_came(of_k).astype(inputs.k.dtype),
        "v": as_they_came(of_v).astype(inputs.v.dtype),
    }


def _split(x, axis: int, size: int):
    """`x` in blocks of `size` along a new first axis, with zeros at the end of the last."""
    blocks = -(-x.shape[axis] // size)
    x = pad_axis(x, axis, blocks * size)
    x = x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _gradients_of_block(queries, k, v, visible, *, stale: bool):
    """A visited block's share in the cotangents of k, v (b, h_kv, ·, size) and q.

    k, v: (b, h_kv, size, ·)
    """
    q, shrunk, root, m, d, n = queries
    if stale:
        hidden = hidden_from_all(visible).swapaxes(1, 2)  # (b, 1, size, 1)
        k = zero_hidden(k, hidden)
        v = zero_hidden(v, hidden)
    s = scores(shrunk, k) * root * root
    clipped = jnp.isinf(s)
    s = mask_and_clip(s, visible, None)
    p = jnp.exp(s - m[..., None])
    c = d[..., None] + _product("bkgle,bkne->bkgln", n, v)
    of_s = jnp.where(clipped, 0, p * c)
    of_v = _product("bkgle,bkgln->bken", n, p)
    of_k = _product("bkgld,bkgln->bkdn", q, of_s)
    of_q = _product("bkgln,bknd->bkgld", of_s, k)
    return of_k, of_v, of_q


def scores(q, k):
    """q·k of all queries (b, h_kv, group, l, d) and keys (b, h_kv, size, d)."""
    return _product("bkgld,bknd->bkgln", q, k)


def _product(formula: str, a, b):
    return jnp.einsum(formula, a, b, precision=EXACT)
