"""The attentions that a model can be run with, by name.

Towards the cache, an attention is what each device does with the queries, which all devices
have, and its own shard (`treeattn.cache.ShardAttention`); its result is the state of all shards.
Among the tokens of one step, it is a function of whole arrays.
"""

import functools

import jax.numpy as jnp

from treeattn.cache import ShardAttention
from treeattn.local import attend
from treeattn.state import AttentionState
from treeattn.tree import merge_across


def tree(q, k, v, lengths, axes, *, method, implementation) -> AttentionState:
    """Tree Attention: every device attends to its shard, and the states merge across the mesh."""
    state = attend(q, k, v, kv_lengths=lengths, implementation=implementation)
    return merge_across(state, axes, method=method) if axes else state


TO_CACHE = {
    "tree": functools.partial(tree, method="allreduce"),
    "butterfly": functools.partial(tree, method="butterfly"),
    "gather": functools.partial(tree, method="gather"),
}


def to_cache(attention: str | ShardAttention, implementation: str | None = None) -> ShardAttention:
    """The attention of that name towards the cache; a function is returned as it is."""
    if callable(attention):
        return attention
    if attention not in TO_CACHE:
        raise ValueError(f"attention: expected one of {tuple(TO_CACHE)}, got {attention!r}")
    return _bind(TO_CACHE[attention], implementation)


@functools.cache  # the same function object every time, so that nothing compiles twice
def _bind(function, implementation):
    return functools.partial(function, implementation=implementation)


def among_new(q, k, v, mask, *, implementation=None) -> AttentionState:
    """The state of new tokens after each other; mask (b, l, l), or None: causal."""
    l = q.shape[1]
    mask = jnp.tril(jnp.ones((1, l, l), bool)) if mask is None else mask
    return attend(q, k, v, mask=mask[:, None], implementation=implementation)
