"""Where the keys of a cache are, if p devices share its kv_len slots.

Device r has the slots r·t … (r+1)·t − 1, with t = kv_len / p. Key i of a contiguous cache is in
slot i, so a cache that is half full keeps half of the devices busy. Key i of a striped cache is in
slot (i mod p)·t + i div p: neighbouring keys are on neighbouring devices, and all are busy.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike

from treeattn.checks import Array, as_array, check_integers, integer


def striped_slot(position: ArrayLike, kv_len: int, devices: int) -> Array:
    """The slot of the key at `position` 0 … kv_len − 1 of its text, in a striped cache.

    Elementwise, for integers of any shape. Raises ValueError if the devices cannot share kv_len
    slots evenly, TypeError for positions that are not integers.

    >>> print(striped_slot([0, 1, 2, 3, 4], kv_len=8, devices=4))
    [0 2 4 6 1]
    """
    position, size = _check("position", position, kv_len, devices)
    return position % devices * size + position // devices


def striped_position(slot: ArrayLike, kv_len: int, devices: int) -> Array:
    """The position in its text of the key in `slot`, the inverse of `striped_slot`.

    A mask or a bias by positions (a window, ALiBi) is given to `tree_decode` in the order of the
    slots: for slots 0 … kv_len − 1 this says which position each of them is. Raises as
    `striped_slot` does.

    >>> print(striped_position([0, 1, 2, 3], kv_len=8, devices=4))
    [0 4 1 5]
    """
    slot, size = _check("slot", slot, kv_len, devices)
    return slot % size * devices + slot // size


def shard_lengths(
    lengths: ArrayLike, rank: Array | int, kv_len: int, devices: int, *, striped: bool = False
) -> Array:
    """How many keys device `rank` has of rows that have `lengths` keys in all, 0 … kv_len / p.

    Its keys are in the first slots of its shard, so these are the `kv_lengths` of `attend` on that
    device. rank is `jax.lax.axis_index` inside `shard_map`. Raises as `striped_slot` does.

    >>> print([int(shard_lengths(5, rank, kv_len=8, devices=4)) for rank in range(4)])
    [2, 2, 1, 0]
    >>> print([int(shard_lengths(5, rank, kv_len=8, devices=4, striped=True)) for rank in range(4)])
    [2, 1, 1, 1]
    """
    lengths, size = _check("lengths", lengths, kv_len, devices)
    own = (lengths - rank + devices - 1) // devices if striped else lengths - rank * size
    return jnp.clip(own, 0, size)


def _check(name: str, x: ArrayLike, kv_len: int, devices: int) -> tuple[Array, int]:
    """(x as an array of integers, slots of each device)."""
    x = as_array(name, x)
    check_integers(**{name: x})
    devices = integer("devices", devices, 1)
    kv_len = integer("kv_len", kv_len, 0)
    if kv_len % devices:
        raise ValueError(f"kv_len: expected a multiple of {devices} devices, got {kv_len}")
    return x, kv_len // devices
