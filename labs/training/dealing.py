"""Nodes of a tree dealt over devices, so that all devices compute as much attention.

A tree's nodes are in depth-first order, and attention reads them in blocks: a block of queries
visits the blocks whose keys it may see. Late blocks see more than early blocks, so with contiguous
shards the last devices compute most. The visited pairs do not depend on the devices that hold the
blocks. So blocks can be dealt in any order, as many to each device, and the work of each device
can be counted before anything runs.
"""

import numpy as np
from jaxtyping import Int

from labs.training.attention import BLOCK
from labs.training.rows import check_ends, check_nodes

DEALINGS = ("contiguous", "striped", "balanced")


def deal_tree(
    ends: Int[np.ndarray, " nodes"], devices: int, *, dealing: str = "balanced"
) -> Int[np.ndarray, " places"]:
    """(devices · t,) int32: the node at each place of a sequence, −1 at an empty place.

    Device r has the places r · t … (r + 1) · t − 1, as `tree_ring_attention` shards them. They hold
    whole blocks of nodes, in ascending order, and only the last blocks have empty places. Index
    queries, keys and values by x[:, nodes], and pass nodes=nodes to `tree_ring_attention`.

    ends:    (n,) where each node's subtree ends, of nodes in depth-first order (`pack_rows`)
    dealing: "contiguous": the first blocks to the first device, the next to the second
             "striped":    block by block in turn, as Striped Attention (Brandon et al. 2023) does
                           with tokens
             "balanced":   the blocks that visit most come first, and each goes to the device with
                           room that has the least work so far

    Blocks have up to 256 nodes. With fewer than 257 nodes a device, each device has one block, and
    no dealing is better than another.

    Raises TypeError if ends are not integers, and ValueError for a wrong shape, an order that is
    not depth first, fewer than one device, and an unknown dealing.
    """
    ends = _checked(ends)
    if devices < 1:
        raise ValueError(f"devices: expected at least 1, got {devices}")
    if dealing not in DEALINGS:
        raise ValueError(f"dealing: expected one of {DEALINGS}, got {dealing!r}")
    n = len(ends)
    size = _block(-(-n // devices))
    each = -(-n // (devices * size))
    blocks = np.arange(devices * each)
    if dealing == "contiguous":
        owners = blocks // max(each, 1)
    elif dealing == "striped":
        owners = blocks % devices
    else:
        owners = _balanced_owners(_visited_from(ends, size, len(blocks)), devices, each)
    by_owner = np.argsort(owners, kind="stable")
    nodes = by_owner[:, None] * size + np.arange(size)
    return np.where(nodes < n, nodes, -1).astype(np.int32).ravel()


def _block(places: int) -> int:
    """Nodes of a block on a device of so many places."""
    return max(min(BLOCK, places), 1)


def _checked(ends) -> Int[np.ndarray, " nodes"]:
    return np.asarray(check_ends(np.asarray(ends)[None])[0])


def _visited_from(ends, size: int, blocks: int) -> Int[np.ndarray, " blocks"]:
    """How many blocks of keys each block of queries visits; 0 for a block without nodes."""
    nodes = np.full(blocks * size, -1)
    nodes[: len(ends)] = np.arange(len(ends))
    return _visits(ends, nodes, size).sum(axis=1)


def _balanced_owners(work, devices: int, each: int) -> Int[np.ndarray, " blocks"]:
    """The device of each block: `each` blocks for every device, the largest dealt first."""
    owners = np.zeros(len(work), int)
    load = np.zeros(devices, int)
    room = np.full(devices, each)
    for block in np.argsort(-work, kind="stable"):
        least = np.where(room > 0, load, np.iinfo(load.dtype).max).argmin()
        owners[block] = least
        load[least] += work[block]
        room[least] -= 1
    return owners


def _visits(ends, nodes, size: int):
    """(blocks, blocks) bool: the blocks of keys that each block of queries at these places visits.

    A block of queries visits a block of keys if some key's subtree may still be open, and some key
    is not after the last query. `tree_states` checks each pair, and never computes more.
    """
    blocks = nodes.reshape(-1, size)
    there = blocks >= 0
    last_end = np.where(there, ends[blocks], 0).max(axis=1)
    first = np.where(there, blocks, np.iinfo(np.int32).max).min(axis=1)
    last = blocks.max(axis=1)
    return (last_end > first[:, None]) & (first <= last[:, None])


def blocks_by_device(
    ends: Int[np.ndarray, " nodes"], nodes: Int[np.ndarray, " places"], devices: int
) -> Int[np.ndarray, "devices devices"]:
    """How many blocks of scores device r computes of the keys of device s, at [r, s].

    A device's row adds up to all that it computes. In step i of a ring, device r computes with the
    keys of device r − i, and all devices wait for the busiest. If all keys are gathered first, only
    the rows' sums count.

    ends:  (n,), as in `deal_tree`
    nodes: (devices · t,) the node at each place, −1 at an empty one, as `deal_tree` returns them

    Raises TypeError and ValueError as `deal_tree` does, and ValueError if the devices do not share
    the places evenly, or the places do not hold every node once.
    """
    ends = _checked(ends)
    nodes = check_nodes(nodes, len(ends))
    if len(nodes) % devices:
        raise ValueError(f"nodes: expected a multiple of {devices} places, got {len(nodes)}")
    shard = len(nodes) // devices
    size = _block(shard)
    nodes = nodes.reshape(devices, shard)
    nodes = np.pad(nodes, ((0, 0), (0, -shard % size)), constant_values=-1)
    blocks = nodes.shape[1] // size
    visits = _visits(ends, nodes, size).reshape(devices, blocks, devices, blocks)
    return visits.sum(axis=(1, 3))
