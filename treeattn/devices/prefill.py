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

from treeattn.devices.ring import empty_state, pass_on
from treeattn.devices.shards import (
    Shard,
    attend_shard,
    check_implementation,
    count_devices,
    mesh_axes,
    pad_axis,
)
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, merge
from treeattn.kernel import flash
from treeattn.kernel.attend import attend, check_attend_inputs

_STATIC = ("scale", "mesh", "axes", "causal", "implementation")
CAUSAL_BLOCK = 128  # queries under one mask, at most: half of the scores under it are hidden


def attend_causal(q, k, v, *, scale: float, implementation: str | None = None) -> AttentionState:
    """`attend` where query i sees keys 0 … i, of as many keys as queries.

    The text is halved until its parts are short. Each part sees itself under a mask. On the way
    back up, the second of two neighbours sees all of the first, and the states merge: a tree over
    the text, which computes few of the scores that causality hides.
    """
    if flash.resolve(implementation, q, k, v) == "flash":
        return flash.flash_attend(q, k, v, None, scale, causal=True)
    (b, l), parts = q.shape[:2], 1
    while parts * CAUSAL_BLOCK < l:
        parts *= 2
    size = -(-l // parts)
    q, k, v = (pad_axis(x, 1, parts * size) for x in (q, k, v))  # padded keys come last: unseen
    see = functools.partial(attend, scale=scale, implementation="blockwise")
    mask = jnp.tri(size, dtype=bool)[None, None]
    state = see(*_split((q, k, v), b * parts, size), mask=mask)
    while parts > 1:
        parts, size = parts // 2, size * 2
        state, q, k, v = _split((state, q, k, v), b * parts, size)
        second = merge(see(_half(q, 1), _half(k, 0), _half(v, 0)), _half(state, 1))
        state = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), _half(state, 0), second)
    return jax.tree.map(lambda x: x[:, :l], state)


def _split(tree, rows: int, size: int):
    """Rows of a text as more, or fewer, of `size` tokens: (b, l, …) -> (rows, size, …)."""
    return jax.tree.map(lambda x: x.reshape(rows, size, *x.shape[2:]), tree)


def _half(tree, which: int):
    return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[which], tree)


def ring_attention(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "b l h dv"]:
    """Ring Attention with the queries sharded like the keys: prefill (Liu et al. 2023).

    Every device keeps its queries and sees all shards of the cache pass. With `causal`, query
    i sees keys 0 … i, and a device skips the shards that lie after its queries. The result is
    sharded along its length. Without `causal`, q may be of another length than k.

    Raises ValueError for a causal q whose length is not k's, an axis that the mesh lacks, and
    whatever `attend` refuses.
    """
    axes = _check_prefill(q, k, v, mesh, axis, causal, implementation)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _ring_attention(
        q, k, v, scale=scale, mesh=mesh, axes=axes, causal=causal, implementation=implementation
    )


def _check_prefill(q, k, v, mesh, axis, causal, implementation) -> tuple[str, ...]:
    check_attend_inputs(q, k, v)
    check_implementation(mesh, implementation)
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q: causal attention expects as many queries as keys, {k.shape[1]}, got {q.shape[1]}"
        )
    return mesh_axes(mesh, axis)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _ring_attention(q, k, v, *, scale, mesh, axes, causal, implementation):
    p = count_devices(mesh, axes)
    (b, l), n = q.shape[:2], k.shape[1]
    t = -(-n // p)
    lengths = None if n == p * t else jnp.full(b, n, jnp.int32)
    options = {"scale": scale, "implementation": implementation}

    def body(q, k, v):
        rank = jax.lax.axis_index(axes)
        state = empty_state(q, v.shape[-1], k)
        skip = state

        def whole(shard, owner):
            return attend_shard(q, shard, owner, kv_lengths=lengths, **options)

        def diagonal(shard, owner):
            # Padded keys come after all real queries, so causality hides them as well.
            return attend_causal(q, shard.k, shard.v, **options)

        def see(state, shard, step):
            owner = (rank - step) % p
            if not causal:
                return merge(state, whole(shard, owner))
            case = jnp.sign(owner - rank) + 1  # 0 earlier keys, 1 the queries' own, 2 later ones
            branches = (whole, diagonal, lambda *_: skip)
            return merge(state, jax.lax.switch(case, branches, shard, owner))

        def visit(carry, step):
            state, shard = carry
            arriving = pass_on(shard, axes, p)
            return (see(state, shard, step), arriving), None

        shard = Shard(k, v, None, None)
        (state, shard), _ = jax.lax.scan(visit, (state, shard), jnp.arange(p - 1))
        return finalize(see(state, shard, p - 1))[0].astype(q.dtype)

    spec = P(None, axes)
    q, k, v = pad_axis(q, 1, p * -(-l // p)), pad_axis(k, 1, p * t), pad_axis(v, 1, p * t)
    out = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )(q, k, v)
    return out[:, :l]


def ulysses_attention(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...],
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "b l h dv"]:
    """Prefill by two all-to-alls: shards of the sequence become shards of the heads, and back.

    Each device attends over the whole sequence for h / p heads (Jacobs et al. 2023, DeepSpeed
    Ulysses). When p does not divide the key heads, they are repeated just as often as needed.
    Same arguments and result as `ring_attention`.

    Raises ValueError when p does not divide the query heads, and as `ring_attention` does.
    """
    axes = _check_prefill(q, k, v, mesh, axis, causal, implementation)
    p, h = count_devices(mesh, axes), q.shape[2]
    if h % p:
        raise ValueError(f"q: expected heads that {p} devices can share evenly, got {h}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _ulysses(
        q, k, v, scale=scale, mesh=mesh, axes=axes, causal=causal, implementation=implementation
    )


@functools.partial(jax.jit, static_argnames=_STATIC)
def _ulysses(q, k, v, *, scale, mesh, axes, causal, implementation):
    p = count_devices(mesh, axes)
    (b, l), (n, h_kv) = q.shape[:2], k.shape[1:3]
    repeats = p // math.gcd(p, h_kv)
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))

    def body(q, k, v):
        q, k, v = (
            jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v)
        )
        options = {"scale": scale, "implementation": implementation}
        if causal:  # which hides the padded keys too
            state = attend_causal(q, k, v, **options)
        else:
            lengths = None if n == k.shape[1] else jnp.full(b, n, jnp.int32)
            state = attend(q, k, v, kv_lengths=lengths, **options)
        out = finalize(state)[0].astype(q.dtype)
        return jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)

    spec = P(None, axes)
    q, k, v = (pad_axis(x, 1, p * -(-x.shape[1] // p)) for x in (q, k, v))
    out = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )(q, k, v)
    return out[:, :l]
