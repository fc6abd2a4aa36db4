"""Collectives as algorithms: the messages between devices, round by round.

A collective is a list of rounds, a round a set of messages that are sent at the same time.
`labs.cost.network` says how long they take.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from labs.cost.workload import Number, whole


class Round(NamedTuple):
    """Messages that are sent at the same time: the devices (messages,), and the bytes of each.

    at_once: whether the devices send data that they had from the beginning, without waiting
    """

    source: np.ndarray
    target: np.ndarray
    message_bytes: Number
    at_once: bool = False


def around(p: int, message_bytes: Number, rounds: int) -> Iterator[Round]:
    """Rounds in which each device sends a message to the next device."""
    ring = np.arange(p)
    yield from [Round(ring, (ring + 1) % p, message_bytes)] * rounds


def tree_allreduce(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """Two trees with half of the message each, up and down: NCCL's double binary tree.

    Each tree is a chain in a node, and a binary tree of depth ⌊log₂ nodes⌋ between the nodes'
    first devices. The second tree has the nodes in reverse order.
    """
    rank = np.arange(p)
    up = []
    for place in range(min(g, p) - 1, 0, -1):
        child = rank[rank % g == place]
        up.append((child, child - 1))
    nodes = -(-p // g)
    depth = nodes.bit_length() - 1
    for level in range(depth, 0, -1):
        child = np.arange(2**level - 1, min(2 ** (level + 1) - 1, nodes))
        parent = (child - 1) // 2
        both = [np.concatenate([x, nodes - 1 - x]) * g for x in (child, parent)]
        up.append(tuple(both))
    chain = min(g, p) - 1
    sizes = [message_bytes] * chain + [message_bytes / 2] * depth
    for (child, parent), size in zip(up, sizes, strict=True):
        yield Round(child, parent, size)
    for (child, parent), size in zip(reversed(up), reversed(sizes), strict=True):
        yield Round(parent, child, size)


def butterfly(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """⌊log₂ p⌋ rounds in which partners swap whole messages; two more unless p is a power of 2.

    treeattn's `merge_across` does the same. It is known as recursive doubling.
    """
    core = 1 << (p.bit_length() - 1)
    beyond = np.arange(core, p)
    if len(beyond):
        yield Round(beyond, beyond - core, message_bytes)
    for stride in strides(core):
        rank = np.arange(core)
        yield Round(rank, rank ^ stride, message_bytes)
    if len(beyond):
        yield Round(beyond - core, beyond, message_bytes)


def doubling_gather(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """⌈log₂ p⌉ rounds in which a device forwards all its messages: 1, 2, 4, … (Bruck)."""
    rank = np.arange(p)
    for stride in strides(p):
        yield Round(rank, (rank - stride) % p, message_bytes * min(stride, p - stride))


def halving_scatter(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """The doubling gather backwards, with sums: 1/p of the message to each device."""
    for source, target, size, _ in reversed(list(doubling_gather(p, message_bytes / p))):
        yield Round(target, source, size)


def to_everybody(p: int, message_bytes: Number) -> Iterator[Round]:
    """Each device sends a message to every other device, the next first, without waiting."""
    rank = np.arange(p)
    for distance in range(1, p):
        yield Round(rank, (rank + distance) % p, message_bytes, at_once=True)


def in_switch(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """A switch reads all messages, sends each device 1/p of their sum, and spreads these parts.

    Messages to a neighbour stand for those of the switch, because they load the same links.
    """
    yield from around(p, message_bytes, 1)
    yield from around(p, message_bytes / p, 1)


def strides(p: int) -> list[int]:
    """1, 2, 4, … below p."""
    return [1 << k for k in range((p - 1).bit_length())]


# The rounds of each collective: (p, message bytes, devices of a node) -> rounds. Message bytes are
# a device's whole input: the array that is reduced or exchanged, or the part that it contributes
# to a ring or an all-gather.
SCHEDULES: dict[str, Callable[[int, Number, int], Iterator[Round]]] = {
    "ring": lambda p, size, g: around(p, size, p - 1),
    "ring-gather": lambda p, size, g: around(p, size, p - 1),
    "doubling-gather": doubling_gather,
    "ring-scatter": lambda p, size, g: around(p, size / p, p - 1),
    "halving-scatter": halving_scatter,
    "all-to-all": lambda p, size, g: to_everybody(p, size / p),
    "ring-allreduce": lambda p, size, g: around(p, size / p, 2 * (p - 1)),
    "tree-allreduce": tree_allreduce,
    "butterfly": butterfly,
    "one-shot": lambda p, size, g: to_everybody(p, size),
    "in-switch": in_switch,
}


def schedule(kind: str, p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """The rounds of a collective on p devices, g of them in a node.

    Raises ValueError for a kind that is not in `SCHEDULES`.
    """
    p = whole("p", p)
    g = whole("g", g)
    if kind not in SCHEDULES:
        raise ValueError(f"kind: expected one of {', '.join(SCHEDULES)}, got {kind!r}")
    return SCHEDULES[kind](p, message_bytes, min(p, g))
