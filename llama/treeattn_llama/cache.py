"""A cache of keys and values, dealt over the devices of a mesh in stripes.

Token s of a text lies on device s mod p, in its row s // p: like cards dealt around a table. Any
partition of the keys gives the same attention, and this one keeps the shards equally full, to
within one token, while the text grows. What is in use is always the beginning of a shard, so
that one number describes it, its length.

    device 0   0  8  16  24 …
    device 1   1  9  17  25 …
    …
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from treeattn_llama.arguments import Array
from treeattn_llama.layout import Layout

# A layer's keys and values, of a cache (b, capacity, h_kv, d) or of new tokens (b, l, h_kv, d).
Pair = tuple[Float[Array, "b _ h_kv d"], Float[Array, "b _ h_kv d"]]


class Cache(NamedTuple):
    """One pair of arrays a layer, each (batch, capacity, kv_heads, head_dim), sharded along
    capacity, and along batch where the mesh has an axis for it; and how many tokens of each text
    they hold.

    Shard r of p, rows r·capacity/p and on, holds tokens r, r + p, r + 2p, … (`token_rows`).
    """

    k: tuple[Float[Array, "b capacity h_kv d"], ...]
    v: tuple[Float[Array, "b capacity h_kv d"], ...]
    lengths: Int[Array, " b"]

    @property
    def capacity(self) -> int:
        """The number of tokens that fit, for each text."""
        return self.k[0].shape[1]

    @property
    def layers(self) -> tuple[Pair, ...]:
        """The layers' (k, v)."""
        return tuple(zip(self.k, self.v, strict=True))


def shard_lengths(lengths: Int[Array, " b"], rank, p: int) -> Int[Array, " b"]:
    """How many of the first `lengths` tokens lie on device `rank` of `p`."""
    return (lengths - rank + p - 1) // p


def token_rows(tokens, capacity: int, p: int):
    """Where tokens lie along the capacity axis of a cache over `p` devices."""
    return tokens % p * (capacity // p) + tokens // p


def in_order(x: Float[Array, "b n ..."], p: int) -> np.ndarray:
    """A cache array with its tokens in the text's order: (batch, capacity, …), on the host."""
    x = np.asarray(x)
    return x[:, token_rows(np.arange(x.shape[1]), x.shape[1], p)]


def empty_cache(layers: int, shape: tuple[int, int, int, int], dtype, layout: Layout) -> Cache:
    """A cache of zeros, its capacity rounded up to a multiple of the shards.

    shape: (batch, capacity, kv_heads, head_dim)
    """
    p = layout.shards
    batch, capacity, *heads = shape
    shape = batch, p * -(-capacity // p), *heads
    where = layout.sharding(layout.of_keys)
    k, v = (tuple(jnp.zeros(shape, dtype, device=where) for _ in range(layers)) for _ in "kv")
    return Cache(k, v, layout.put(np.zeros(batch, np.int32)))


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="cached")
def append(
    cached: Pair,
    new: Pair,
    lengths: Int[Array, " b"],
    counts: Int[Array, " b"],
    select: Int[Array, "b m"] | None = None,
    *,
    layout: Layout,
) -> Pair:
    """A layer's part of a cache, with new tokens after those of each text.

    lengths: how many tokens of each text the cache holds
    counts:  how many of the new tokens each text gets
    select:  which, in order, as indices into the new tokens; the first ones when None

    With lengths [7], counts [2] and select [[0, 2, 2]], new tokens 0 and 2 become tokens 7 and 8.
    """

    def body(cached, new, lengths, counts, select):
        if select is not None:
            new = [jnp.take_along_axis(x, select[..., None, None], axis=1) for x in new]
        rank = jax.lax.axis_index(layout.keys) if layout.keys else 0
        p = layout.shards
        tokens = lengths[:, None] + jnp.arange(new[0].shape[1])
        mine = (jnp.arange(new[0].shape[1]) < counts[:, None]) & (tokens % p == rank)
        past_the_end = cached[0].shape[1]
        rows = jnp.where(mine, tokens // p, past_the_end)  # where nothing is written
        texts = jnp.arange(len(lengths))[:, None]
        return tuple(
            x.at[texts, rows].set(y, mode="drop") for x, y in zip(cached, new, strict=True)
        )

    rows = layout.of_rows
    given = layout.of_keys, rows, rows, rows, rows
    return layout.on_each_device(body, given, layout.of_keys)(cached, new, lengths, counts, select)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="cached")
def fill(cached: Pair, new: Pair, *, layout: Layout) -> Pair:
    """A layer's part of an empty cache, with the tokens of whole prompts.

    new: (b, n, h_kv, d), sharded along n in the text's order, where p² divides n

    An all-to-all deals the tokens out: of 8 tokens, two devices have 0 1 2 3 and 4 5 6 7, and then
    0 2 4 6 and 1 3 5 7.
    """
    p = layout.shards

    def deal(x, y):
        # This device's n/p neighbours as n/p² rounds of p cards, one for each device.
        y = y.reshape(len(y), -1, p, *y.shape[2:])
        y = jax.lax.all_to_all(y, layout.keys, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
        y = y[:, : x.shape[1]]  # what does not fit is padding
        return jax.lax.dynamic_update_slice_in_dim(x, y, 0, axis=1)

    def body(cached, new):
        return tuple(deal(x, y) for x, y in zip(cached, new, strict=True))

    return layout.on_each_device(body, (layout.of_keys,) * 2, layout.of_keys)(cached, new)


advance = jax.jit(jnp.add)  # lengths by counts: dispatched at once, as the layers' programs are


def wait_on_cpus(arrays, layout: Layout) -> None:
    """Return when `arrays` are there, if simulated devices compute them: before `append`.

    XLA:CPU keeps a thread for a small program while that waits for its inputs. With one for every
    device, none is left for the collectives that the inputs come from, and nothing moves again.
    """
    if layout.mesh is not None and layout.mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)
