"""How long collectives take on a topology, simulated.

A message starts when its sender has the data and its links are free. It occupies the links while
its bytes go out, and arrives a latency later. Meanwhile its device may send the next message.
Messages of one round that share a link share its bandwidth. This is the α-β model, as in Thakur,
Rabenseifner and Gropp (2005, "Optimization of collective communication operations in MPICH"), with
data dependencies where they assume rounds.

The library's collectives are pipelined: a device forwards the first bytes before it has received
the last. Each collective of the program has one launch. A collective that JAX runs as permutes has
a launch for each round, and a round waits for the last bytes of the round before.
"""

import functools
from collections.abc import Iterable

import numpy as np

from labs.cost.schedules import Round, schedule
from labs.cost.topology import Topology
from labs.cost.workload import Number

# Collectives for which a library takes the fastest of several algorithms.
CHOICES = {
    "allreduce": ("ring-allreduce", "tree-allreduce"),
    "all-gather": ("ring-gather", "doubling-gather"),
    "reduce-scatter": ("ring-scatter", "halving-scatter"),
}
# Collectives that JAX runs as a permute a round, each with its own launch.
PERMUTES = ("ring", "butterfly")
ALGORITHMS = dict.fromkeys(("one-shot", "in-switch"), "direct")
ALGORITHMS["tree-allreduce"] = "tree"
# The library runs these as several rings or trees at once, each leaving a node by another card.
CHANNELS = ("ring-allreduce", "tree-allreduce", "ring-gather", "ring-scatter")


def simulate(
    rounds: Iterable[Round],
    p: int,
    topology: Topology,
    *,
    pipelined: bool = True,
    rendezvous: bool = False,
) -> float:
    """Seconds until each of the first p devices has received everything, if all start at 0.

    pipelined:  whether a device forwards the first bytes of a message before it has the last
    rendezvous: whether a sender first waits until the receiver says that it is ready, and
                continues when its message has left, as gloo does over sockets

    Raises ValueError if the topology has fewer than p devices.
    """
    topology.check_devices(p)
    first = np.zeros(p)  # when a device has the first bytes that it forwards
    last = np.zeros(p)  # … and the last ones
    free = np.zeros(_link_count(topology, p))
    loads = {}
    for round_ in list(rounds):  # a list keeps the rounds alive, so that their ids stay unique
        if id(round_) not in loads:
            loads[id(round_)] = _load(round_, topology)
        latency, seconds, message, link = loads[id(round_)]
        if round_.at_once:
            start = np.zeros(len(seconds))
        elif pipelined:
            start = first[round_.source]
        else:
            start = last[round_.source]
        if rendezvous:
            ready = 0.0 if round_.at_once else last[round_.target]
            start = np.maximum(start, ready + latency)
        np.maximum.at(start, message, free[link])
        end = start + seconds
        if not round_.at_once:
            end = np.maximum(end, last[round_.source])
        busy_until = np.maximum(end, start + topology.gap)
        np.maximum.at(free, link, busy_until[message])
        np.maximum.at(first, round_.target, start + latency)
        np.maximum.at(last, round_.target, end + latency)
        if rendezvous:
            np.maximum.at(last, round_.source, end)
    return float(last.max())


def _link_count(topology: Topology, p: int) -> int:
    """A number above all numbers that `_load` gives links."""
    return 2 * len(topology.levels) * (max(p, topology.node_size) + topology.node_size)


def _load(round_: Round, topology: Topology) -> tuple[np.ndarray, ...]:
    """(latency, seconds, message, link): how the messages of a round load the links.

    latency, seconds: (messages,) until a message's first byte arrives, and for its bytes
    message, link:    (uses,) the numbers of each message and of each link that it uses
    """
    level = topology.level_of(round_.source, round_.target)
    latency = np.zeros(len(level))
    seconds = np.zeros(len(level))
    pairs = [np.zeros((2, 0), int)]
    for i, links in enumerate(topology.levels):
        (here,) = np.nonzero(level == i)
        if not len(here):
            continue
        out_of = 2 * _port(round_.source[here], i, topology)
        into = 2 * _port(round_.target[here], i, topology) + 1
        used = np.concatenate([out_of, into])
        _, number = np.unique(used, return_inverse=True)
        sharing = np.bincount(number)[number].reshape(2, -1)  # messages on that link
        latency[here] = links.latency
        seconds[here] = sharing.max(axis=0) * round_.message_bytes / links.bandwidth
        pairs.append(np.stack([np.tile(here, 2), used * len(topology.levels) + i]))
    return latency, seconds, *np.concatenate(pairs, axis=1)


def _port(device: np.ndarray, i: int, topology: Topology) -> np.ndarray:
    """The number of a device's link to level i, which devices of its unit may share."""
    unit = topology.unit_sizes()[i]
    ports = topology.levels[i].links or unit
    return device // unit * ports + device % unit * ports // unit


# ------------------------------------------------------------------------- a collective's costs


@functools.lru_cache(maxsize=65536, typed=True)
def collective_seconds(kind: str, p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of one collective on p devices, by the fastest protocol, its launches included.

    kind, message_bytes: as in `schedules.SCHEDULES`. A kind in `CHOICES` runs its fastest
    algorithm. Raises ValueError for an unknown kind, or if the topology has too few devices.
    """
    topology.check_devices(p)
    if kind in CHOICES:
        return min(collective_seconds(k, p, message_bytes, topology) for k in CHOICES[kind])
    rounds = list(schedule(kind, p, float(message_bytes), topology.node_size))
    if p == 1:
        return 0.0
    launches = collective_launches(kind, p, topology.node_size)
    algorithm = ALGORITHMS.get(kind, "ring")
    return min(
        launches * choice.launch + simulate(rounds, p, choice, pipelined=launches == 1)
        for choice in topology.by_protocol(algorithm, p, spread=kind in CHANNELS)
    )


@functools.lru_cache(maxsize=4096)
def _counts(kind: str, p: int, g: int) -> tuple[int, float]:
    """(rounds, messages that the busiest device sends)."""
    first_choice = CHOICES.get(kind, (kind,))[0]
    rounds = list(schedule(first_choice, p, 1.0, g))
    sent = np.zeros(p)
    for round_ in rounds:
        np.add.at(sent, round_.source, round_.message_bytes)
    return len(rounds), float(sent.max())


def collective_rounds(kind: str, p: int, g: int = 1) -> int:
    """Rounds of a collective on p devices, g in a node; those of the ring for `CHOICES`."""
    return _counts(kind, p, g)[0]


def collective_sent_bytes(kind: str, p: int, message_bytes: Number, g: int = 1) -> Number:
    """Bytes that the busiest device puts on its links; those of the ring for `CHOICES`.

    Only an in-switch Allreduce sends less than a ring's (2024 eq. 33, 2025 eq. 12).
    """
    return _counts(kind, p, g)[1] * message_bytes


def collective_launches(kind: str, p: int, g: int = 1) -> int:
    """Launches on p devices, g in a node: one a round for `PERMUTES`, otherwise one."""
    return collective_rounds(kind, p, g) if kind in PERMUTES else 1
