"""Which slot of a cache holds which key, and how many keys each device has.

`key_shards` says what a contiguous and a striped cache are.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike

from treeattn.checks import Array, Numbers, as_integers, bounded, integer, namespace


def striped_slot(position: ArrayLike | Numbers, kv_len: int, devices: int) -> Array:
    """The slot where a striped cache holds the key of the token at `position`, 0 … kv_len − 1.

    devices: how many lie along the keys' axes, which on a mesh of more axes are not all

    Elementwise, for integers of any shape; int32. Raises ValueError for a position outside, or if
    the devices cannot share kv_len slots evenly; TypeError for positions that are not integers. A
    traced position outside has the slot kv_len, which is in no cache, so `x.at[:, slot].set`
    writes nothing.

    >>> print(striped_slot([0, 1, 2, 3, 4], kv_len=8, devices=4))
    [0 2 4 6 1]
    """
    return _transposed("position", position, _slots_each(kv_len, devices), int(devices))


def striped_position(slot: ArrayLike | Numbers, kv_len: int, devices: int) -> Array:
    """The position of the token whose key is in `slot`: the inverse of `striped_slot`.

    `tree_decode` takes masks and biases in slot order. To build one from positions (a window,
    ALiBi), pass all slots, 0 … kv_len − 1. Raises as `striped_slot` does.

    >>> print(striped_position([0, 1, 2, 3], kv_len=8, devices=4))
    [0 4 1 5]
    """
    size = _slots_each(kv_len, devices)
    return _transposed("slot", slot, int(devices), size)


def shard_lengths(
    lengths: ArrayLike | Numbers,
    rank: Array | int,
    kv_len: int,
    devices: int,
    *,
    striped: bool = False,
) -> Array:
    """How many of a text's `lengths` keys are on device `rank`: 0 … kv_len / p, in int32.

    A text's keys fill the first slots of each shard, so the result is what `attend` on that device
    takes as `kv_lengths`. rank is `jax.lax.axis_index` inside `shard_map`. Raises as `striped_slot`
    does, for lengths outside 0 … kv_len; traced lengths are clipped.

    >>> print([int(shard_lengths(5, rank, kv_len=8, devices=4)) for rank in range(4)])
    [2, 2, 1, 0]
    >>> print([int(shard_lengths(5, rank, kv_len=8, devices=4, striped=True)) for rank in range(4)])
    [2, 1, 1, 1]
    """
    size = _slots_each(kv_len, devices)
    lengths = as_integers("lengths", lengths)
    lengths = bounded("lengths", lengths, 0, kv_len, f"0 to kv_len = {kv_len}")
    own = (lengths - rank + devices - 1) // devices if striped else lengths - rank * size
    return jnp.clip(own, 0, size).astype(jnp.int32)


def _slots_each(kv_len: int, devices: int) -> int:
    devices = integer("devices", devices, 1)
    kv_len = integer("kv_len", kv_len, 0)
    if kv_len % devices:
        raise ValueError(f"kv_len: expected a multiple of {devices} devices, got {kv_len}")
    return kv_len // devices


def _transposed(name: str, x, height: int, width: int) -> Array:
    """Where entry x of a (height, width) array is in its transpose, all counted line by line.

    For a traced x outside the array, the number of its entries.
    """
    n = height * width
    x = as_integers(name, x)
    inside = bounded(name, x, 0, n - 1, f"0 to {n - 1}")
    found = inside % width * height + inside // width
    return namespace(x).where(x == inside.astype(x.dtype), found, n)
