"""A cache of keys and values, dealt over the devices of a mesh in stripes.

Token s of a text lies on device s mod p, in its row s // p: like cards dealt around a table. Any
partition of the keys gives the same attention, and this one keeps the shards equally full, to
within one token, while the text grows. What is in use is always the beginning of a shard, so
that its length says all there is to know.

    device 0   0  8  16  24 …
    device 1   1  9  17  25 …
    …
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from treeattn.devices.layout import Layout, count_devices
from treeattn.devices.shards import over_shards
from treeattn.idea.arrays import Array, accumulation_dtype, integer
from treeattn.kernel.quantized import LARGEST, dequantize, quantize


class Quantized(NamedTuple):
    """Keys or values in 8 bits: numbers (b, n, h_kv, d), times scale (b, n, h_kv, 1), float32."""

    numbers: Array
    scale: Float[Array, "b n h_kv 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def dtype(self):
        return self.numbers.dtype


# Keys or values of a layer, of a cache or of new tokens.
Entries = Float[Array, "b _ h_kv d"] | Quantized


class Cache(NamedTuple):
    """One pair of arrays a layer, each (batch, capacity, kv_heads, head_dim), sharded along
    capacity, and along batch and kv_heads where the mesh has axes for these; and how many tokens of
    each text they hold. In 8 bits each array is a `Quantized` pair, which lies as an array does.

    Shard r of p, rows r·capacity/p and on, holds tokens r, r + p, r + 2p, … (`token_rows`).
    """

    k: tuple[Entries, ...]
    v: tuple[Entries, ...]
    lengths: Int[Array, " b"]

    @property
    def capacity(self) -> int:
        """The number of tokens that fit, for each text."""
        return self.k[0].shape[1]

    @property
    def layers(self) -> tuple[tuple[Entries, Entries], ...]:
        """The layers' (k, v)."""
        return tuple(zip(self.k, self.v, strict=True))


# What a step's tokens bring: each layer's (k, v), (batch, l, kv_heads, head_dim).
NewEntries = tuple[tuple[Entries, Entries], ...]


def as_cached(k: Float[Array, "b l h_kv d"], v: Float[Array, "b l h_kv d"], dtype: str | None):
    """((k, v), entries): new keys and values as a cache of this dtype gives them back, and what is
    to be written there.

    A token is attended to as it will be found in the cache, so that neither chunks nor drafts
    change what a text means.
    """
    if dtype is None:
        return (k, v), (k, v)

    def rounded(x):
        numbers, scale = quantize(x, dtype)
        scale = scale.astype(jnp.float32)
        floats = dequantize(numbers, scale.astype(accumulation_dtype(x))).astype(x.dtype)
        return floats, Quantized(numbers, scale[..., None])

    return tuple(zip(rounded(k), rounded(v), strict=True))


def shards_of(layout: Layout | None) -> int:
    """The number of shards that a text is dealt over."""
    return 1 if layout is None else count_devices(layout.mesh, layout.axes)


def _on_devices(body, layout: Layout | None, *kinds: str):
    """`body` under `shard_map`, from arguments of these kinds to what lies as a cache does.

    "cache"; "entries", which are whole on every device that has keys of their texts; "rows" (b,).
    """
    if layout is None:
        return over_shards(body, None, (), ())
    specs = {"cache": layout.spec(layout.axes), "entries": layout.spec(), "rows": layout.rows()}
    given = tuple(specs[kind] for kind in kinds)
    return over_shards(body, layout.mesh, layout.axes, given, specs["cache"])


def shard_lengths(lengths: Int[Array, " b"], rank, p: int) -> Int[Array, " b"]:
    """How many of the first `lengths` tokens lie on device `rank` of `p`."""
    return (lengths - rank + p - 1) // p


