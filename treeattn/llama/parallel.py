"""The attentions that a model can be run with, by name.

Towards the cache, an attention is what each device does with the queries, which all devices
have, and with its own shard (`treeattn.llama.cache.ShardAttention`): its result is the state after
all shards. For a whole prompt at once, it is a function of arrays that are sharded along the text.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from treeattn.devices.prefill import attend_causal, ring_attention, ulysses_attention
from treeattn.devices.ring import empty_state, pass_on
from treeattn.devices.shards import pad_axis
from treeattn.devices.tree import merge_across
from treeattn.idea.state import AttentionState, merge
from treeattn.kernel.attend import attend
from treeattn.llama.cache import ShardAttention


def tree(q, k, v, lengths, axes, *, method, implementation) -> AttentionState:
    """Tree Attention: every device attends to its shard, and the states merge across the mesh."""
    state = attend(q, k, v, kv_lengths=lengths, implementation=implementation)
    return merge_across(state, axes, method=method) if axes else state


def ring(q, k, v, lengths, axes, *, implementation) -> AttentionState:
    """Ring Attention: every shard visits every device. Devices agree up to rounding."""
    state = empty_state(q, v.shape[-1], k)
    p = jax.lax.axis_size(axes) if axes else 1

    def visit(carry, _):
        state, (k, v, lengths) = carry
        arriving = pass_on((k, v, lengths), axes, p)
        here = attend(q, k, v, kv_lengths=lengths, implementation=implementation)
        return (merge(state, here), arriving), None

    (state, (k, v, lengths)), _ = jax.lax.scan(visit, (state, (k, v, lengths)), length=p - 1)
    return merge(state, attend(q, k, v, kv_lengths=lengths, implementation=implementation))


def pass_q(q, k, v, lengths, axes, *, implementation) -> AttentionState:
    """A ring that moves shares of the queries, and their states, past shards that stay."""
    if not axes:
        return attend(q, k, v, kv_lengths=lengths, implementation=implementation)
    p, rank, l = jax.lax.axis_size(axes), jax.lax.axis_index(axes), q.shape[1]
    share = -(-l // p)
    q = jax.lax.dynamic_slice_in_dim(pad_axis(q, 1, p * share), rank * share, share, 1)

    def visit(carry, _):
        q, state = carry
        here = attend(q, k, v, kv_lengths=lengths, implementation=implementation)
        return pass_on((q, merge(state, here)), axes, p), None

    start = q, empty_state(q, v.shape[-1], k)
    (_, state), _ = jax.lax.scan(visit, start, length=p)  # after p steps, everybody is home
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
    return jax.tree.map(lambda x: gather(x)[:, :l], state)


TO_CACHE = {
    "tree": functools.partial(tree, method="allreduce"),
    "butterfly": functools.partial(tree, method="butterfly"),
    "gather": functools.partial(tree, method="gather"),
    "ring": ring,
    "pass_q": pass_q,
}


@functools.cache  # the same function object every time, so that nothing compiles twice
def to_cache(attention: str | ShardAttention, implementation: str | None = None) -> ShardAttention:
    """The attention of that name towards the cache; a function is returned as it is."""
    if callable(attention):
        return attention
    if attention not in TO_CACHE:
        raise ValueError(f"attention: expected one of {tuple(TO_CACHE)}, got {attention!r}")
    return functools.partial(TO_CACHE[attention], implementation=implementation)


def among_new(q, k, v, mask, implementation: str | None) -> AttentionState:
    """The state of a step's tokens after each other; mask (b, l, l), or None: causal."""
    if mask is not None:
        return attend(q, k, v, mask=mask[:, None])
    return attend_causal(q, k, v, scale=q.shape[-1] ** -0.5, implementation=implementation)


WHOLE = {"ring": ring_attention, "ulysses": ulysses_attention}


def whole(prefill: str | Callable | None, mesh: Mesh | None) -> Callable | None:
    """The attention of that name for a whole prompt; None: the prompt goes in chunks."""
    if prefill == "chunks" or callable(prefill):
        return None if prefill == "chunks" else prefill
    if prefill not in (None, *WHOLE):
        raise ValueError(f"prefill: expected one of {('chunks', *WHOLE)}, got {prefill!r}")
    if mesh is None:
        return None
    return WHOLE[prefill or "ring"]
