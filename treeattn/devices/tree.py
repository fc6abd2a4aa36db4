"""Tree Attention: a cache sharded over devices, its shards' states merged across the mesh.

Each device attends to its own keys and values; only the states travel, whose size does not
depend on the length of the context. (v1 §5.2, Algorithm 3; v2 §5.2, Algorithm 3.)
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Bool, Float, Int

from treeattn.devices.shards import attend_shard, check_implementation, mesh_axes, over_shards
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, merge, reduce_tree, rescale
from treeattn.kernel.attend import check_attend_inputs


def merge_across(
    state: AttentionState, axis_name: str | tuple[str, ...], *, method: str = "allreduce"
) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' states along the axis, on every device.

    Several axes are a tree of trees: the last, innermost axis first, so that ("node", "device")
    merges within the nodes before anything crosses between them.

    method: "allreduce": Algorithm 3 (v2): one Allreduce for the pivot, two for the sums.
            "butterfly": recursive doubling. Each of log₂ p rounds swaps one packed state with
                         a partner and merges; two rounds more when p is no power of two. Every
                         device gets the same bits.
            "gather":    everybody gets all states, and merges them by itself.

    Raises ValueError for another method.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {tuple(METHODS)}, got {method!r}")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for axis in reversed(axes):
        state = METHODS[method](state, axis)
    return state


def _allreduce(state: AttentionState, axis: str) -> AttentionState:
    m = jax.lax.pmax(jax.lax.stop_gradient(state.max), axis)
    _, d, n = rescale(state, m)
    return AttentionState(m, jax.lax.psum(d, axis), jax.lax.psum(n, axis))


def _butterfly(state: AttentionState, axis: str) -> AttentionState:
    p, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    core = 1 << (p.bit_length() - 1)  # the largest power of two that p holds
    extra = p - core

    if extra:  # the devices beyond the core hand their states in …
        arrived = _send(state, axis, [(core + i, i) for i in range(extra)])
        state = _where(rank < extra, merge(state, arrived), state)
    bit = 1
    while bit < core:
        arrived = _send(state, axis, [(i, i ^ bit) for i in range(core)])
        # Both partners merge in rank order: the same operations, hence the same bits.
        lower = rank & bit == 0
        state = merge(_where(lower, state, arrived), _where(lower, arrived, state))
        bit *= 2
    if extra:  # … and get the result back
        arrived = _send(state, axis, [(i, core + i) for i in range(extra)])
        state = _where(rank < core, state, arrived)
    return state


def _gather(state: AttentionState, axis: str) -> AttentionState:
    return reduce_tree(unpack_state(jax.lax.all_gather(pack_state(state), axis)))


METHODS = {"allreduce": _allreduce, "butterfly": _butterfly, "gather": _gather}


def pack_state(state: AttentionState) -> Float[Array, "... packed"]:
    """The three fields as one array, so that one message carries them: numerator, d, m."""
    m, d, n = state
    return jnp.concatenate([n, d[..., None], m[..., None]], axis=-1)


def unpack_state(packed: Float[Array, "... packed"]) -> AttentionState:
    """The inverse of `pack_state`."""
    return AttentionState(packed[..., -1], packed[..., -2], packed[..., :-2])


def _send(state: AttentionState, axis: str, pairs: list[tuple[int, int]]) -> AttentionState:
    """What arrives from the partner; zeros on devices that no pair (from, to) sends to."""
    return unpack_state(jax.lax.ppermute(pack_state(state), axis, pairs))


def _where(condition, a: AttentionState, b: AttentionState) -> AttentionState:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def tree_decode(
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
    method: str = "allreduce",
    implementation: str | None = None,
    return_lse: bool = False,
):
    """Attention of q, present on every device, over keys and values sharded along `axis`.

    Layouts, mask, bias, kv_lengths and scale are those of `attend`, and implementation is, too.
    The keys are dealt to the devices in contiguous shards; kv_len need not divide by their
    number, and may be smaller. A cache that is already sharded so stays where it is.
    axis names one axis of the mesh, or several, outermost first; method is `merge_across`'s.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), the natural
    logarithm of the sum of exponentials, in float32 or wider. Both are the same on every device.

    Raises ValueError for an axis that the mesh lacks, an unknown method, and whatever `attend`
    refuses.
    """
    check_attend_inputs(q, k, v, mask, bias, kv_lengths)
    axes = mesh_axes(mesh, axis)
    check_implementation(mesh, implementation)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {tuple(METHODS)}, got {method!r}")
    out, lse = _tree_decode(
        q,
        k,
        v,
        kv_lengths,
        mask,
        bias,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        mesh=mesh,
        axes=axes,
        method=method,
        implementation=implementation,
    )
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames=("scale", "mesh", "axes", "method", "implementation"))
def _tree_decode(q, k, v, kv_lengths, mask, bias, *, scale, mesh, axes, method, implementation):
    def body(q, shard, kv_lengths):
        state = attend_shard(
            q,
            shard,
            jax.lax.axis_index(axes),
            kv_lengths=kv_lengths,
            scale=scale,
            implementation=implementation,
        )
        out, lse = finalize(merge_across(state, axes, method=method))
        return out.astype(q.dtype), lse

    # Only the Allreduce's result is known to JAX to be the same everywhere.
    return over_shards(
        body, q, k, v, kv_lengths, mask, bias, mesh=mesh, axes=axes, check=method == "allreduce"
    )
