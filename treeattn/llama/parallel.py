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
from treeattn.kernel.attend import attend_inputs, platform_of, resolve
from treeattn.kernel.inputs import check_inputs
from treeattn.llama.cache import ShardAttention

TO_CACHE = {"tree": "allreduce"} | {name: name for name in ON_DEVICE if name != "allreduce"}


def _to_cache(q, k, v, lengths, axes, *, name, implementation, scattered) -> AttentionState:
    inputs = check_inputs(q, k, v, kv_lengths=lengths).replace(stale=False)  # a cache begins as 0
    inputs = resolve(implementation, inputs, platform_of(q))
    if not axes:
        return attend_inputs(inputs)
    state = ON_DEVICE[TO_CACHE[name]](inputs, axes)
    if TO_CACHE[name] in SCATTERED and not scattered:
        return gather_heads(state, axes, q.shape[2])
    return state


@functools.cache  # the same function object every time, so that nothing compiles twice
def to_cache(
    attention: str | ShardAttention, implementation: str | None = None, scattered: bool = False
) -> ShardAttention:
    """The attention of that name towards the cache; a function is returned as it is.

    scattered: whether a method that scatters the heads may leave them so
    """
    if callable(attention):
        return attention
    if attention not in TO_CACHE:
        raise ValueError(f"attention: expected one of {tuple(TO_CACHE)}, got {attention!r}")
    return functools.partial(
        _to_cache, name=attention, implementation=implementation, scattered=scattered
    )


FOR_PROMPTS = {"ring": ring_attention, "ulysses": ulysses_attention}


def for_prompts(prefill_with: str | Callable | None, mesh: Mesh | None) -> Callable | None:
    """The attention of that name for a whole prompt; None: the prompt goes in chunks."""
    names = ("chunks", *FOR_PROMPTS)
    if not callable(prefill_with) and prefill_with not in (None, *names):
        raise ValueError(f"prefill_with: expected one of {names}, got {prefill_with!r}")
    if mesh is None or prefill_with == "chunks":
        return None
    return prefill_with if callable(prefill_with) else FOR_PROMPTS[prefill_with or "ring"]
