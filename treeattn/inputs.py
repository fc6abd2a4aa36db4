"""The arguments of an attention call, gathered and checked.

The numbers in arrays (lengths, the scale) are checked at every call, before a jitted function is
entered. Shapes, and most dtypes, are checked while the function is traced.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from treeattn.checks import (
    Array,
    accumulation_dtype,
    as_array,
    as_integers,
    bounded,
    check_floating,
    check_keys,
    check_rank,
    check_scale,
    check_shape,
    namespace,
)

Scale = float | int | Float[Array, ""] | None  # None: 1/√head_dim

# The arguments of an attention, in all signatures: b texts, of l queries and n keys each; h query
# heads, a multiple of the h_kv key heads. Query head i reads key head i // (h // h_kv).
Queries = Float[Array, "b l h d"]
Keys = Float[Array, "b n h_kv d"]
Values = Float[Array, "b n h_kv dv"]
Mask = Bool[Array, "..."] | None  # broadcasts to (b, h, l, n)
Bias = Float[Array, "..."] | None
Lengths = Integer[Array, " b"] | Integer[Array, ""] | int | np.integer | None
Output = Float[jax.Array, "b l h dv"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of an attention call, as a pytree; the last three are no leaves.

    q:          (b, l, h, d); k (b, n, h_kv, d) and v (b, n, h_kv, dv), of one dtype, which may
                differ from the queries'
    mask, bias: (b, h, l, n), any of them 1 to broadcast; or None
    lengths:    (b,) int32, for each text how many of its keys are in use, 0 … n; or None
    traced_scale: a scale that the caller gave as a JAX scalar, or None. Not static, so a new value
                compiles no new program
    scale:      a scale that is a number, compiled into the program; 1 if there is a traced one
    causal:     whether query i sees keys 0 … i only
    may_split:  whether XLA may split the arrays over devices by itself; not where each device runs
                the program on arrays of its own
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    lengths: Any = None
    traced_scale: Any = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    may_split: bool = dataclasses.field(default=False, metadata={"static": True})

    def replace(self, **changes) -> "Inputs":
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    @property
    def dtype(self):
        """The dtype of scores and sums."""
        return accumulation_dtype(self.q, self.k)

    @property
    def total_scale(self):
        """What multiplies q·k: `scale`, or `traced_scale` if there is one."""
        return self.scale if self.traced_scale is None else self.traced_scale.astype(self.dtype)


def gather_inputs(q, k, v, mask, bias, kv_lengths, scale, causal=False, may_split=False) -> Inputs:
    """The `Inputs`. Values of lengths and scale are checked here, because a trace cannot see them.

    `check_inputs` checks shapes and dtypes while the function is traced.
    """
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    mask = None if mask is None else _with_four_axes("mask", mask)
    bias = None if bias is None else _with_four_axes("bias", bias)
    if kv_lengths is not None:
        kv_lengths = as_integers("kv_lengths", kv_lengths)
        if kv_lengths.ndim == 0 and q.ndim:
            kv_lengths = namespace(kv_lengths).broadcast_to(kv_lengths, q.shape[:1])
        n = k.shape[1] if k.ndim > 1 else 0
        kv_lengths = bounded("kv_lengths", kv_lengths, 0, n, f"0 to kv_len = {n} keys")
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.ndim and q.shape[-1] else 1.0
    else:
        scale = check_scale(scale, 0, accumulation_dtype(q, k))
    scales = (scale, 1.0) if isinstance(scale, jax.Array) else (None, float(scale))
    return Inputs(q, k, v, mask, bias, kv_lengths, *scales, bool(causal), may_split)


def _with_four_axes(name: str, x) -> Array:
    """A mask or bias with leading axes of 1 added, as NumPy broadcasts."""
    x = as_array(name, x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def check_inputs(inputs: Inputs) -> None:
    """Raise the TypeError or ValueError that `attend` documents, naming the argument."""
    q, k, v = inputs.q, inputs.k, inputs.v
    check_floating(q=q)
    check_keys(k=k, v=v)
    check_rank(4, "(batch, length, heads, head_dim)", q=q, k=k, v=v)
    b, l, h, d = q.shape
    n, h_kv = k.shape[1:3]
    if d == 0:
        raise ValueError(f"q: expected a head_dim of at least 1, got shape {q.shape}")
    check_shape((b, n, h_kv, d), k=k)
    check_shape((*k.shape[:3], v.shape[3]), v=v)
    if h_kv == 0 or h % h_kv:
        raise ValueError(
            f"q: expected (batch, q_len, heads, head_dim), its heads a multiple of k's {h_kv}, "
            f"got {q.shape}"
        )
    if inputs.causal and l != n:
        text = f"q: causal attention expects as many queries as keys, {n}, got {l}"
        if l < n:
            text += f"; for the last {l} tokens pass mask=jnp.tri({l}, {n}, {n - l}, dtype=bool)"
        raise ValueError(text)
    if inputs.mask is not None and inputs.mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask: expected booleans, got dtype {inputs.mask.dtype}: use .astype(bool), or "
            "pass what is added to the scores as bias="
        )
    if inputs.bias is not None:
        check_floating(bias=inputs.bias)
    target = b, h, l, n
    for name, x in (("mask", inputs.mask), ("bias", inputs.bias)):
        if x is None:
            continue
        if x.ndim != 4 or any(x.shape[i] not in (1, target[i]) for i in range(4)):
            layout = "(batch, heads, q_len, kv_len)"
            raise ValueError(
                f"{name}: expected a shape that broadcasts to {layout} = {target}, got {x.shape}"
            )
    if inputs.lengths is not None:
        check_shape((b,), kv_lengths=inputs.lengths)


def pad_axis(x: Array, axis: int, size: int) -> Array:
    """`x` with zeros (or False) at the end of `axis`, up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def visible_keys(inputs: Inputs, position):
    """True where a query sees a key; broadcasts to (b, h_kv, group, l, n).

    position: (n,) each key's index in its text, which is compared with the lengths and, if causal,
              with the queries' indices

    Returns None without mask, bias, lengths and causal order: every query sees every key.
    """
    conditions = []
    if inputs.mask is not None:
        conditions.append(by_key_head(inputs.mask, inputs.k.shape[2]))
    if inputs.bias is not None:
        conditions.append(by_key_head(inputs.bias, inputs.k.shape[2]) != -jnp.inf)
    if inputs.lengths is not None:
        lengths = inputs.lengths[:, None, None, None, None]
        conditions.append(position[None, None, None, None] < lengths)
    if inputs.causal:  # there are as many queries as keys
        query = jnp.arange(inputs.k.shape[1], dtype=jnp.int32)[:, None]
        conditions.append((position[None] <= query)[None, None, None])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def unused_keys(visible):
    """True for keys that no query of their head sees: (b, n, h_kv, 1), in the layout of the keys.

    An axis has size 1 if no condition depends on it, and broadcasts.
    """
    return jnp.moveaxis(~visible.any(axis=(2, 3)), 1, 2)[..., None]


def by_query(x):
    """`x` (b, h_kv, group, l, …) as (b, l, h, …), the layout of queries."""
    b, h_kv, group, l, *rest = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(b, l, h_kv * group, *rest)


def by_key_head(x, h_kv: int):
    """`x` (b, h, l, n) as (b, h_kv, group, l, n); (b, 1, 1, l, n) if one entry is for all heads."""
    heads = (1, 1) if x.shape[1] == 1 else (h_kv, x.shape[1] // h_kv)
    return x.reshape(len(x), *heads, *x.shape[2:])
