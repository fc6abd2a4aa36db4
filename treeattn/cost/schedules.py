"""Collectives as algorithms: who sends what to whom, round by round.

A collective is a list of rounds, a round a set of messages that are sent at the same time.
`treeattn.cost.network` says how long they take.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from treeattn.cost.formulas import Number, check_count
from treeattn.cost.topology import Topology


class Round(NamedTuple):
    """Messages that are sent at the same time: the devices (messages,), and the bytes of each."""

    source: np.ndarray
    target: np.ndarray
    message_bytes: Number


def around(p: int, message_bytes: Number, rounds: int) -> Iterator[Round]:
    """So many rounds, in which each device sends a message to the next one."""
    ring = np.arange(p)
    yield from [Round(ring, (ring + 1) % p, message_bytes)] * rounds


def tree_allreduce(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """2 ⌈log₂ p⌉ rounds of the whole message: up a binary tree to device 0, and down again."""
    up = []
    for stride in strides(p):
        child = np.arange(stride, p, 2 * stride)
        up.append((child, child - stride))
    for child, parent in up:
        yield Round(child, parent, message_bytes)
    for child, parent in reversed(up):
        yield Round(parent, child, message_bytes)


def butterfly(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """⌊log₂ p⌋ rounds in which partners swap whole messages; two more unless p is a power of 2.

    As `treeattn.devices` does it: the devices beyond the largest power of two hand their states
    in, and get the result back.
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


def hierarchical_allreduce(p: int, message_bytes: Number, g: int) -> Iterator[Round]:
    """A ring within each node of g devices, a tree between the nodes.

    In each node a ring scatters the sums, 1/g of the message to each device; devices of the same
    rank in their nodes reduce theirs by a tree across the nodes; and a ring in each node gathers
    the results. Where the devices do not fill their nodes, a plain tree takes its place.
    """
    if p % g:
        yield from tree_allreduce(p, message_bytes)
        return
    rank = np.arange(p)
    within = Round(rank, rank // g * g + (rank + 1) % g, message_bytes / g)
    yield from [within] * (g - 1)
    for across in tree_allreduce(p // g, message_bytes / g):
        source, target = (np.add.outer(x * g, np.arange(g)).ravel() for x in across[:2])
        yield Round(source, target, message_bytes / g)
    yield from [within] * (g - 1)


def strides(p: int) -> list[int]:
    """1, 2, 4, … below p."""
    return [1 << k for k in range((p - 1).bit_length())]


# The rounds of each collective: (p, message bytes, devices of a node) -> rounds. What a message
# is: all of what an Allreduce reduces; what each device contributes, to a ring or an all-gather.
SCHEDULES: dict[str, Callable[[int, Number, int], Iterator[Round]]] = {
    # What visits everybody, and what comes home besides, as the queries of pass-Q do.
    "ring": lambda p, size, g: around(p, size, p - 1),
    "round-trip": lambda p, size, g: around(p, size, p),
    "all-gather": lambda p, size, g: around(p, size, p - 1),
    # The sums are scattered, then gathered.
    "ring-allreduce": lambda p, size, g: around(p, size / p, 2 * (p - 1)),
    "tree-allreduce": tree_allreduce,
    "hierarchical-allreduce": hierarchical_allreduce,
    "butterfly": butterfly,
}


def schedule(kind: str, p: int, message_bytes: Number, topology: Topology) -> Iterator[Round]:
    """The rounds of a collective on a topology; a ring within its nodes where it has nodes.

    Raises ValueError for another kind than those of `SCHEDULES`.
    """
    return rounds_of(kind, p, message_bytes, topology.node_size)


def rounds_of(kind: str, p: int, message_bytes: Number, g: int) -> Iterator[Round]:
    """As `schedule`, for nodes of g devices."""
    check_count("p", p)
    if kind not in SCHEDULES:
        raise ValueError(f"kind: expected one of {', '.join(SCHEDULES)}, got {kind!r}")
    return SCHEDULES[kind](p, message_bytes, min(p, g))


def repeated(rounds: Iterable[Round]) -> Iterator[tuple[Round, int]]:
    """(round, times) for each run of one and the same round."""
    this, times = None, 0
    for new in rounds:
        if times and new is not this:
            yield this, times
            times = 0
        this, times = new, times + 1
    if times:
        yield this, times
