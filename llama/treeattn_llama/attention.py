"""The attentions that a model can run with: how a device attends to its shard of the cache.

Each attention is a function of the queries, which every device of a text holds, and of the device's
own keys. It returns the state after the keys of *all* devices. The new tokens' own keys are not in
the cache yet: `layers.extend_layer` attends to them separately, and merges the two states.
"""

import functools
from collections.abc import Callable, Hashable

import jax
from jaxtyping import Float

from treeattn import AttentionState, attend, merge, merge_across, shard_lengths, visit_shards
from treeattn.checks import Array
from treeattn_llama.arguments import Lengths, Queries
from treeattn_llama.text_shards import TextShards

# q (b, l, h, d), the device's k and v (b, n, h_kv, d), the number of its keys in use (b,), and the
# names of the mesh's axes that shard the keys, () on a single device. Called inside shard_map.
ShardAttention = Callable[[Array, Array, Array, Array, tuple[str, ...]], AttentionState]


def attend_own(q, k, v, **options) -> AttentionState:
    """The state of the queries after keys that this device holds.

    On a CPU the implementation is named, because `attend` cannot know here that no array is sharded
    any further: by default it would choose the one that holds all scores.
    """
    implementation = "blockwise" if jax.default_backend() == "cpu" else None
    return attend(q, k, v, implementation=implementation, **options)


def tree(q, k, v, lengths, axes, method: str = "allreduce") -> AttentionState:
    """Tree Attention: each device attends to its own keys, then the devices merge their states."""
    state = attend_own(q, k, v, kv_lengths=lengths)
    return merge_across(state, axes, method=method) if axes else state


def ring(q, k, v, lengths, axes) -> AttentionState:
    """Ring Attention: every shard visits every device, in p − 1 steps."""

    def visit(state, shard, _):
        k, v, lengths = shard
        return merge(state, attend_own(q, k, v, kv_lengths=lengths))

    own = attend_own(q, k, v, kv_lengths=lengths)
    return visit_shards(visit, own, (k, v, lengths), axes)


ATTENTIONS = {
    "tree": tree,
    "ring": ring,
    "butterfly": functools.partial(tree, method="butterfly"),
}


def check_attention(attention: str | ShardAttention) -> None:
    """Raise TypeError for anything but a name and a function that can be hashed: each attention
    has its own compiled programs, which JAX finds by its hash."""
    hashable = isinstance(attention, Hashable)
    if not hashable or not (attention in ATTENTIONS or callable(attention)):
        names = tuple(ATTENTIONS)
        raise TypeError(
            f"attention: expected one of {names} or a hashable function, got {attention!r:.40}"
        )


def attend_cache(
    q: Queries,
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv d"],
    lengths: Lengths,
    attention: str | ShardAttention,
    shards: TextShards,
) -> AttentionState:
    """The state of q after one layer's cached keys; every device calls it with its shard.

    lengths: the number of tokens of each text, on all devices together
    """
    rank = jax.lax.axis_index(shards.keys) if shards.keys else 0
    p = shards.devices
    own = shard_lengths(lengths, rank, p * k.shape[1], p, striped=True)
    run = attention if callable(attention) else ATTENTIONS[attention]
    return run(q, k, v, own, shards.keys)
