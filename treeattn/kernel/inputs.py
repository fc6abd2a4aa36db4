"""What an attention is given: checked, promoted and completed once, where it comes in."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int8, Integer

from treeattn.idea.arrays import (
    Array,
    accumulation_dtype,
    as_array,
    bounded,
    check_broadcasts,
    check_ends,
    check_floating,
    check_integers,
    check_nodes,
    check_rank,
    check_same_dtype,
    check_scale,
)
from treeattn.kernel.quantized import Scales, check_shape, need_scales

# The arguments of an attention, in all signatures: b rows, of l queries and n keys each; h query
# heads, a multiple of the h_kv key heads. Query head i reads key head i // (h // h_kv). Of a mask
# and a bias, an axis may be 1.
Queries = Float[Array, "b l h d"]
Keys = Float[Array, "b n h_kv d"] | Int8[Array, "b n h_kv d"]
Values = Float[Array, "b n h_kv dv"] | Int8[Array, "b n h_kv dv"]
Mask = Bool[Array, "#b #h #l #n"]
Bias = Float[Array, "#b #h #l #n"]
Lengths = Integer[Array, " b"]
Ends = Integer[Array, "b n"]
DealtEnds = Integer[Array, "b nodes"]  # of trees whose nodes stand at the places of `Nodes`
Nodes = Integer[Array, " n"]
Output = Float[Array, "b l h dv"]

# What computes it: a name, a kernel of one's own (`treeattn.kernel.hook`), or None for the best.
Implementation = str | Callable | None

NOBODY = np.iinfo(np.int32).max  # the number of a place without a node: it sees no key

_static = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intervals:
    """Trees in depth-first order instead of a mask: query i sees key j where j ≤ i < ends[j].

    queries: (l,) int32 the numbers of the queries' nodes; NOBODY for one that is none
    keys:    (n,) int32 the numbers of the keys' nodes, in any order
    ends:    (b, n) int32 where each key's subtree ends; 0 for one that nobody sees
    """

    queries: Any
    keys: Any
    ends: Any

    def replace(self, **changes) -> "Intervals":
        """The same with other fields."""
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one attention. A pytree: its arrays are leaves, the rest is static.

    q:          (b, l, h, d); k (b, n, h_kv, d) and v (b, n, h_kv, dv), of one dtype; k and v in 8
                bits where there are scales
    mask, bias: (b, h, l, n), an axis being 1 where all share an entry; or None
    lengths:    (b,) int32 in 0 … n: only the first keys of a row count; or None
    intervals:  who sees whom in a tree; or None
    factor:     the part of the scale that comes as an array, (), so that its value is not
                compiled in; None where all of it is in `scale`
    key_scale, value_scale: (b, n, h_kv), or (b, 1, h_kv) where all tokens share one; or None
    scale:      the part that is a number: the scores are scale · factor · q·k
    causal:     whether query i sees keys 0 … i only
    implementation: the name of what runs it, or a function of one's own
    elsewhere:  the name of what runs it unless the compiler finds that it compiles for CUDA; None
                where the devices are known, and `implementation` runs it on all
    on_cuda:    whether the program is known to be one for CUDA: then no kernel is interpreted
    by_row:     whether rows with lengths of their own are computed one after another, so that a
                row of 10 keys does not read the blocks of one of 10,000
    stale:      whether keys and values past `lengths`, or hidden from all, may be NaN or ∞, as
                memory never written may: they are then replaced by 0. False for a cache that
                begins as zeros
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    lengths: Any = None
    factor: Any = None
    intervals: Any = None
    key_scale: Any = None
    value_scale: Any = None
    scale: float = _static(default=1.0)
    causal: bool = _static(default=False)
    implementation: Implementation = _static(default="blockwise")  # noqa: RUF009
    elsewhere: str | None = _static(default=None)
    on_cuda: bool = _static(default=False)
    by_row: bool = _static(default=True)
    stale: bool = _static(default=True)

    @property
    def arrays(self) -> tuple:  # JAX hands a constant on in a class of its own
        """All of the arrays but those of intervals, and scales of keys and values."""
        return self.q, self.k, self.v, self.mask, self.bias, self.lengths, self.factor

    @property
    def quantized(self) -> bool:
        """Whether keys and values are numbers in 8 bits with scales."""
        return self.key_scale is not None

    def replace(self, **changes) -> "Inputs":
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    @property
    def state_shape(self) -> tuple[tuple[int, ...], int, jnp.dtype]:
        """((b, l, h), dv, dtype) of the state: the arguments of `AttentionState.identity`."""
        return self.q.shape[:3], self.v.shape[-1], accumulation_dtype(self.q)


class NewKeys(NamedTuple):
    """A few keys more, which lie elsewhere: those of tokens that are in no cache yet.

    k:       (b, m, h_kv, d), and v (b, m, h_kv, dv), of the queries' dtype
    mask:    (b, h, l, m) who sees which of them, an axis being 1 where all share an entry; or None
    lengths: (b,) int32 in 0 … m: only the first so many of a row count; or None
    """

    k: Any
    v: Any
    mask: Any = None
    lengths: Any = None

    def inputs(self, inputs: Inputs) -> Inputs:
        """Those of the attention to these keys alone, of the same queries and scale."""
        own = {"k": self.k, "v": self.v, "mask": self.mask, "lengths": self.lengths}
        return inputs.replace(**own, bias=None, intervals=None, causal=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """The same as the loop over blocks reads it: heads grouped by the key head that they read.

    q:          (b, h_kv, group, l, d), scaled, in the accumulation dtype; group is h // h_kv
    k, v:       (b, n, h_kv, d) and (b, n, h_kv, dv), as they came
    mask, bias: (b, h_kv, group, l, n), an axis being 1 where all share an entry; or None
    lengths:    (b,) int32; or None
    intervals:  as in `Inputs`
    key_scale, value_scale: (b, n, h_kv, 1), or (b, 1, h_kv, 1), as keys and values lie, in the
                accumulation dtype; or None
    by_row, stale: as in `Inputs`
    partitioned: whether XLA may deal the program over devices by itself
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    lengths: Any
    intervals: Any
    key_scale: Any
    value_scale: Any
    by_row: bool = _static()
    stale: bool = _static()
    partitioned: bool = _static()

    @property
    def arrays(self) -> tuple:
        """All of the arrays but those of intervals."""
        scales = self.key_scale, self.value_scale
        return self.q, self.k, self.v, self.mask, self.bias, self.lengths, *scales

    @property
    def hides(self) -> bool:
        """Whether there may be a key that somebody does not see."""
        return not (self.mask is self.bias is self.lengths is self.intervals is None)

    def replace(self, **changes) -> "Grouped":
        """The same with other fields."""
        return dataclasses.replace(self, **changes)


