"""Attention on one device: queries and keys in, an `AttentionState` out."""

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from treeattn.idea.arrays import (
    Array,
    check_broadcasts,
    check_floating,
    check_rank,
    check_same_dtype,
)
from treeattn.idea.state import AttentionState, finalize
from treeattn.kernel.blockwise import attend_blockwise, varying_like

__all__ = ["attend", "attend_blockwise", "attention", "check_attend_inputs", "varying_like"]


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
    from treeattn.kernel import flash  # it builds on this module

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
