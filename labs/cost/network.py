"""How long collectives take on a topology, simulated.

A message starts when its sender has what it is to send, and when its links are free. It keeps
them for as long as its bytes take, and is there a latency later, one for every hop: a device may
send the next message while the last one travels. Messages of one round that share a link share
its bandwidth. This is the α-β model, as in Thakur, Rabenseifner and Gropp (2005, "Optimization of
collective communication operations in MPICH"), with data dependencies where they assume rounds.

A collective that the library runs is pipelined: a device hands on the first bytes before the last
have come. One rule for launches: as many as the program has collectives. What JAX writes as
permutes has one for each round; they wait for each other's last bytes.
"""

import functools
from collections.abc import Iterable

import numpy as np

from labs.cost.schedules import Round, schedule
from labs.cost.topology import Topology
from labs.cost.workload import Number

# Collectives of which a library has several algorithms, and takes the fastest.
CHOICES = {
    "allreduce": ("ring-allreduce", "tree-allreduce"),
    "all-gather": ("ring-gather", "doubling-gather"),
    "reduce-scatter": ("ring-scatter", "halving-scatter"),
}
# What JAX writes as a permute a round, each a launch of its own.
PERMUTES = ("ring", "butterfly")
ALGORITHMS = dict.fromkeys(("one-shot", "in-switch"), "direct")
ALGORITHMS["tree-allreduce"] = "tree"
# What the library runs as several rings or trees at once, each leaving a node by another card.
CHANNELS = ("ring-allreduce", "tree-allreduce", "ring-gather", "ring-scatter")


def simulate(
    rounds: Iterable[Round],
    p: int,
    topology: Topology,
    *,
    pipelined: bool = True,
    rendezvous: bool = False,
) -> float:
    """Seconds until the last of the first p devices has all that it gets; all of them start at 0.

    pipelined:  whether a device hands on the first bytes of a message before it has the last
    rendezvous: whether a sender first waits for a word from the receiver that it is ready, and
                goes on when its message has left, as gloo does over sockets

    Raises ValueError when the topology has fewer devices.
    """
    topology.check_devices(p)
    first = np.zeros(p)  # when a device has the first bytes of what it hands on
    last = np.zeros(p)  # … and the last ones
    free = np.zeros(_link_count(topology, p))
    loads = {}
    for round_ in list(rounds):  # all of them are kept: a round is known by its identity
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
    """More than the largest number that `_load` gives a link."""
    return 2 * len(topology.levels) * (max(p, topology.node_size) + topology.node_size)


def _load(round_: Round, topology: Topology) -> tuple[np.ndarray, ...]:
    """(latency, seconds, message, link): what the messages of a round ask of the links.

    latency, seconds: (messages,) until a message's first byte is there, and that its bytes take
    message, link:    (uses,) each link that each message uses, both by their numbers
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
    """The number of a device's link to level i, which others of its unit may share."""
    unit = topology.unit_sizes()[i]
    ports = topology.levels[i].links or unit
    return device // unit * ports + device % unit * ports // unit


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
    launches = collective_launches(kind, p, topology.node_size)
    algorithm = ALGORITHMS.get(kind, "ring")
    return min(
        launches * choice.launch + simulate(rounds, p, choice, pipelined=launches == 1)
        for choice in topology.by_protocol(algorithm, p, spread=kind in CHANNELS)
    )


@functools.lru_cache(maxsize=4096)
def _counts(kind: str, p: int, g: int) -> tuple[int, float]:
    """(rounds, messages that the device that sends most sends)."""
    first_choice = CHOICES.get(kind, (kind,))[0]
    rounds = list(schedule(first_choice, p, 1.0, g))
    sent = np.zeros(p)
    for round_ in rounds:
        np.add.at(sent, round_.source, round_.message_bytes)
    return len(rounds), float(sent.max())


def collective_rounds(kind: str, p: int, g: int = 1) -> int:
    """Rounds of a collective on p devices, g in a node; of one of `CHOICES`, of its ring."""
    return _counts(kind, p, g)[0]


def collective_sent_bytes(kind: str, p: int, message_bytes: Number, g: int = 1) -> Number:
    """Bytes that the device that sends most puts on its links; of one of `CHOICES`, in its ring.

    A ring's Allreduce sends the least that any can (2024 eq. 33, 2025 eq. 12), but
    for in-switch ones.
    """
    return _counts(kind, p, g)[1] * message_bytes


def collective_launches(kind: str, p: int, g: int = 1) -> int:
    """Collectives of the program on p devices, g in a node: a permute a round of some, or one."""
    return collective_rounds(kind, p, g) if kind in PERMUTES else 1
