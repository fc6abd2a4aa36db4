"""One step of a Llama's layer on a mesh with the axes "batch", "heads" and "kv", by hand.

The sharding of each array, and the partial sums that its product leaves:

    x                  (b, w)           rows along "batch"
    query, key, value  (w, h·d), …      columns, which are heads, along "heads"
    cache k, v         (b, n, h_kv, d)  rows, keys and heads along "batch", "kv" and "heads"
    output             (h·d, w)         rows along "heads": a partial sum, added up along "heads"
    gate, up           (w, m)           columns along "heads" and "kv" together
    down               (m, w)           rows along both: a partial sum, added up along both

The attention between these products is Tree Attention: every device attends to its own keys of its
own heads, and states merge along "kv". Nothing crosses "batch".

Sources: Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053) for the matrices, Bhatia et al. 2025
(Helix, arXiv 2507.07120) for sharding the MLP's matrices over the devices of the keys, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from treeattn import attend, finalize, merge, merge_across

EPSILON = 1e-5  # of the norms
BASE = 10_000.0  # of the rotary angles


class Sizes(NamedTuple):
    """A layer's sizes: its width, query heads, key heads, a head's size, the MLP's width."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int


class Weights(NamedTuple):
    """A layer's matrices (inputs, outputs), and the gains of its norms (width,)."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    attention_norm: jax.Array
    mlp_norm: jax.Array


class Cache(NamedTuple):
    """Keys and values (b, n, h_kv, d) in stripes, and the number of keys of each row, (b,).

    With p devices along "kv", key i of a row is on device i mod p, in the slot i div p.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array


def weight_specs() -> Weights:
    """The sharding of each matrix."""
    columns, rows = P(None, "heads"), P("heads")
    everywhere = ("heads", "kv")
    return Weights(
        query=columns,
        key=columns,
        value=columns,
        output=rows,
        gate=P(None, everywhere),
        up=P(None, everywhere),
        down=P(everywhere),
        attention_norm=P(),
        mlp_norm=P(),
    )


def cache_specs() -> Cache:
    """The sharding of a cache."""
    shard = P("batch", "kv", "heads")
    return Cache(k=shard, v=shard, lengths=P("batch"))


def layer_step(x, weights: Weights, cache: Cache, *, sizes: Sizes, mesh):
    """(the layer's output for one new token a row, the cache with this token's key and value).

    x (b, w); `weights` and `cache` have the shardings of their specs. The step writes a row's key
    number `lengths`, and `lengths` grows by one. The caller makes sure that the cache has room.
    """

    def on_device(x, weights, cache):
        q, k, v = _queries_keys_values(x, weights, cache.lengths, sizes.head_dim)
        # Each earlier key is on one device. The new key is on all, so it merges after the others.
        rank, p = lax.axis_index("kv"), lax.axis_size("kv")
        own = (cache.lengths - rank + p - 1) // p
        earlier = merge_across(attend(q, cache.k, cache.v, kv_lengths=own), "kv")
        out, _ = finalize(merge(earlier, attend(q, k, v)))
        heads = out.astype(x.dtype).reshape(len(x), -1)
        x = x + lax.psum(heads @ weights.output, "heads")
        normed = _norm(x, weights.mlp_norm)
        hidden = jax.nn.silu(normed @ weights.gate) * (normed @ weights.up)
        x = x + lax.psum(hidden @ weights.down, ("heads", "kv"))
        return x, _with_new_keys(cache, k, v, rank, p)

    specs = P("batch"), weight_specs(), cache_specs()
    results = P("batch"), cache_specs()
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    return mapped(x, weights, cache)


def _queries_keys_values(x, weights: Weights, positions, head_dim: int):
    """This device's heads: q (b, 1, h, d), k and v (b, 1, h_kv, d), of x (b, w)."""
    normed = _norm(x, weights.attention_norm)

    def by_heads(matrix):
        return (normed @ matrix).reshape(len(x), 1, -1, head_dim)

    q, k = (_rotate(by_heads(matrix), positions) for matrix in (weights.query, weights.key))
    return q, k, by_heads(weights.value)


def _with_new_keys(cache: Cache, k, v, rank, p) -> Cache:
    """The cache with each row's new key, written by the one device that owns its slot."""
    rows = jnp.arange(len(k))
    slot = cache.lengths // p
    mine = (cache.lengths % p == rank)[:, None, None]

    def write(old, new):
        return old.at[rows, slot].set(jnp.where(mine, new[:, 0], old[rows, slot]))

    return Cache(write(cache.k, k), write(cache.v, v), cache.lengths + 1)


def _norm(x, gain):
    """Root-mean-square norm of each row."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * gain


def _rotate(x, positions):
    """Rotary embedding of x (b, 1, heads, d), each row's token at its position (b,)."""
    half = x.shape[-1] // 2
    frequencies = BASE ** (-jnp.arange(half) / half)
    angles = (positions[:, None] * frequencies)[:, None, None]  # (b, 1, 1, d / 2)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
