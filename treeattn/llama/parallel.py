"""The attentions that a model can be run with, by name.

Towards the cache, an attention is what each device does with the queries, which all devices
have, and with its own shard (`treeattn.llama.cache.ShardAttention`): its result is the state after
all shards. For a whole prompt at once, it is a function of arrays that are sharded along the text.
"""

import functools
from collections.abc import Callable

from jax.sharding import Mesh

from treeattn.devices.decode import ON_DEVICE
from treeattn.devices.merge import SCATTERED, gather_heads
from treeattn.devices.prefill import ring_attention, ulysses_attention
from treeattn.idea.state import AttentionState
from treeattn.kernel.attend import attend, attend_inputs, platform_of, resolve
from treeattn.kernel.inputs import check_inputs
from treeattn.llama.cache import ShardAttention

TO_CACHE = {"tree": "allreduce"} | {name: name for name in ON_DEVICE if name != "allreduce"}


def _to_cache(q, k, v, lengths, axes, *, name: str, implementation) -> AttentionState:
    inputs = check_inputs(q, k, v, kv_lengths=lengths)
    inputs = resolve(implementation, inputs, platform_of(q))
    if not axes:
        return attend_inputs(inputs)
    state = ON_DEVICE[TO_CACHE[name]](inputs, axes)
    return gather_heads(state, axes, q.shape[2]) if TO_CACHE[name] in SCATTERED else state


@functools.cache  # the same function object every time, so that nothing compiles twice
def to_cache(attention: str | ShardAttention, implementation: str | None = None) -> ShardAttention:
    """The attention of that name towards the cache; a function is returned as it is."""
    if callable(attention):
        return attention
    if attention not in TO_CACHE:
        raise ValueError(f"attention: expected one of {tuple(TO_CACHE)}, got {attention!r}")
    return functools.partial(_to_cache, name=attention, implementation=implementation)


def among_new(q, k, v, mask, implementation: str | None) -> AttentionState:
    """The state of a step's tokens after each other; mask (b, l, l), or None: causal."""
    if mask is not None:
        return attend(q, k, v, mask=mask[:, None])
    return attend(q, k, v, causal=True, implementation=implementation)


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
