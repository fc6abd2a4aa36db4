"""A cache of keys and values, sharded over the devices of a mesh in stripes.

Token s of a text is on device s mod p, in slot s // p of the shard, as cards are dealt around a
table. Any partition of the keys gives the same attention. This one keeps the shards equally full
while the text grows, to within one token. The tokens of a shard fill its first slots, so one number
describes the shard, its length.

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

from treeattn import striped_slot
from treeattn.checks import Array
from treeattn_llama.arguments import Lengths
from treeattn_llama.text_shards import TextShards

# A layer's keys and values, of a cache (b, capacity, h_kv, d) or of new tokens (b, l, h_kv, d).
Pair = tuple[Float[Array, "b _ h_kv d"], Float[Array, "b _ h_kv d"]]


class Cache(NamedTuple):
    """The keys and values of each layer, and the number of tokens of each text.

    Arrays are (batch, capacity, kv_heads, head_dim), sharded along capacity, and along batch if the
    mesh has an axis for it. Shard r of p has the slots from r·capacity/p on, and holds the tokens
    r, r + p, r + 2p, … (`treeattn.striped_slot`).
    """

    k: tuple[Float[Array, "b capacity h_kv d"], ...]
    v: tuple[Float[Array, "b capacity h_kv d"], ...]
    lengths: Lengths

    @property
    def capacity(self) -> int:
        """The number of tokens that fit, for each text."""
        return self.k[0].shape[1]

    @property
    def layers(self) -> tuple[Pair, ...]:
        """The layers' (k, v)."""
        return tuple(zip(self.k, self.v, strict=True))


def in_order(x: Float[Array, "b n ..."], p: int) -> np.ndarray:
    """A cache's array on the host, its tokens in the order of the text: (batch, capacity, …)."""
    x = np.asarray(x)
    return x[:, striped_slot(np.arange(x.shape[1]), x.shape[1], p)]


@functools.partial(jax.jit, static_argnames="shards", donate_argnames="cached")
def append(
    cached: Pair,
    new: Pair,
    lengths: Lengths,
    counts: Lengths,
    select: Int[Array, "b m"] | None = None,
    *,
    shards: TextShards,
) -> Pair:
    """A layer's part of a cache, with new tokens after those of each text.

    lengths: the number of tokens of each text in the cache
    counts:  the number of new tokens for each text
    select:  indices of the new tokens to write, in order; None for the first ones

    With lengths [7], counts [2] and select [[0, 2, 2]], new tokens 0 and 2 become tokens 7 and 8.
    """

    def body(cached, new, lengths, counts, select):
        if select is not None:
            new = [jnp.take_along_axis(x, select[..., None, None], axis=1) for x in new]
        rank = jax.lax.axis_index(shards.keys) if shards.keys else 0
        p = shards.devices
        index = jnp.arange(new[0].shape[1])
        tokens = lengths[:, None] + index
        mine = (index < counts[:, None]) & (tokens % p == rank)
        past_the_end = cached[0].shape[1]  # `drop` writes nothing there
        slots = jnp.where(mine, tokens // p, past_the_end)
        texts = jnp.arange(len(lengths))[:, None]
        return tuple(
            x.at[texts, slots].set(y, mode="drop") for x, y in zip(cached, new, strict=True)
        )

    texts = shards.of_texts
    in_specs = shards.of_keys, texts, texts, texts, texts
    run = shards.on_each_device(body, in_specs, shards.of_keys)
    return run(cached, new, lengths, counts, select)


@functools.partial(jax.jit, static_argnames="shards", donate_argnames="cached")
def fill(cached: Pair, new: Pair, *, shards: TextShards) -> Pair:
    """A layer's part of an empty cache, with the tokens of whole prompts.

    new: (b, n, h_kv, d), sharded along n in the text's order; n is a multiple of p²

    An all-to-all turns neighbours into stripes: two devices that hold the tokens 0 1 2 3 and
    4 5 6 7 hold 0 2 4 6 and 1 3 5 7 afterwards.
    """
    p = shards.devices

    def deal(x, y):
        # The n/p tokens here are n/p² rounds of p cards, one for each device.
        y = y.reshape(len(y), -1, p, *y.shape[2:])
        y = jax.lax.all_to_all(y, shards.keys, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
        y = y[:, : x.shape[1]]  # beyond the capacity there is only padding
        return jax.lax.dynamic_update_slice_in_dim(x, y, 0, axis=1)

    def body(cached, new):
        return tuple(deal(x, y) for x, y in zip(cached, new, strict=True))

    return shards.on_each_device(body, (shards.of_keys,) * 2, shards.of_keys)(cached, new)


advance = jax.jit(jnp.add)  # lengths + counts, dispatched without waiting, as the layers are


def wait_on_cpus(arrays, shards: TextShards) -> None:
    """Return when simulated devices have computed `arrays`; call it before `append`.

    XLA:CPU keeps a thread for a small program that waits for its inputs. If each device has such a
    program, no thread is left for the collectives that compute the inputs: a deadlock.
    """
    if shards.mesh is not None and shards.mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)
