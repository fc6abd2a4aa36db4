"""Attention on one device: queries and keys in, an `AttentionState` out.

The keys are read once, in blocks: each block's scores become a state, and the states merge
(the iteration of v1 eq. 2–4, v2 eq. 1–3, a block at a time, as in FlashAttention).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from treeattn.arrays import (
    Array,
    accumulation_dtype,
    check_broadcasts,
    check_floating,
    check_rank,
    check_same_dtype,
)
from treeattn.state import AttentionState, finalize, merge

BLOCK = 256  # keys read at a time


def attend(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    kv_lengths: Int[Array, " b"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
) -> AttentionState:
    """The state of each query after its keys: fields (b, l, h) and numerator (b, l, h, dv).

    q:          (b, l, h, d), floating-point; k (b, n, h_kv, d) and v (b, n, h_kv, dv) of the
                same dtype. h must be a multiple of h_kv: query head i reads key head
                i // (h // h_kv).
    mask:       True where a query may see a key; broadcasts to (b, h, l, n).
    bias:       added to the scaled scores; broadcasts to (b, h, l, n). −∞ hides a key.
    kv_lengths: (b,) integers: row i sees its first kv_lengths[i] keys. Blocks past them are
                not read.
    scale:      multiplies q·k; 1/√d when None.
    implementation: "blockwise", in plain JAX; "flash", flash-attn-jax's CUDA kernel, for
                float16 and bfloat16 without mask and bias; None for flash where it can run.

    The state is in float32, or float64 when an input is. A score above the dtype's range
    counts as the largest finite one. A query that sees no key has the state (−∞, 0, 0), and
    zero gradients.

    Raises TypeError for dtypes that are not floating-point or differ, ValueError for shapes
    that do not fit and for "flash" where the kernel cannot run.
    """
    check_attend_inputs(q, k, v, mask, bias, kv_lengths)
    from treeattn import flash  # it builds on this module

    if scale is None:
        scale = q.shape[-1] ** -0.5
    if flash.resolve(implementation, q, k, v, mask, bias) == "flash":
        return flash.flash_attend(q, k, v, kv_lengths, scale)
    return attend_blockwise(q, k, v, mask, bias, kv_lengths, scale)


def attention(q, k, v, **options) -> Float[Array, "b l h dv"]:
    """softmax(scale · q kᵀ) v in the queries' layout and dtype; `options` as in `attend`."""
    return finalize(attend(q, k, v, **options))[0].astype(q.dtype)


def check_attend_inputs(q, k, v, mask=None, bias=None, kv_lengths=None) -> None:
    """Raise the TypeError or ValueError that `attend` documents, naming the argument."""
    check_floating(q=q, k=k, v=v)
    check_same_dtype(q=q, k=k, v=v)
    check_rank(4, "(batch, length, heads, head_dim)", q=q, k=k, v=v)
    b, l, h, d = q.shape
    n, h_kv = k.shape[1:3]
    if (k.shape[0], k.shape[3]) != (b, d):
        raise ValueError(
            f"k: expected (batch, kv_len, kv_heads, head_dim) with batch {b} and "
            f"head_dim {d} as in q {q.shape}, got {k.shape}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected k's batch, kv_len and kv_heads, {k.shape[:3]}, got {v.shape}"
        )
    if h_kv == 0 or h % h_kv:
        raise ValueError(f"q: expected a number of heads that k's {h_kv} heads divide, got {h}")
    if mask is not None:
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask: expected booleans, got dtype {mask.dtype}")
        check_broadcasts("mask", mask, (b, h, l, n), "(batch, heads, q_len, kv_len)")
    if bias is not None:
        check_floating(bias=bias)
        check_broadcasts("bias", bias, (b, h, l, n), "(batch, heads, q_len, kv_len)")
    if kv_lengths is not None:
        if not jnp.issubdtype(kv_lengths.dtype, jnp.integer):
            raise TypeError(f"kv_lengths: expected integers, got dtype {kv_lengths.dtype}")
        if kv_lengths.shape != (b,):
            raise ValueError(
                f"kv_lengths: expected shape ({b},), one a row, got {kv_lengths.shape}"
            )


