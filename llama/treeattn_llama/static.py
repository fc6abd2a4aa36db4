"""What a model's step is compiled for: its `Static`, with the attention that it takes.

By attention "auto" that is the one whose collectives take least by what was measured on the mesh's
devices, for as many new tokens as the step has.
"""

import functools

import jax.numpy as jnp

from treeattn.devices.auto import Sent, StateSize, collectives_of, fastest, state_size
from treeattn.devices.merge import METHODS, SCATTERED
from treeattn_llama.attentions import (
    ShardAttention,
    Static,
    check_cache_attention,
    prompt_attention,
)
from treeattn_llama.inputs import check_hashable
from treeattn_llama.placement import Placement
from treeattn.measured import CollectiveTimes, find_measured


def check_attentions(model) -> None:
    """Raise what `Llama` says of its attentions; by "auto", of `measured`, which is read here."""
    check_hashable(attention=model.attention, prefill_with=model.prefill_with)
    prompt_attention(model.prefill_with, model.place.layout)
    check_cache_attention(model.attention, model.wire)
    if model.attention == "auto":
        object.__setattr__(model, "measured", find_measured(model.measured))
        attention_of(model, max(1, model.place.rows), 1)  # raises where groups are missing


def static_of(model, shape: tuple[int, int] | None = None) -> Static:
    """Of a step with new tokens (batch, length); None: without a cache, for every attention."""
    return Static(
        config=model._one_layer,
        place=model.place,
        attention=None if shape is None else attention_of(model, *shape),
        implementation=model.implementation,
        layer=model._kind.layer,
        wire=None if shape is None else model.wire,
        cache_dtype=model.cache_dtype and jnp.dtype(model.cache_dtype).name,
    )


def attention_of(model, batch: int, length: int) -> str | ShardAttention:
    """Which attention towards the cache a step of `length` new tokens of each text takes."""
    if model.attention != "auto":
        return model.attention
    layout = model.place.layout
    if layout is None:
        return "tree"
    c = model.config
    heads = c.heads // model.place.groups
    dtype = model.weights.embedding.dtype
    size = state_size(batch // model.place.rows * length, heads, c.head_dim, dtype, model.wire)
    return _fastest_attention(model.measured, model.place, size)


@functools.lru_cache(maxsize=256)
def _fastest_attention(measured: CollectiveTimes | None, place: Placement, size: StateSize) -> str:
    """Of the tree's; where devices share the weights, they keep the shares of the heads."""
    layout = place.layout
    methods = [m for m in METHODS if m != "hierarchical" or len(layout.axes) > 1]

    def sent(method, *given) -> list[Sent]:
        scatter = bool(place.parts) and method in SCATTERED
        return collectives_of(method, *given, scatter=scatter, finished=False)

    method = fastest(measured, methods, size, layout.mesh, layout.axes, sent)
    return "tree" if method == "allreduce" else method