def check_inputs(
    q,
    k,
    v,
    mask=None,
    bias=None,
    kv_lengths=None,
    scale=None,
    *,
    causal: bool = False,
    ends=None,
    nodes=None,
    key_scale: Scales | None = None,
    value_scale: Scales | None = None,
) -> Inputs:
    """The `Inputs`, or the TypeError or ValueError that `attend` documents, naming the argument.

    nodes: which node of the tree stands at each place of q, k and v, as `deal_tree` returns them;
           None where they stand in order
    """
    scales = _check_queries_and_keys(q, k, v, causal, key_scale, value_scale)
    b, l, h, d = q.shape
    n = k.shape[1]
    layout = "(batch, heads, q_len, kv_len)"
    if mask is not None:
        mask = as_array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask: expected booleans, got dtype {mask.dtype}")
        check_broadcasts("mask", mask, (b, h, l, n), layout)
    if bias is not None:
        bias = as_array("bias", bias)
        check_floating(bias=bias)
        check_broadcasts("bias", bias, (b, h, l, n), layout)
    scale = check_scale(scale, d, accumulation_dtype(q))
    factor = None
    if isinstance(scale, jax.Array):  # traced or not: no program for each value
        factor = scale
        scale = 1.0
    lengths = _check_lengths(kv_lengths, b, n)
    intervals = None
    if nodes is not None and ends is None:
        raise ValueError("nodes: expected ends beside them, which say who sees whom")
    if ends is not None:
        if scales is not None:
            raise ValueError("ends: trees are of float keys, and take no key_scale; use mask")
        if mask is not None or bias is not None:
            raise ValueError("ends: say who sees whom, and take neither mask nor bias beside them")
        intervals = _check_ends(ends, b, l, n, lengths, nodes)
        lengths = None
        causal = False  # every interval begins with its own node
    scales = (None, None) if scales is None else scales
    return Inputs(q, k, v, mask, bias, lengths, factor, intervals, *scales, float(scale), causal)


