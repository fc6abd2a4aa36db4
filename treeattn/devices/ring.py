"""What tree decoding is compared with: rings, chains of the same `merge` around the devices.

`ring_decode` passes the shards of the cache along (Liu et al. 2023; v1 §6.3), `pass_q_decode`
the queries and their states.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from treeattn.devices.shards import (
    attend_shard,
    check_implementation,
    count_devices,
    mesh_axes,
    over_shards,
    pad_axis,
)
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, merge
from treeattn.kernel.attend import check_attend_inputs, varying_like

_STATIC = ("scale", "mesh", "axes", "implementation")


def ring_decode(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    kv_lengths: Int[Array, " b"] | None = None,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
):
    """Ring Attention for decoding: every shard of the cache visits every device.

    The same arguments, result and errors as `tree_decode`. In each of p − 1 steps a device
    sends the shard it holds to its neighbour: 2·b·t·d_kv·(p − 1) elements from each device
    (v1 eq. 31–32 counts p steps; the last one would only bring the shards home).
    """
    return _decode(
        _ring_decode, q, k, v, mesh, axis, kv_lengths, mask, bias, scale, implementation, return_lse
    )


def pass_q_decode(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    kv_lengths: Int[Array, " b"] | None = None,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
):
    """A ring that moves the queries and their states ("pass-Q"); the cache stays where it is.

    The same arguments, result and errors as `tree_decode`. The queries are dealt to the
    devices along q_len; each share, with the state it has gathered, visits every device and
    comes home: p steps of b·⌈l/p⌉·h·(d + dv + 2) elements from each device, whatever the
    context. A single query is on one device only; the other shares travel empty.
    """
    return _decode(
        _pass_q, q, k, v, mesh, axis, kv_lengths, mask, bias, scale, implementation, return_lse
    )


def _decode(f, q, k, v, mesh, axis, kv_lengths, mask, bias, scale, implementation, return_lse):
    check_attend_inputs(q, k, v, mask, bias, kv_lengths)
    axes = mesh_axes(mesh, axis)
    check_implementation(mesh, implementation)
    out, lse = f(
        q,
        k,
        v,
        kv_lengths,
        mask,
        bias,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        mesh=mesh,
        axes=axes,
        implementation=implementation,
    )
    return (out, lse) if return_lse else out


def pass_on(tree, axes, p: int):
    """Everybody's `tree` goes to the next device around the ring."""
    to_next = [(i, (i + 1) % p) for i in range(p)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), tree)


def empty_state(q, dv: int, *like) -> AttentionState:
    """The identity for q's queries, as a loop's first carry."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    return varying_like(AttentionState.identity(q.shape[:-1], dv, dtype), q, *like)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _ring_decode(q, k, v, kv_lengths, mask, bias, *, scale, mesh, axes, implementation):
    p = count_devices(mesh, axes)
    attend_to = functools.partial(attend_shard, scale=scale, implementation=implementation)

    def body(q, shard, kv_lengths):
        rank = jax.lax.axis_index(axes)
        state = empty_state(q, v.shape[-1], shard.k)

        def visit(carry, step):
            state, shard = carry
            arriving = pass_on(shard, axes, p)  # under way while this device computes
            owner = (rank - step) % p
            state = merge(state, attend_to(q, shard, owner, kv_lengths=kv_lengths))
            return (state, arriving), None

        (state, shard), _ = jax.lax.scan(visit, (state, shard), jnp.arange(p - 1))
        last = attend_to(q, shard, (rank + 1) % p, kv_lengths=kv_lengths)
        out, lse = finalize(merge(state, last))
        return out.astype(q.dtype), lse

    return over_shards(body, q, k, v, kv_lengths, mask, bias, mesh=mesh, axes=axes, check=False)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _pass_q(q, k, v, kv_lengths, mask, bias, *, scale, mesh, axes, implementation):
    p = count_devices(mesh, axes)
    l = q.shape[1]
    share = -(-l // p)  # queries a device sends off
    n = k.shape[1]
    lengths = jnp.full(k.shape[0], n, jnp.int32) if kv_lengths is None else kv_lengths

    def of_share(x, start, axis=2):  # the share's rows of a mask or bias
        if x is None or x.shape[axis] == 1:
            return x
        padded = pad_axis(x, axis, p * share)
        return jax.lax.dynamic_slice_in_dim(padded, start, share, axis)

    def body(q, shard, lengths):
        rank = jax.lax.axis_index(axes)
        q = jax.lax.dynamic_slice_in_dim(pad_axis(q, 1, p * share), rank * share, share, 1)
        state = empty_state(q, v.shape[-1], shard.k)

        def visit(carry, step):
            q, state = carry
            start = (rank - step) % p * share  # the visiting queries' first row
            seen = shard._replace(
                mask=of_share(shard.mask, start), bias=of_share(shard.bias, start)
            )
            here = attend_shard(
                q,
                seen,
                rank,
                kv_lengths=jnp.where(start < l, lengths, 0),  # padding attends to nothing
                scale=scale,
                implementation=implementation,
            )
            return pass_on((q, merge(state, here)), axes, p), None

        (_, state), _ = jax.lax.scan(visit, (q, state), jnp.arange(p))
        out, lse = finalize(state)
        return out.astype(q.dtype), lse

    out, lse = over_shards(
        body,
        q,
        k,
        v,
        lengths,
        mask,
        bias,
        mesh=mesh,
        axes=axes,
        out_specs=P(None, axes),
        check=False,
    )
    return out[:, :l], lse[:, :l]
