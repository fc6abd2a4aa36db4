"""The attentions that a model can be run with: what each device does with its shard of the cache.

Each is a function of the queries, which all devices of a text have, and of a device's own keys. Its
result is the state after *all* devices' keys. The new tokens' own keys are in no shard yet: what
they say is a second state, and the two merge (`layers.extend_layer`).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from treeattn import AttentionState, attend, merge, merge_across
from treeattn_llama.arguments import Array
from treeattn_llama.cache import shard_lengths
from treeattn_llama.layout import Layout

# q (b, l, h, d), a device's k and v (b, n, h_kv, d), how many of its keys are in use (b,), and the
# names of the mesh's axes that share the keys: () on a single device. Called inside shard_map.
ShardAttention = Callable[[Array, Array, Array, Array, tuple[str, ...]], AttentionState]


def attend_own(q, k, v, **options) -> AttentionState:
    """The state of arrays that one device has. XLA cannot know that they are whole there, and would
    keep a program ready to be split over several CPU devices, with all scores in memory."""
    implementation = "blockwise" if jax.default_backend() == "cpu" else None
    return attend(q, k, v, implementation=implementation, **options)


def tree(q, k, v, lengths, axes, method: str = "allreduce") -> AttentionState:
    """Tree Attention: attend to the own keys, and merge all devices' states."""
    state = attend_own(q, k, v, kv_lengths=lengths)
    return merge_across(state, axes, method=method) if axes else state


def ring(q, k, v, lengths, axes) -> AttentionState:
    """Ring Attention: every shard passes by every device, in p − 1 steps."""
    state = attend_own(q, k, v, kv_lengths=lengths)
    if not axes:
        return state
    p = jax.lax.axis_size(axes)
    neighbours = [(i, (i + 1) % p) for i in range(p)]

    def pass_on(_, carry):
        state, shard = carry
        shard = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, neighbours), shard)
        k, v, lengths = shard
        return merge(state, attend_own(q, k, v, kv_lengths=lengths)), shard

    return jax.lax.fori_loop(1, p, pass_on, (state, (k, v, lengths)))[0]


ATTENTIONS = {
    "tree": tree,
    "ring": ring,
    "butterfly": functools.partial(tree, method="butterfly"),
}


def check_attention(attention: str | ShardAttention) -> None:
    """Raise a ValueError for an unknown name, and a TypeError for a function that is not hashable:
    the layers' programs are compiled for it."""
    kind = type(attention).__name__
    if not callable(attention) and not isinstance(attention, str):
        raise TypeError(f"attention: expected a name or a function, got {kind}")
    if isinstance(attention, str) and attention not in ATTENTIONS:
        raise ValueError(f"attention: expected one of {tuple(ATTENTIONS)}, got {attention!r:.40}")
    try:
        hash(attention)
    except TypeError:
        raise TypeError(f"attention: expected a hashable function, got {kind}") from None


def attend_cache(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv d"],
    lengths: Int[Array, " b"],
    attention: str | ShardAttention,
    layout: Layout,
) -> AttentionState:
    """The state of q after one layer's cached keys; every device calls it with its shard.

    lengths: how many tokens of each text all shards hold
    """
    rank = jax.lax.axis_index(layout.keys) if layout.keys else 0
    own = shard_lengths(lengths, rank, layout.shards)
    # Under `jit` lengths cannot be checked, so they are clipped to the room that there is.
    own = jnp.minimum(own, k.shape[1])
    run = attention if callable(attention) else ATTENTIONS[attention]
    return run(q, k, v, own, layout.keys)
