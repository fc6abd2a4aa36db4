"""A layer whose bits depend on the text alone.

On how many devices the cache lies, which texts and candidates share a call, how a prompt was cut
into pieces, whether a token's key is in the cache or came with the same call: none of it moves a
bit. Products are those of whole numbers (`int8`), for any number of tokens; attention is the exact
one, of which the states of all shards, and of the new tokens, are merged before anything is
rounded; and what is left is done to each number by itself (`fixed`).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from treeattn.devices.merge import merge_across
from treeattn.devices.mesh import Axes
from treeattn.idea.arrays import Array
from treeattn.idea.state import finalize
from treeattn.kernel.attend import attend_exact
from treeattn.kernel.digits import unfused
from treeattn.kernel.exact import ExactState
from treeattn.llama import fixed, int8
from treeattn.llama.attentions import Static
from treeattn.llama.cache import shard_lengths, shards_of
from treeattn.llama.dealt import heads_over_shards, layer_over_shards
from treeattn.llama.int8 import Int8Matrix
from treeattn.llama.layers import Kind, Rotation, join_heads
from treeattn.llama.placement import Placement, own_config
from treeattn.llama.products import take_token
from treeattn.llama.reading.config import Config
from treeattn.llama.weights import Layer


def linear(
    x: Float[Array, "... d"],
    matrix: Int8Matrix,
    bias: Float[Array, " out"] | None = None,
    axes: Axes = (),
) -> Float[Array, "... out"]:
    """x Wᵀ + bias; with axes, where each device has its part of x and of the matrix's columns."""
    y = unfused(int8.exact_product(x, matrix, axes))
    return y if bias is None else y + bias


def exact_layer(x, w: Layer, rotation, mask, cached, lengths, last, static: Static):
    """`layers.plain_layer`, by operations whose bits nothing around them moves."""
    on_device = functools.partial(_layer_on_device, static=static)
    return layer_over_shards(on_device, x, w, rotation, mask, cached, lengths, last, static.place)


def _layer_on_device(rank, x, w: Layer, rotation, mask, cached, lengths, last, *, static: Static):
    """What device `rank` does, with its own rows, heads, and keys in the cache."""
    config = own_config(static.config, static.place)
    axes = static.place.weight_axes
    q, k, v = _queries_keys_values(x, w, rotation, config)
    if last is not None:
        x = take_token(x, last)
        q = take_token(q, last)
        state = attend_exact(q, k, v, kv_lengths=last + 1)
    elif mask is not None:
        state = attend_exact(q, k, v, mask=mask[:, None])
    else:
        state = attend_exact(q, k, v, causal=True)
    out = finalize(_with_cache(rank, q, state, cached, lengths, static))[0]
    x = x + linear(join_heads(out), w.output, w.output_bias, axes)
    normed = fixed.rms_norm(x, w.mlp_norm, config.norm_epsilon)
    gate, up = jnp.split(linear(normed, w.gate_up, w.gate_up_bias), 2, axis=-1)
    return x + linear(fixed.silu(gate) * up, w.down, w.down_bias, axes), (k, v)


def _with_cache(rank, q, state: ExactState, cached, lengths, static: Static):
    """The rounded state after the new tokens' `state` and the cached keys of all devices."""
    if cached is None:
        return state.rounded()
    layout = static.place.layout
    own = jnp.minimum(shard_lengths(lengths, rank, shards_of(layout)), cached[0].shape[1])
    earlier = attend_exact(q, *cached, kv_lengths=own)
    if layout is None or not layout.axes:
        return earlier.merge(state).rounded()
    # All devices have the new tokens: the first one's count.
    nothing = ExactState.identity(q.shape[:3], q.shape[3])
    state = jax.tree.map(lambda x, y: jnp.where(rank == 0, x, y), state, nothing)
    return merge_across(earlier.merge(state), layout.axes, method="exact")


@functools.partial(jax.jit, static_argnames=("config", "place"))
def queries_keys_values(x, w: Layer, rotation: Rotation, config: Config, place: Placement):
    """`layers.queries_keys_values`: (b, l, h, d), and twice (b, l, h_kv, d)."""
    on_device = functools.partial(_queries_keys_values, config=own_config(config, place))
    return heads_over_shards(on_device, x, w, rotation, place)


def _queries_keys_values(x, w: Layer, rotation: Rotation, config: Config):
    normed = fixed.rms_norm(x, w.attention_norm, config.norm_epsilon)
    qkv = linear(normed, w.qkv, w.qkv_bias)
    h = config.heads
    heads = qkv.reshape(*qkv.shape[:2], h + 2 * config.kv_heads, config.head_dim)
    q, k, v = jnp.split(heads, [h, h + config.kv_heads], axis=2)
    return fixed.rotate(q, *rotation), fixed.rotate(k, *rotation), v


EXACT = Kind(exact_layer, queries_keys_values, None)  # prompts go in chunks