def _check_queries_and_keys(q, k, v, causal: bool, key_scale, value_scale):
    """(key_scale, value_scale) as `Inputs` has them, or None where there are none.

    Raises the TypeError or ValueError that names what does not fit.
    """
    check_floating(q=q)
    quantized = need_scales(as_array("k", k), as_array("v", v), key_scale, value_scale)
    if quantized:
        check_same_dtype(k=k, v=v)
    else:
        check_floating(k=k, v=v)
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
    if not quantized:
        return None
    given = {"key_scale": key_scale, "value_scale": value_scale}
    checked = (check_shape(name, x, (b, n, h_kv)) for name, x in given.items())
    return tuple(jnp.broadcast_to(x, (b, x.shape[1], h_kv)) for x in checked)


def _check_lengths(kv_lengths, b: int, n: int) -> Array | None:
    """int32 in 0 … n, or the error that names what is wrong; clipped where they are traced."""
    if kv_lengths is None:
        return None
    kv_lengths = as_array("kv_lengths", kv_lengths)
    check_integers(kv_lengths=kv_lengths)
    if kv_lengths.shape != (b,):
        raise ValueError(f"kv_lengths: expected shape ({b},), one a row, got {kv_lengths.shape}")
    return bounded("kv_lengths", kv_lengths, 0, n, f"0 to kv_len = {n} keys")


def _check_ends(ends, b: int, l: int, n: int, lengths, nodes) -> Intervals:
    """The intervals of trees of n nodes, of which `lengths` count, or the error that names them.

    With `nodes` the trees have as many as `ends` says, dealt over n places.
    """
    ends = as_array("ends", ends)
    check_integers(ends=ends)
    if l != n:
        raise ValueError(f"q: with ends, expected as many queries as keys, {n}, got {l}")
    if nodes is not None:
        check_rank(2, "(batch, nodes)", ends=ends)
        return _dealt(ends, b, n, nodes)
    if ends.shape != (b, n):
        raise ValueError(f"ends: expected shape (batch, kv_len) = ({b}, {n}), got {ends.shape}")
    ends = check_ends(ends)
    nodes = jnp.arange(n, dtype=jnp.int32)
    if lengths is not None:  # nobody sees the others, not even they themselves
        ends = jnp.where(nodes < lengths[:, None], ends, 0)
    return Intervals(nodes, nodes, ends)


def _dealt(ends, b: int, places: int, nodes) -> Intervals:
    """The intervals of trees whose nodes stand at these places."""
    if len(ends) != b:
        raise ValueError(f"ends: expected shape (batch, nodes) = ({b}, …), got {ends.shape}")
    nodes = check_nodes(nodes, ends.shape[1])
    if nodes.shape != (places,):
        raise ValueError(f"nodes: expected q's {places} places, got {len(nodes)}")
    ends = jnp.pad(check_ends(ends), ((0, 0), (0, 1)))[:, nodes]  # of place −1 the added one, 0
    numbers = jnp.where(nodes < 0, NOBODY, nodes)
    return Intervals(numbers, numbers, ends)
