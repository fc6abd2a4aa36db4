"""The attentions that a model can be run with: towards its cache, and for a whole prompt.

Towards the cache, an attention is what each device does with the queries, which all devices have,
and with its own shard: its result is the state after all shards. For a whole prompt at once, it is
a function of arrays that are sharded along the text.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from treeattn.devices.heads import gather_heads
from treeattn.devices.layout import Layout
from treeattn.devices.merge import SCATTERED
from treeattn.devices.message import check_wire
from treeattn.devices.on_device import ON_DEVICE
from treeattn.devices.prefill import ring_attention, ulysses_attention
from treeattn.devices.shards import over_shards
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState
from treeattn.kernel.attend import attend, attend_inputs
from treeattn.kernel.choice import platform_of, resolve
from treeattn.kernel.inputs import Implementation, Inputs, NewKeys
from treeattn.kernel.riding import attention_with_new, can_ride
from treeattn_llama.cache import Entries, Quantized, shard_lengths, shards_of
from treeattn_llama.placement import Placement
from treeattn_llama.reading.config import Config

# What each device does with the queries and its shard: q, k, v, and the (batch,) number of keys
# that are in use, to the state of the queries after *all* devices' keys. Called inside shard_map
# with the mesh's axis names; they are () on a single device.
ShardAttention = Callable[[Array, Array, Array, Array, tuple[str, ...]], AttentionState]

# By name, the functions (inputs, axes) of `treeattn.devices.on_device`.
CACHE_ATTENTIONS = {"tree": ON_DEVICE["allreduce"]}
CACHE_ATTENTIONS |= {name: f for name, f in ON_DEVICE.items() if name != "allreduce"}
ATTENTIONS = (*CACHE_ATTENTIONS, "auto")  # as a caller may name them
PROMPT_ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}


@dataclasses.dataclass(frozen=True)
class Static:
    """What the programs depend on besides arrays: another one compiles anew.

    place:     how all lies on the devices
    attention, wire: towards the cache, and the dtype that its merge sends; None if there is none
    layer:     what computes a layer: `layers.plain_layer`, or another that takes the same
    cache_dtype: the one of 8 bits in which the cache holds keys and values; None: floats
    """

    config: Config
    place: Placement
    attention: str | ShardAttention | None
    implementation: Implementation
    layer: Callable
    wire: str | type | jnp.dtype | None = None
    cache_dtype: str | None = None


def check_cache_attention(attention: str | ShardAttention, wire: DTypeLike | None = None) -> None:
    """Raise a ValueError unless it is a function, or the name of one, and can send by `wire`."""
    if not callable(attention) and attention not in ATTENTIONS:
        raise ValueError(f"attention: expected one of {ATTENTIONS}, got {attention!r}")
    if wire is None:
        return
    if callable(attention) or attention == "ring":
        raise ValueError(f"wire: expected an attention that sends states, got {attention!r}")
    check_wire(wire, attention)


def prompt_attention(prefill_with: str | Callable | None, layout: Layout | None) -> Callable | None:
    """The attention of that name for a whole prompt; None: the prompt goes in chunks."""
    names = ("chunks", *PROMPT_ATTENTIONS)
    if not callable(prefill_with) and prefill_with not in (None, *names):
        raise ValueError(f"prefill_with: expected one of {names}, got {prefill_with!r}")
    if layout is None or not layout.axes or prefill_with == "chunks":
        return None
    return prefill_with if callable(prefill_with) else PROMPT_ATTENTIONS[prefill_with or "ring"]


def attend_cache(
    q: Float[Array, "b l h d"],
    k: Entries,
    v: Entries,
    lengths: Int[Array, " b"],
    static: Static,
) -> AttentionState:
    """The state of q, present on every device, after one layer's cached keys.

    k, v:    the cache's, dealt over the mesh in stripes
    lengths: how many tokens of each text they hold
    static:  of its layout only the text's axes are of more than one device
    """
    inputs = cache_inputs(q, k, v, lengths, static.implementation)
    layout = static.place.layout
    if layout is None:
        return attend_shard(inputs, 0, None, static.attention)
    along = layout.spec(layout.axes)
    shards = dict.fromkeys(("k", "v", "key_scale", "value_scale"), along)
    specs = inputs.replace(q=P(), lengths=P(), **shards)

    def body(rank, inputs):
        return attend_shard(inputs, rank, layout, static.attention, wire=static.wire)

    return over_shards(body, layout.mesh, layout.axes, (specs,))(inputs)


def attend_new(q, k, v, mask, last, implementation: Implementation) -> AttentionState:
    """The state of the new tokens' queries after the new tokens: the arguments of `extend_layer`.

    q: (b, l, h, d), or those of the `last` tokens alone (b, 1, h, d)
    """
    if last is not None:
        return attend(q, k, v, kv_lengths=last + 1, implementation=implementation)
    if mask is not None:  # few tokens, and not every kernel takes a mask
        return attend(q, k, v, mask=mask[:, None])
    return attend(q, k, v, causal=True, implementation=implementation)


def attend_with_new(q, k, v, mask, last, cached, lengths, static) -> Array | None:
    """The attention (b, l, h, d), in q's dtype, to the cache and to few new tokens by one kernel.

    q, k, v, mask, last: as `attend_new` takes them; cached, lengths, static: as
                         `extend_layer` does. None where no kernel takes both.
    """
    layout = static.place.layout
    if cached is None or callable(static.attention) or (layout is not None and layout.axes):
        return None
    inputs = cache_inputs(q, *cached, lengths, static.implementation)
    inputs = inputs.replace(lengths=jnp.minimum(lengths, cached[0].shape[1]))
    new = NewKeys(k, v)
    if last is not None:
        new = new._replace(lengths=last + 1)
    elif mask is not None:
        new = new._replace(mask=mask[:, None])
    elif k.shape[1] > 1:
        new = new._replace(mask=jnp.tri(k.shape[1], dtype=bool)[None, None])
    return attention_with_new(inputs, new) if can_ride(inputs, new) else None


def cache_inputs(q, k, v, lengths, implementation: Implementation) -> Inputs:
    """What a layer attends to in the cache, and the kernel that will do it: decided once.

    The model made these arrays itself: there is nothing to check. A cache begins as zeros: nothing
    in it is stale.
    """
    scales = {}
    if isinstance(k, Quantized):
        scales = {"key_scale": k.scale[..., 0], "value_scale": v.scale[..., 0]}
        k, v = k.numbers, v.numbers
    scale = q.shape[-1] ** -0.5
    inputs = Inputs(q, k, v, lengths=lengths, scale=scale, stale=False, **scales)
    return resolve(implementation, inputs, platform_of(q))


def attend_shard(
    inputs: Inputs,
    rank,
    layout: Layout | None,
    attention: str | ShardAttention,
    *,
    scatter: bool = False,
    wire: DTypeLike | None = None,
) -> AttentionState:
    """What device `rank` does: from its own shard to the state after all devices' keys.

    inputs:  q (b, l, h, d), the same everywhere; this device's k and v (b, capacity / p, h_kv, d);
             lengths (b,), which count all devices' tokens
    scatter: whether "reduce_scatter" and "all_to_all" leave each device the state of its ⌈h/p⌉
             heads; otherwise every device gets that of all h
    wire:    as in `merge_across`
    """
    axes = () if layout is None else layout.axes
    whole, capacity = inputs.lengths, inputs.k.shape[1]

    def lengths_of(rank):
        # A traced step cannot refuse to count more tokens than there is room for.
        return jnp.minimum(shard_lengths(whole, rank, shards_of(layout)), capacity)

    inputs = inputs.replace(lengths=lengths_of(rank))
    if callable(attention):
        return attention(inputs.q, inputs.k, inputs.v, inputs.lengths, axes)
    if not axes:
        return attend_inputs(inputs)
    options = {"lengths_of": lengths_of} if attention == "ring" else {}
    options |= {} if wire is None else {"wire": wire}
    state = CACHE_ATTENTIONS[attention](inputs, axes, **options)
    if attention in SCATTERED and not scatter:
        return gather_heads(state, axes, inputs.q.shape[2], wire=wire)
    return state
