"""Tree Attention: a cache sharded over devices, its shards' states merged across the mesh.

Each device attends to its own keys and values; only the states travel, whose size does not
depend on the length of the context. (v1 §5.2, Algorithm 3; v2 §5.2, Algorithm 3.)
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from treeattn.arrays import Array
from treeattn.local import attend, check_attend_inputs
from treeattn.state import AttentionState, finalize, rescale

METHODS = ("allreduce",)


def merge_across(
    state: AttentionState, axis_name: str | tuple[str, ...], *, method: str = "allreduce"
) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along the axis, on every device.

    method: "allreduce": Algorithm 3 (v2): the global pivot by a maximum, then two sums.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    m = jax.lax.pmax(jax.lax.stop_gradient(state.max), axis_name)
    _, d, n = rescale(state, m)
    return AttentionState(m, jax.lax.psum(d, axis_name), jax.lax.psum(n, axis_name))


def tree_decode(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    kv_lengths: Int[Array, " b"] | None = None,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    scale: float | None = None,
    method: str = "allreduce",
    implementation: str | None = None,
    return_lse: bool = False,
):
    """Attention of q, present on every device, over keys and values sharded along `axis`.

    Layouts, mask, bias, kv_lengths and scale are those of `attend`. The keys are dealt to the
    devices in contiguous shards; kv_len need not divide by their number, and may be smaller.
    method is that of `merge_across`, implementation that of `attend`.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), the natural
    logarithm of the sum of exponentials, in float32 or wider.

    Raises ValueError for an axis that the mesh lacks, an unknown method, and whatever `attend`
    refuses.
    """
    check_attend_inputs(q, k, v, mask, bias, kv_lengths)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(f"axis: the mesh has axes {mesh.axis_names}, not {name!r}")
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    out, lse = _tree_decode(
        q,
        k,
        v,
        kv_lengths,
        mask,
        bias,
        scale,
        mesh=mesh,
        axes=axes,
        method=method,
        implementation=implementation,
    )
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames=("mesh", "axes", "method", "implementation"))
def _tree_decode(q, k, v, kv_lengths, mask, bias, scale, *, mesh, axes, method, implementation):
    (b, n), p = k.shape[:2], 1
    for name in axes:
        p *= mesh.shape[name]
    t = -(-n // p)  # keys a device, v1's t = N/p rounded up

    def pad_keys(x, axis):
        if x is None or x.shape[axis] != n or n == p * t:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, p * t - n)
        return jnp.pad(x, widths)

    if n != p * t and kv_lengths is None:  # the padding is no key
        kv_lengths = jnp.full(b, n, jnp.int32)
    k, v = pad_keys(k, 1), pad_keys(v, 1)
    mask, bias = pad_keys(mask, -1), pad_keys(bias, -1)

    def along_keys(x):
        sharded = x is not None and x.shape[-1] == p * t
        return P(None, None, None, axes) if sharded else P()

    def shard(q, k, v, kv_lengths, mask, bias, scale):
        if kv_lengths is not None:  # in this shard, which starts at key rank · t
            kv_lengths = jnp.clip(kv_lengths - jax.lax.axis_index(axes) * t, 0, t)
        state = attend(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            kv_lengths=kv_lengths,
            scale=scale,
            implementation=implementation,
        )
        out, lse = finalize(merge_across(state, axes, method=method))
        return out.astype(q.dtype), lse

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(P(), P(None, axes), P(None, axes), P(), along_keys(mask), along_keys(bias), P()),
        out_specs=(P(), P()),
    )(q, k, v, kv_lengths, mask, bias, scale)
