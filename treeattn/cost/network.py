"""Collectives on a topology, simulated: who sends what to whom, and when it is there.

A collective is a list of rounds, a round a set of messages (from, to, bytes). Each device has a
clock. A message starts when both its ends have finished their rounds before; it takes its
latency, once for every hop, and the time of its most loaded link, on which the messages of a
round share the bandwidth; then both clocks stand at its arrival. Devices without a message in a
round wait for nobody.

`SCHEDULES` has the rounds of each algorithm; `treeattn.cost.closed_forms` has formulas for the same
times.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from treeattn.cost.formulas import Number, check_count
from treeattn.cost.topology import Level, Topology


class Round(NamedTuple):
    """Messages that are sent at the same time: the devices (messages,), and the bytes of each."""

    source: np.ndarray
    target: np.ndarray
    message_bytes: Number


class Simulated(NamedTuple):
    """What a simulation found.

    seconds:    when the last device has finished
    rounds:     that were run
    sent_bytes: (p,) by each device
    """

    seconds: float
    rounds: int
    sent_bytes: np.ndarray


class Sent(NamedTuple):
    """A round as it was run: the messages, and when each began and arrived. (messages,) each."""

    round: Round
    start: np.ndarray
    arrival: np.ndarray


def run(rounds: Iterable[Round], p: int, topology: Topology) -> Iterator[Sent]:
    """Run the rounds on the first p devices of the topology, all of which start at 0.

    Raises ValueError when the topology has fewer devices.
    """
    topology.check_devices(p)
    clock = np.zeros(p)
    previous = duration = None
    for this in rounds:
        if this is not previous:  # the same round again takes as long again
            previous, duration = this, message_seconds(this, topology)
        start = np.maximum(clock[this.source], clock[this.target])
        np.maximum.at(clock, this.source, start + duration)
        np.maximum.at(clock, this.target, start + duration)
        yield Sent(this, start, start + duration)


def simulate(rounds: Iterable[Round], p: int, topology: Topology) -> Simulated:
    """What `run` comes to: when all is done, how many rounds that took, and who sent how much."""
    topology.check_devices(p)
    seconds, count, sent = 0.0, 0, np.zeros(p)
    for this, _, arrival in run(rounds, p, topology):
        seconds = max(seconds, float(arrival.max()))
        sent += np.bincount(this.source, minlength=p) * this.message_bytes
        count += 1
    return Simulated(seconds, count, sent)


def message_seconds(this: Round, topology: Topology) -> np.ndarray:
    """Seconds of each message of a round, from when both of its ends are ready. (messages,)"""
    level = topology.level_of(this.source, this.target)
    seconds = np.zeros(len(level))
    for i, links in enumerate(topology.levels):
        (here,) = np.nonzero(level == i)
        if not len(here):
            continue
        message, used = _links(this.source[here], this.target[here], i, topology)
        _, used = np.unique(used, return_inverse=True)
        busiest = np.zeros(len(here), int)
        np.maximum.at(busiest, message, np.bincount(used)[used])
        hops = np.bincount(message, minlength=len(here)) if _is_torus(links) else 1
        seconds[here] = links.latency * hops + busiest * this.message_bytes / links.bandwidth
    return seconds


def _is_torus(level: Level) -> bool:
    return isinstance(level.wiring, tuple)


def _links(source, target, i: int, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """(message, link) for each link that each message uses on level i; links are just numbers."""
    level, unit = topology.levels[i], topology.unit_sizes()[i]
    every = np.arange(len(source))
    if _is_torus(level):
        return _torus_links(source, target, level.wiring)
    if level.wiring == "mesh":  # one from each device to each other one
        return every, source * level.size + target % level.size
    ports = level.links or unit
    out_of, into = (d // unit * ports + d % unit * ports // unit for d in (source, target))
    return np.concatenate([every, every]), np.concatenate([2 * out_of, 2 * into + 1])


def _torus_links(source, target, sides: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """As `_links`: the shorter way around each dimension, one dimension after another."""
    at, goal = torus_coordinates(source, sides), torus_coordinates(target, sides)
    messages, links = [], []
    for axis, side in enumerate(sides):
        ahead = (goal[axis] - at[axis]) % side
        direction = np.where(2 * ahead <= side, 1, -1)
        while (moving := np.nonzero(at[axis] != goal[axis])[0]).size:
            here = np.ravel_multi_index(at[:, moving], sides)
            messages.append(moving)
            links.append((here * len(sides) + axis) * 2 + (direction[moving] > 0))
            at[axis, moving] = (at[axis, moving] + direction[moving]) % side
    return np.concatenate(messages), np.concatenate(links)


def torus_coordinates(device: np.ndarray, sides: tuple[int, ...]) -> np.ndarray:
    """Coordinates (dimensions, devices) along a path on which successive devices are neighbours.

    Each row is walked forth and the next one back. Where all sides are even, the last device is
    a neighbour of the first one, too.
    """
    coordinates, rest = [], np.asarray(device)
    for axis in range(len(sides)):
        block = math.prod(sides[axis + 1 :])
        index, rest = rest // block, rest % block
        rest = np.where(index % 2 == 1, block - 1 - rest, rest)
        coordinates.append(index)
    return np.stack(coordinates)


# --------------------------------------------------------------------------- algorithms


def ring_pass(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """p − 1 rounds, in which each device sends a whole message to the next one.

    What visits everybody: a ring of caches, and an all-gather.
    """
    ring = np.arange(p)
    this = Round(ring, (ring + 1) % p, message_bytes)
    yield from [this] * (p - 1)


def round_trip(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """p such rounds: what visits everybody and comes home, as the queries of pass-Q do."""
    ring = np.arange(p)
    this = Round(ring, (ring + 1) % p, message_bytes)
    yield from [this] * p


def ring_allreduce(p: int, message_bytes: Number, g: int = 1) -> Iterator[Round]:
    """2 (p − 1) rounds of 1/p of the message: the sums are scattered, then gathered."""
    for _ in range(2):
        yield from ring_pass(p, message_bytes / p)


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
    "ring": ring_pass,
    "round-trip": round_trip,
    "all-gather": ring_pass,
    "ring-allreduce": ring_allreduce,
    "tree-allreduce": tree_allreduce,
    "hierarchical-allreduce": hierarchical_allreduce,
    "butterfly": butterfly,
}


def schedule(kind: str, p: int, message_bytes: Number, topology: Topology) -> Iterator[Round]:
    """The rounds of a collective on a topology; a ring within its nodes where it has nodes.

    Raises ValueError for another kind than those of `SCHEDULES`.
    """
    check_count("p", p)
    if kind not in SCHEDULES:
        raise ValueError(f"kind: expected one of {', '.join(SCHEDULES)}, got {kind!r}")
    return SCHEDULES[kind](p, message_bytes, min(p, topology.node_size))
