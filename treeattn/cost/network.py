"""How long collectives take on a topology, simulated.

A message starts when its sender has what it is to send, and when its links are free. It keeps
them for as long as its bytes take, and is there a latency later, one for every hop: a device may
send the next message while the last one travels. Messages of one round that share a link share
its bandwidth. This is the α-β model, as in Thakur, Rabenseifner and Gropp (2005, "Optimization of
collective communication operations in MPICH"), with data dependencies where they assume rounds.

A collective that the library runs is pipelined: a device hands on the first bytes before the last
have come. One that JAX writes as permutes is not, and pays a launch for each round.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from treeattn.cost.formulas import Number
from treeattn.cost.schedules import Round, schedule
from treeattn.cost.topology import Topology

# Collectives of which a library has several algorithms, and takes the fastest.
CHOICES = {
    "allreduce": ("ring-allreduce", "tree-allreduce"),
    "all-gather": ("ring-gather", "doubling-gather"),
    "reduce-scatter": ("ring-scatter", "halving-scatter"),
}
# What JAX writes as a permute a round, each a launch of its own.
PERMUTES = ("ring", "round-trip", "butterfly")
ALGORITHMS = dict.fromkeys(("one-shot", "in-switch"), "direct")
ALGORITHMS |= dict.fromkeys(("tree-allreduce", "hierarchical-allreduce"), "tree")
# What the library runs as several rings or trees at once, each leaving a node by another card.
CHANNELS = ("ring-allreduce", "tree-allreduce", "ring-gather", "ring-scatter")


class Sent(NamedTuple):
    """A round as it was run: the messages, and when each began and arrived. (messages,) each."""

    round: Round
    start: np.ndarray
    arrival: np.ndarray


def run(
    rounds: Iterable[Round], p: int, topology: Topology, *, pipelined: bool = True
) -> Iterator[Sent]:
    """Run the rounds on the first p devices of the topology, all of which start at 0.

    Raises ValueError when the topology has fewer devices.
    """
    topology.check_devices(p)
    first, last, free, loads = np.zeros(p), np.zeros(p), np.zeros(_link_count(topology, p)), {}
    for this in list(rounds):  # all of them are kept: a round is known by its identity
        latency, seconds, message, link = loads.get(id(this)) or _load(this, topology)
        loads[id(this)] = latency, seconds, message, link
        start = np.zeros(len(seconds)) if this.own else (first if pipelined else last)[this.source]
        np.maximum.at(start, message, free[link])
        end = start + seconds
        if not this.own:
            end = np.maximum(end, last[this.source])
        np.maximum.at(free, link, np.maximum(end, start + topology.gap)[message])
        np.maximum.at(first, this.target, start + latency)
        np.maximum.at(last, this.target, end + latency)
        yield Sent(this, start, end + latency)


def simulate(
    rounds: Iterable[Round], p: int, topology: Topology, *, pipelined: bool = True
) -> float:
    """What `run` comes to: seconds until the last device has all that it gets."""
    sent = run(rounds, p, topology, pipelined=pipelined)
    return max((float(x.arrival.max()) for x in sent), default=0.0)


def _link_count(topology: Topology, p: int) -> int:
    """More than the largest number that `_load` gives a link."""
    widest = max(x.size if x.wiring == "mesh" else 6 for x in topology.levels)
    return 2 * len(topology.levels) * widest * max(p, topology.levels[0].size)


def _load(this: Round, topology: Topology) -> tuple[np.ndarray, ...]:
    """Latencies and seconds of the messages, and (message, link) for every link that one uses."""
    level = topology.level_of(this.source, this.target)
    latency, seconds = np.zeros(len(level)), np.zeros(len(level))
    pairs = [np.zeros((2, 0), int)]
    for i, links in enumerate(topology.levels):
        (here,) = np.nonzero(level == i)
        if not len(here):
            continue
        message, used = _links(this.source[here], this.target[here], i, topology)
        _, number = np.unique(used, return_inverse=True)
        busiest = np.zeros(len(here), int)
        np.maximum.at(busiest, message, np.bincount(number)[number])
        hops = np.bincount(message, minlength=len(here)) if isinstance(links.wiring, tuple) else 1
        latency[here] = links.latency * hops
        seconds[here] = busiest * this.message_bytes / links.bandwidth
        pairs.append(np.stack([here[message], used * len(topology.levels) + i]))
    return latency, seconds, *np.concatenate(pairs, axis=1)


def _links(source, target, i: int, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """(message, link) for each link that each message uses on level i; links are just numbers."""
    level, unit = topology.levels[i], topology.unit_sizes()[i]
    every = np.arange(len(source))
    if isinstance(level.wiring, tuple):
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

    Where all sides are even, the last device is a neighbour of the first one, too.
    """
    coordinates, rest = [], np.asarray(device)
    for axis in range(len(sides)):
        block = math.prod(sides[axis + 1 :])
        index, rest = rest // block, rest % block
        rest = np.where(index % 2 == 1, block - 1 - rest, rest)
        coordinates.append(index)
    return np.stack(coordinates)


# ------------------------------------------------------------------------- a collective's costs


@functools.lru_cache(maxsize=65536, typed=True)
def collective_seconds(kind: str, p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of one collective on p devices, by the fastest protocol, its launches included.

    kind and message_bytes as in `schedules.SCHEDULES`; or one of `CHOICES`, for its fastest
    algorithm. Raises ValueError for an unknown kind, and when the topology has fewer devices.
    """
    topology.check_devices(p)
    if kind in CHOICES:
        return min(collective_seconds(k, p, message_bytes, topology) for k in CHOICES[kind])
    rounds = list(schedule(kind, p, float(message_bytes), topology.node_size))
    if p == 1:
        return 0.0
    launches = collective_launches(kind, p)
    return min(
        launches * spoken.launch + simulate(rounds, p, spoken, pipelined=launches == 1)
        for spoken in topology.spoken(ALGORITHMS.get(kind, "ring"), p, spread=kind in CHANNELS)
    )


@functools.lru_cache(maxsize=4096)
def _counts(kind: str, p: int, g: int) -> tuple[int, float]:
    """(rounds, messages that the device that sends most sends)."""
    sent, count = np.zeros(p), 0
    for this in schedule(CHOICES.get(kind, (kind,))[0], p, 1.0, g):
        np.add.at(sent, this.source, this.message_bytes)
        count += 1
    return count, float(sent.max())


def collective_rounds(kind: str, p: int, g: int = 1) -> int:
    """Rounds of a collective on p devices, g in a node; of one of `CHOICES`, of its ring."""
    return _counts(kind, p, g)[0]


def collective_sent_bytes(kind: str, p: int, message_bytes: Number, g: int = 1) -> Number:
    """Bytes that the device that sends most puts on its links; of one of `CHOICES`, in its ring.

    A ring's Allreduce sends the least that any can (v1 eq. 33, v2 eq. 12), but for in-switch ones.
    """
    return _counts(kind, p, g)[1] * message_bytes


def collective_launches(kind: str, p: int) -> int:
    """Collectives of the program: a collective-permute a round for some, one for the others."""
    return collective_rounds(kind, p) if kind in PERMUTES else 1
