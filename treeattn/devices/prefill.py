"""Prefill with the sequence sharded: the queries of a whole prompt, dealt out like its keys.

Tree decoding has one query that every device can hold; a prompt has as many queries as keys.
`ring_attention` lets the keys visit the queries, `ulysses_attention` trades shards of the
sequence for shards of the heads.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from treeattn.devices.shards import (
    Layout,
    check_call,
    count_devices,
    no_keys,
    over_shards,
    own_lengths,
    pass_on,
)
from treeattn.idea.arrays import Array, pad_axis
from treeattn.idea.state import finalize, merge
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.inputs import Inputs


def ring_attention(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    causal: bool = True,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
) -> Float[Array, "b l h dv"]:
    """Ring Attention with the queries sharded like the keys: prefill (Liu et al. 2023).

    Every device keeps its queries and sees all shards of the cache pass. With `causal`, query
    i sees keys 0 … i, and a device skips the shards that lie after its queries. The result is
    sharded along its length. Without `causal`, q may be of another length than k.
    batch_axis and head_axis are `tree_decode`'s, and as important where nobody can see how the
    arrays lie.

    Raises ValueError for a causal q whose length is not k's, an axis that the mesh lacks, and
    whatever `attend` refuses.
    """
    inputs, layout = check_call(
        q, k, v, mesh, axis, scale=scale, causal=causal, implementation=implementation,
        batch_axis=batch_axis, head_axis=head_axis,
    )  # fmt: skip
    return _prefill(inputs, on_device=_ring, layout=layout)


def ulysses_attention(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    causal: bool = True,
    scale: float | Float[Array, ""] | None = None,
    implementation: str | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
) -> Float[Array, "b l h dv"]:
    """Prefill by two all-to-alls: shards of the sequence become shards of the heads, and back.

    Each device attends over the whole sequence for h / p heads (Jacobs et al. 2023, DeepSpeed
    Ulysses). When p does not divide the key heads, they are repeated just as often as needed.
    Same arguments and result as `ring_attention`; with head_axis, h and p are those of one of its
    devices.

    Raises ValueError when p does not divide the query heads, and as `ring_attention` does.
    """
    inputs, layout = check_call(
        q, k, v, mesh, axis, scale=scale, causal=causal, implementation=implementation,
        batch_axis=batch_axis, head_axis=head_axis,
    )  # fmt: skip
    p, groups = count_devices(mesh, layout.axes), count_devices(mesh, layout.heads)
    h, kv_heads = q.shape[2] // groups, k.shape[2] // groups  # of a device along the heads
    if h % p:
        raise ValueError(f"q: expected heads that {p} devices can share evenly, got {h}")
    repeats = p // math.gcd(p, kv_heads)
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    return _prefill(inputs.replace(k=k, v=v), on_device=_ulysses, layout=layout)


@functools.partial(jax.jit, static_argnames=("on_device", "layout"))
def _prefill(inputs: Inputs, *, on_device, layout: Layout):
    """on_device(inputs, rank, axes), with shards of the queries and the keys, to one of `out`."""
    axes, (b, l), n = layout.axes, inputs.q.shape[:2], inputs.k.shape[1]
    p = count_devices(layout.mesh, axes)
    q, k, v = (pad_axis(x, 1, p * -(-x.shape[1] // p)) for x in (inputs.q, inputs.k, inputs.v))
    # Padded keys come after all real queries, so causality hides them as well.
    whole = inputs.causal or k.shape[1] == n
    lengths = None if whole else jnp.full(b, n, jnp.int32)
    inputs = inputs.replace(q=q, k=k, v=v, lengths=lengths)
    along = layout.spec(axes)
    specs = inputs.replace(q=along, k=along, v=along, lengths=layout.rows(), factor=P())

    def body(rank, inputs):
        return on_device(inputs, rank, axes)

    mapped = over_shards(body, layout.mesh, axes, (specs,), along, left=layout.left)
    return mapped(inputs)[:, :l]


def _ring(inputs: Inputs, rank, axes):
    """A shard of `out` (b, ⌈l/p⌉, h, dv), from those of q (b, ⌈l/p⌉, h, d), k and v (b, t, …)."""
    p, skip = jax.lax.axis_size(axes), no_keys(inputs)

    def whole(shard, owner):
        inside = inputs.replace(k=shard[0], v=shard[1], causal=False)
        return attend_inputs(own_lengths(inside, owner))

    def diagonal(shard, owner):
        return attend_inputs(inputs.replace(k=shard[0], v=shard[1]))

    def see(state, shard, step):
        owner = (rank - step) % p
        if not inputs.causal:
            return merge(state, whole(shard, owner))
        case = jnp.sign(owner - rank) + 1  # 0 earlier keys, 1 the queries' own, 2 later ones
        branches = (whole, diagonal, lambda *_: skip)
        return merge(state, jax.lax.switch(case, branches, shard, owner))

    def visit(carry, step):
        state, shard = carry
        arriving = pass_on(shard, axes)
        return (see(state, shard, step), arriving), None

    start = skip, (inputs.k, inputs.v)
    (state, shard), _ = jax.lax.scan(visit, start, jnp.arange(p - 1))
    return finalize(see(state, shard, p - 1))[0].astype(inputs.q.dtype)


def _ulysses(inputs: Inputs, rank, axes):
    """As `_ring`; in between, all queries and keys of h/p heads, (b, p·⌈l/p⌉, h/p, d)."""
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axes, tiled=True)
    q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (inputs.q, inputs.k, inputs.v))
    out = finalize(attend_inputs(inputs.replace(q=q, k=k, v=v)))[0]
    return exchange(out.astype(q.dtype), split_axis=1, concat_axis=2)