def token_rows(tokens, capacity: int, p: int):
    """Where tokens lie along the capacity axis of a cache over `p` devices."""
    return tokens % p * (capacity // p) + tokens // p


def new_cache(
    layers: int,
    batch: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    dtype,
    layout: Layout | None,
) -> Cache:
    """An empty cache for `capacity` tokens a text, rounded up to a multiple of the shards.

    dtype: of floats, or one of 8 bits, which has scales beside it
    """
    batch = integer("batch", batch, 1)
    capacity = integer("capacity", capacity, 1)
    p = shards_of(layout)
    shape = (batch, p * -(-capacity // p), kv_heads, head_dim)
    return _empty(layers, shape, jnp.dtype(dtype), layout)()


@functools.cache  # so that another cache of the same kind compiles nothing
def _empty(
    layers: int, shape: tuple[int, ...], dtype, layout: Layout | None
) -> Callable[[], Cache]:
    """A compiled function that makes an empty cache, every shard on its device."""

    def zeros():
        numbers = jnp.zeros(shape, dtype)
        if dtype not in LARGEST:
            return numbers
        return Quantized(numbers, jnp.zeros((*shape[:3], 1), jnp.float32))

    def build():
        k = tuple(zeros() for _ in range(layers))
        v = tuple(zeros() for _ in range(layers))
        return Cache(k, v, jnp.zeros(shape[0], jnp.int32))

    shardings = None
    if layout is not None:
        along = (NamedSharding(layout.mesh, layout.spec(layout.axes)),) * layers
        shardings = Cache(along, along, NamedSharding(layout.mesh, P()))
    return jax.jit(build, out_shardings=shardings)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="cached")
def append(cached, new, lengths: Int[Array, " b"], counts: Int[Array, " b"], layout, select=None):
    """A layer's part of a cache, with new tokens after those of each text.

    cached, new: keys and values, (b, capacity, h_kv, d) and (b, l, h_kv, d)
    lengths:     how many tokens of each text the cache holds
    counts:      how many of the new tokens each text gets
    select:      (b, m) which, in order, as indices into the new tokens; the first ones when None

    With lengths [7], counts [2] and select [[0, 2, 2]], new tokens 0 and 2 become tokens 7 and 8.
    """
    p = shards_of(layout)

    def body(rank, cached, new, lengths, counts, select):
        if select is not None:
            at = select[..., None, None]
            new = jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=1), new)
        m = jax.tree.leaves(new)[0].shape[1]
        past_the_end = jax.tree.leaves(cached)[0].shape[1]
        tokens = lengths[:, None] + jnp.arange(m)
        real = jnp.arange(m) < counts[:, None]
        mine = real & (tokens % p == rank)
        rows = jnp.where(mine, tokens // p, past_the_end)  # where nothing is written
        texts = jnp.arange(len(lengths))[:, None]
        return jax.tree.map(lambda x, y: x.at[texts, rows].set(y, mode="drop"), cached, new)

    kinds = "cache", "entries", "rows", "rows", "rows"
    return _on_devices(body, layout, *kinds)(cached, new, lengths, counts, select)


advance = jax.jit(jnp.add)  # lengths by counts: dispatched at once, as the layers' programs are


def wait_on_cpus(arrays, mesh: Mesh | None) -> None:
    """Return when `arrays` are there, if simulated devices compute them: before `append`.

    XLA:CPU keeps a thread for a small program while that waits for its inputs. With one for every
    device, none is left for the collectives that the inputs come from, and nothing moves again.
    """
    if mesh is not None and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)


def fill(cached, new, layout: Layout):
    """A layer's part of an empty cache, with the tokens of whole prompts.

    cached, new: keys and values, (b, capacity, h_kv, d) and (b, n, h_kv, d), both sharded along
    axis 1, `new` in the text's order. Where p² divides n, an all-to-all deals the tokens out: of
    8 tokens, two devices have 0 1 2 3 and 4 5 6 7, and then 0 2 4 6 and 1 3 5 7. Else, for prompts
    of fewer than p² tokens, each device gets all of them and keeps its own.
    """
    p = shards_of(layout)
    b, n = new[0].shape[:2]
    if n % (p * p):
        return append(cached, new, jnp.zeros(b, jnp.int32), jnp.full(b, n, jnp.int32), layout)

    def body(_, cached, new):
        def deal(x, y):
            # This device's n/p neighbours as n/p² rounds of p cards, one for each device.
            y = y.reshape(len(y), -1, p, *y.shape[2:])
            y = jax.lax.all_to_all(y, layout.axes, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
            y = y[:, : x.shape[1]]  # what does not fit is padding
            return jax.lax.dynamic_update_slice_in_dim(x, y, 0, axis=1)

        return jax.tree.map(deal, cached, new)

    return _on_devices(body, layout, "cache", "cache")(cached, new)


def grow(cache: Cache, capacity: int, layout: Layout | None) -> Cache:
    """The same texts in a cache of at least `capacity` tokens. No token changes its device."""
    p = shards_of(layout)
    capacity = integer("capacity", capacity, 1)
    added = -(-capacity // p) - cache.capacity // p
    if added < 0:
        raise ValueError(f"capacity: expected at least the {cache.capacity} of now, got {capacity}")
    return Cache(*_with_more_rows((cache.k, cache.v), added, layout), cache.lengths)


@functools.partial(jax.jit, static_argnames=("added", "layout"))
def _with_more_rows(arrays, added: int, layout: Layout | None):
    """Arrays of a cache, with `added` rows at the end of each shard."""

    widths = (0, 0), (0, added), (0, 0), (0, 0)

    def body(_, arrays):
        return jax.tree.map(lambda x: jnp.pad(x, widths), arrays)

    return _on_devices(body, layout, "cache")(arrays)


def in_order(x: Float[Array, "b n ..."], p: int) -> np.ndarray:
    """A cache array with its tokens in the text's order: (batch, capacity, …), on the host."""
    x = np.asarray(x)
    return x[:, token_rows(np.arange(x.shape[1]), x.shape[1], p)]
