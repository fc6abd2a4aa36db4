"""What an attention is given: checked, promoted and completed once, where it comes in."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from treeattn.idea.arrays import (
    Array,
    accumulation_dtype,
    as_array,
    bounded,
    check_broadcasts,
    check_floating,
    check_integers,
    check_rank,
    check_same_dtype,
    check_scale,
)

_static = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one attention. A pytree: its arrays are leaves, the rest is static.

    q:          (b, l, h, d); k (b, n, h_kv, d) and v (b, n, h_kv, dv), of one dtype
    mask, bias: (b, h, l, n), an axis being 1 where all share an entry; or None
    lengths:    (b,) int32 in 0 … n: only the first keys of a row count; or None
    factor:     a scalar array: a scale whose value is not compiled in; or None
    scale:      the scores are scale · factor · q·k
    causal:     whether query i sees keys 0 … i only
    implementation: the name of what runs it
    elsewhere:  the name of what runs it unless the compiler finds that it compiles for CUDA; None
                where the devices are known, and `implementation` runs it on all
    by_row:     whether rows with lengths of their own are computed one after another, so that a
                short row does not read the blocks of a long one
    stale:      whether keys and values that no query sees may be NaN or ∞, as memory never
                written may: then they count as 0. False for a cache that begins as zeros
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    lengths: Any = None
    factor: Any = None
    scale: float = _static(default=1.0)
    causal: bool = _static(default=False)
    implementation: str = _static(default="blockwise")
    elsewhere: str | None = _static(default=None)
    by_row: bool = _static(default=True)
    stale: bool = _static(default=True)

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """All of the arrays."""
        return self.q, self.k, self.v, self.mask, self.bias, self.lengths, self.factor

    def replace(self, **changes) -> "Inputs":
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    @property
    def state_shape(self) -> tuple[tuple[int, ...], int, jnp.dtype]:
        """((b, l, h), dv, dtype) of the state: the arguments of `AttentionState.identity`."""
        return self.q.shape[:3], self.v.shape[-1], accumulation_dtype(self.q)


def check_inputs(
    q, k, v, mask=None, bias=None, kv_lengths=None, scale=None, *, causal: bool = False
) -> Inputs:
    """The `Inputs`, or the TypeError or ValueError that `attend` documents, naming the argument."""
    check_floating(q=q, k=k, v=v)
    check_same_dtype(q=q, k=k, v=v)
    check_rank(4, "(batch, length, heads, head_dim)", q=q, k=k, v=v)
    b, l, h, d = q.shape
    n, h_kv = k.shape[1:3]
    if d == 0:
        raise ValueError(f"q: expected a head_dim of at least 1, got shape {q.shape}")
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
    if causal and l != n:
        raise ValueError(f"q: causal attention expects as many queries as keys, {n}, got {l}")
    if mask is not None:
        mask = as_array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask: expected booleans, got dtype {mask.dtype}")
        check_broadcasts("mask", mask, (b, h, l, n), "(batch, heads, q_len, kv_len)")
    if bias is not None:
        bias = as_array("bias", bias)
        check_floating(bias=bias)
        check_broadcasts("bias", bias, (b, h, l, n), "(batch, heads, q_len, kv_len)")
    scale = check_scale(scale, d, accumulation_dtype(q))
    factor = None
    if isinstance(scale, jax.Array):  # traced or not: no program for each value
        scale, factor = 1.0, scale
    scale = float(scale)
    return Inputs(q, k, v, mask, bias, _lengths(kv_lengths, b, n), factor, scale, causal)


def _lengths(kv_lengths, b: int, n: int) -> Array | None:
    """int32 in 0 … n, or the error that names what is wrong; clipped where they are traced."""
    if kv_lengths is None:
        return None
    kv_lengths = as_array("kv_lengths", kv_lengths)
    check_integers(kv_lengths=kv_lengths)
    if kv_lengths.shape != (b,):
        raise ValueError(f"kv_lengths: expected shape ({b},), one a row, got {kv_lengths.shape}")
    return bounded("kv_lengths", kv_lengths, 0, n, f"0 to kv_len = {n} keys")