@functools.partial(jax.jit, inline=True)
def attend_blockwise(q, k, v, mask, bias, kv_lengths, scale) -> AttentionState:
    """`attend` in plain JAX; its arguments are checked already."""
    b, l, h, _ = q.shape
    if kv_lengths is not None and b > 1:
        # A row at a time, so that a short row does not read the blocks of a long one.
        def row(x):
            return attend_blockwise(*jax.tree.map(lambda a: a[None], x), scale)

        mask, bias = (
            x if x is None else jnp.broadcast_to(x, (b, *x.shape[1:])) for x in (mask, bias)
        )
        states = jax.lax.map(row, (q, k, v, mask, bias, kv_lengths))
        return jax.tree.map(lambda x: x[:, 0], states)

    dtype = accumulation_dtype(q, k, v)
    h_kv, dv = v.shape[2:]
    # Query heads grouped by the key head they read: (b, h_kv, group, l, d).
    q = (q.astype(dtype) * scale).reshape(b, l, h_kv, h // h_kv, -1).transpose(0, 2, 3, 1, 4)
    mask, bias = (x if x is None else _group_heads(x, h_kv) for x in (mask, bias))

    state = AttentionState.identity(q.shape[:-1], dv, dtype)
    # Before the loop: a cast inside a branch would put its transpose, an Allreduce, into the
    # branch's backward pass, where devices that skip the block would leave the others waiting.
    q, k, v, bias, state = varying_like((q, k, v, bias, state), q, k, v, mask, bias, kv_lengths)
    n = k.shape[1]
    size = min(n, BLOCK)

    def add_block(state, start):
        # The last block starts early enough to be whole, and skips what was seen already.
        first = jnp.minimum(start, n - size)
        slice_keys = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size
        )
        position = first + jnp.arange(size)
        visible = position >= start
        if kv_lengths is not None:
            visible &= position < kv_lengths
        if mask is not None:
            visible &= mask if mask.shape[-1] == 1 else slice_keys(mask, axis=-1)
        added = bias if bias is None or bias.shape[-1] == 1 else slice_keys(bias, axis=-1)
        return merge(
            state, _block_state(q, slice_keys(k, axis=1), slice_keys(v, axis=1), visible, added)
        )

    def visit(state, start):
        # The branch keeps blocks past the longest row from being read. It also keeps XLA on
        # CPU from moving the cast of a half-precision block out of the loop, which would
        # write a float32 copy of the whole cache.
        longest = n if kv_lengths is None else jnp.max(kv_lengths)
        more = start < jax.lax.optimization_barrier(jnp.minimum(longest, n))
        return jax.lax.cond(more, jax.checkpoint(add_block), lambda s, _: s, state, start), None

    if n:
        state, _ = jax.lax.scan(visit, state, jnp.arange(0, n, size))
    return jax.tree.map(
        lambda x: x.transpose(0, 3, 1, 2, *range(4, x.ndim)).reshape(b, l, h, *x.shape[4:]), state
    )


def varying_like(tree, *arrays):
    """`tree`, typed as differing between the devices along every axis that an array differs along.

    Inside `shard_map` a loop's carry must have the type that its body gives it; elsewhere this
    does nothing.
    """
    axes = frozenset().union(*(jax.typeof(x).vma for x in arrays if x is not None))

    def cast(x):
        missing = tuple(axes - jax.typeof(x).vma)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _group_heads(x, h_kv: int):
    """(b, h, l, n) -> (b, h_kv, group, l, n), or (b, 1, 1, l, n) when all heads share it."""
    b, h, l, n = x.shape
    return x.reshape((b, 1, 1, l, n) if h == 1 else (b, h_kv, h // h_kv, l, n))


def _block_state(q, k, v, visible, bias) -> AttentionState:
    """One block's state, (b, h_kv, group, l): q as grouped above, k and v (b, size, h_kv, ·)."""
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    s = _scores(q, k)
    if bias is not None:
        s = s + bias.astype(s.dtype)
    # ∞ − ∞ is NaN: a score out of range counts as the largest finite one.
    s = jnp.minimum(s, jnp.finfo(s.dtype).max)
    s = jnp.where(visible, s, -jnp.inf)
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1))
    p = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m)[..., None])
    return AttentionState(m, jnp.sum(p, axis=-1), _weighted_sum(p, v))


def _scores(q, k):
    """q·k (b, h_kv, group, l, size)."""
    if q.shape[2] * q.shape[3] == 1:  # one query a key head: no matrix product to gain from
        k = k.transpose(0, 2, 1, 3)[:, :, None, None]
        return jnp.sum(q[..., None, :] * k, axis=-1)
    return jnp.einsum("bkgld,bnkd->bkgln", q, k)


def _weighted_sum(p, v):
    """Σ_a p_a v_a (b, h_kv, group, l, dv)."""
    if p.shape[2] * p.shape[3] == 1:
        v = v.transpose(0, 2, 1, 3)[:, :, None, None]
        return jnp.sum(p[..., None] * v, axis=-2)
    return jnp.einsum("bkgln,bnkd->bkgld", p, v)
