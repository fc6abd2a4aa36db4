"""How long collectives take on a topology, simulated.

Each device has a clock. A message starts when both its ends have finished their rounds before; it
takes its latency, once for every hop, and the time of its most loaded link, on which the messages
of a round share the bandwidth; then both clocks stand at its arrival. Devices without a message
in a round wait for nobody. This is the α-β model, as Thakur, Rabenseifner and Gropp (2005,
"Optimization of collective communication operations in MPICH", §3-4) use it for links of one
kind. Launch costs are not included, but in `merge_seconds`.

`treeattn.cost.schedules` has the rounds of each algorithm.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from treeattn.cost.formulas import Number
from treeattn.cost.schedules import Round, repeated, rounds_of, schedule
from treeattn.cost.topology import Topology


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
    for this in rounds:
        duration = message_seconds(this, topology)
        start = _send(clock, this, duration)
        yield Sent(this, start, start + duration)


def simulate(rounds: Iterable[Round], p: int, topology: Topology) -> Simulated:
    """What `run` comes to: when all is done, how many rounds that took, and who sent how much."""
    topology.check_devices(p)
    timed = ((*group, message_seconds(group[0], topology)) for group in repeated(rounds))
    return _simulate(timed, p)


def _simulate(timed: Iterable[tuple[Round, int, np.ndarray]], p: int) -> Simulated:
    """For rounds, how often in a row each is run, and the seconds (messages,) of its messages."""
    clock, sent, count = np.zeros(p), np.zeros(p), 0
    for this, times, duration in timed:
        ends = np.concatenate([this.source, this.target])
        for left in reversed(range(times)):
            before = clock[ends]
            _send(clock, this, duration)
            if left and np.ptp(clock[ends] - before) <= 1e-9 * duration.max():
                # All clocks moved alike, by the longest message: so they will every time.
                clock[np.unique(ends)] += left * duration.max()
                break
        sent += times * this.message_bytes * np.bincount(this.source, minlength=p)
        count += times
    return Simulated(float(clock.max()), count, sent)


def _send(clock: np.ndarray, this: Round, duration: np.ndarray) -> np.ndarray:
    """Run a round: sets the clocks (p,) of those that take part; returns the starts (messages,)."""
    start = np.maximum(clock[this.source], clock[this.target])
    np.maximum.at(clock, this.source, start + duration)
    np.maximum.at(clock, this.target, start + duration)
    return start


def message_seconds(this: Round, topology: Topology) -> np.ndarray:
    """Seconds of each message of a round, from when both of its ends are ready. (messages,)"""
    latency, byte_seconds = _link_seconds(this, topology)
    return latency + this.message_bytes * byte_seconds


def _link_seconds(this: Round, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """What each message waits, and what each of its bytes takes. Two of (messages,)"""
    level = topology.level_of(this.source, this.target)
    latency, byte_seconds = np.zeros(len(level)), np.zeros(len(level))
    for i, links in enumerate(topology.levels):
        (here,) = np.nonzero(level == i)
        if not len(here):
            continue
        message, used = _links(this.source[here], this.target[here], i, topology)
        _, used = np.unique(used, return_inverse=True)
        busiest = np.zeros(len(here), int)
        np.maximum.at(busiest, message, np.bincount(used)[used])
        hops = np.bincount(message, minlength=len(here)) if isinstance(links.wiring, tuple) else 1
        latency[here] = links.latency * hops
        byte_seconds[here] = busiest / links.bandwidth
    return latency, byte_seconds


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


# ------------------------------------------------------------------------- a collective's costs


def collective_seconds(kind: str, p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of one collective on p devices.

    kind and message_bytes as in `schedules.SCHEDULES`. Raises ValueError for an unknown kind, and
    when the topology has fewer than p devices.
    """
    topology.check_devices(p)
    plan = _plan(kind, p, topology)
    if p == 1:
        return 0.0
    timed = ((this, times, a + message_bytes * b) for this, times, a, b in plan)
    return _simulate(timed, p).seconds


@functools.lru_cache(maxsize=256)
def _plan(kind: str, p: int, topology: Topology):
    """The rounds for one byte: (round, times, seconds of latency, seconds a byte of the whole)."""
    plan = []
    for this, times in repeated(schedule(kind, p, 1.0, topology)):
        latency, byte_seconds = _link_seconds(this, topology)
        plan.append((this, times, latency, this.message_bytes * byte_seconds))
    return plan


@functools.lru_cache(maxsize=256)
def _counts(kind: str, p: int, g: int) -> tuple[int, float]:
    """(rounds, messages that the device that sends most sends)."""
    timed = (
        (*group, np.zeros(len(group[0].source))) for group in repeated(rounds_of(kind, p, 1.0, g))
    )
    found = _simulate(timed, p)
    return found.rounds, float(found.sent_bytes.max())


def collective_rounds(kind: str, p: int, g: int = 1) -> int:
    """Rounds of a collective on p devices, g in a node."""
    return _counts(kind, p, g)[0]


def collective_sent_bytes(kind: str, p: int, message_bytes: Number, g: int = 1) -> Number:
    """Bytes that the device that sends most puts on its links, in a collective on p devices.

    The ring's Allreduce sends the least that any Allreduce can (v1 eq. 33, v2 eq. 12).
    """
    return _counts(kind, p, g)[1] * message_bytes


def collective_launches(kind: str, p: int) -> int:
    """Collectives of the program: a collective-permute a round for some, one for the others."""
    return collective_rounds(kind, p) if kind in ("ring", "round-trip", "butterfly") else 1


def merge_seconds(
    kind: str, p: int, state_bytes: Number, topology: Topology, parts: int = 2
) -> float:
    """Seconds to merge states of that size across p devices, launches included.

    kind: "gather", for an all-gather of packed states; "butterfly", a launch for every round; or
          an Allreduce, of which there are `parts`: 3 as Algorithm 3 writes them, 2 as XLA joins
          them. The bytes are those of all parts together.
    """
    kind, parts = {"gather": ("all-gather", 1), "butterfly": (kind, 1)}.get(kind, (kind, parts))
    seconds = collective_seconds(kind, p, state_bytes, topology)
    if parts > 1:
        seconds += (parts - 1) * collective_seconds(kind, p, 0, topology)
    return parts * collective_launches(kind, p) * topology.launch + seconds
