"""Devices, and the links that a message from one device to another crosses.

A `Topology` is a kind of device and a list of levels, innermost first. Devices are numbered so
that neighbours share a node; p of them fill the nodes in order, and the last node may be partly
empty. A message inside a node crosses the first level's links, a message between nodes the next
level's, and so on.

Bandwidths are bytes per second in one direction. Latencies are seconds until the first byte
arrives. A `Protocol` is how a library moves messages over the links: the seconds of a collective
before its first message and at each hop, and the part of the bandwidth that carries data.
"""

import functools
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from labs.cost.workload import Number, whole


@dataclass(frozen=True)
class Device:
    """An accelerator: bytes of memory, bytes read a second, bfloat16 operations a second."""

    name: str
    memory_bytes: Number
    memory_bandwidth: Number
    flops: Number


@dataclass(frozen=True)
class Level:
    """Links to a switch that joins `size` units: devices, or units of the level below.

    latency:   seconds until a message's first byte arrives
    bandwidth: bytes per second and direction, of one link
    links:     links that a unit has to this level, shared evenly by its devices in order; one
               per device when None
    """

    name: str
    size: int
    latency: Number
    bandwidth: Number
    links: int | None = None


@dataclass(frozen=True)
class Protocol:
    """How a library sends: seconds before the first message and at each hop, and data's share.

    algorithm: "tree" for an Allreduce by trees, "ring" for all else that the library runs, or
               "direct" for a kernel that reads and writes its peers' memory
    launch:    seconds of a collective before its first message
    alone:     seconds of a hop within a node, for a collective that stays there
    near, far: seconds of a hop within and between nodes, for a collective that leaves its node
    shares:    shares of the bandwidth that carry data, within a node and between nodes
    between:   the most bytes per second that a collective's rings or trees together bring into a
               node, of two nodes and of more
    """

    name: str
    algorithm: str
    launch: Number
    alone: Number
    near: Number
    far: Number
    shares: tuple[Number, Number]
    between: tuple[Number, Number]

    def scaled(self, latency: Number, bandwidth: Number) -> "Protocol":
        """This protocol with all times, and the bounds `between`, scaled."""
        times = {x: latency * getattr(self, x) for x in ("launch", "alone", "near", "far")}
        return replace(self, **times, between=tuple(bandwidth * x for x in self.between))


@dataclass(frozen=True)
class Topology:
    """Devices, and the levels of links between them, innermost first.

    protocols: a collective takes the fastest for its size; without protocols, the levels' own
               latencies and bandwidths count
    launch:    seconds of a collective before its first message, where there are no protocols
    gap:       seconds between two messages over a link, at least: NCCL's "arity serialization"
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    protocols: tuple[Protocol, ...] = ()
    launch: Number = 3e-6
    gap: Number = 0.4e-6

    @property
    def node_size(self) -> int:
        """Devices of a node, which the innermost level joins."""
        return self.levels[0].size

    @property
    def capacity(self) -> int:
        """Devices that all levels join."""
        return math.prod(level.size for level in self.levels)

    def check_devices(self, p: int) -> None:
        """Raise ValueError unless p is a number of devices that the topology has."""
        if whole("devices", p) > self.capacity:
            raise ValueError(f"devices: {self.name} joins at most {self.capacity}, got {p}")

    def unit_sizes(self) -> list[int]:
        """Devices in one unit of each level: 1, then a node's, …"""
        return [1, *np.cumprod([level.size for level in self.levels[:-1]]).tolist()]

    def level_of(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The index of the level that a message from device a to device b goes over."""
        level = np.zeros(np.broadcast(a, b).shape, int)
        for i, size in enumerate(self.unit_sizes()):
            level[np.not_equal(a // size, b // size)] = i
        return level

    def by_protocol(self, algorithm: str, p: int, *, spread: bool = False) -> list["Topology"]:
        """This topology under each protocol of an algorithm, for a collective of p devices.

        spread: whether the collective runs as several rings or trees at once, each leaving the
        node by another link. They count as one, with the bandwidth of all links.
        """
        chosen = [x for x in self.protocols if x.algorithm == algorithm]
        if not chosen:
            return [replace(self, protocols=())]
        return [self._as_moved_by(x, p, spread) for x in chosen]

    def _as_moved_by(self, protocol: Protocol, p: int, spread: bool) -> "Topology":
        inside, *outside = self.levels
        near = protocol.alone if p <= self.node_size else protocol.near
        near_share, far_share = protocol.shares
        levels = [replace(inside, latency=near, bandwidth=inside.bandwidth * near_share)]
        for level in outside:
            bandwidth = level.bandwidth * far_share
            if spread:
                bandwidth *= level.links or self.node_size
                bandwidth = min(bandwidth, protocol.between[p > 2 * self.node_size])
            levels.append(replace(level, latency=protocol.far, bandwidth=bandwidth))
        return replace(self, levels=tuple(levels), launch=protocol.launch, protocols=())

    def scaled(self, latency: Number = 1.0, bandwidth: Number = 1.0) -> "Topology":
        """This topology with all launches and latencies, and all links' bandwidths, scaled."""
        levels = tuple(
            replace(x, latency=latency * x.latency, bandwidth=bandwidth * x.bandwidth)
            for x in self.levels
        )
        protocols = tuple(x.scaled(latency, bandwidth) for x in self.protocols)
        return replace(
            self,
            levels=levels,
            protocols=protocols,
            launch=latency * self.launch,
            gap=latency * self.gap,
        )


@functools.lru_cache(maxsize=1024)
def every_nth(topology: Topology, stride: int) -> Topology:
    """The topology of a collective of every stride-th device while the others run the same.

    Devices 0, stride, 2 stride, … have the topology returned. Devices 1, 1 + stride, … and so on
    run at the same time, so that links which a node's devices share carry all these collectives.
    If a node has one device, a ring's hop takes as long as a tree's, as in NCCL's `tuning.cc`.
    """
    if whole("stride", stride) == 1:
        return topology
    levels = []
    left = stride
    devices = 1  # of the collective, in a unit of the level
    for level, unit in zip(topology.levels, topology.unit_sizes(), strict=True):
        size = max(1, -(-level.size // left))
        ports = level.links or unit
        own = min(ports, devices)
        bandwidth = level.bandwidth * ports * devices / (unit * own)
        links = None if level.links is None else own
        levels.append(replace(level, size=size, bandwidth=bandwidth, links=links))
        left = max(1, left // level.size)
        devices *= size
    protocols = topology.protocols
    if levels[0].size == 1:
        protocols = tuple(_with_hops_of_trees(x, protocols) for x in protocols)
    return replace(topology, levels=tuple(levels), protocols=protocols)


def _with_hops_of_trees(x: Protocol, protocols: tuple[Protocol, ...]) -> Protocol:
    """A ring's protocol with the tree's hop between nodes, where the table has such a tree."""
    if x.algorithm != "ring":
        return x
    far = [t.far for t in protocols if t.algorithm == "tree" and t.name == x.name]
    return replace(x, far=max([x.far, *far]))


# ------------------------------------------------------------------------------- presets

DATA = tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))
DEVICES = {name: Device(**x) for name, x in DATA["devices"].items()}


def _protocols(far: Number | None) -> tuple[Protocol, ...]:
    """The library's table in seconds; `far`, where given, replaces its hops between nodes."""
    return tuple(
        Protocol(
            name,
            algorithm,
            launch=1e-6 * launch,
            alone=1e-6 * alone,
            near=1e-6 * near,
            far=far or 1e-6 * hop,
            shares=tuple(shares),
            between=(1e9 * two, 1e9 * more),
        )
        for name, algorithm, launch, alone, near, hop, shares, two, more in DATA["protocols"]
    )


def preset(name: str) -> Topology:
    """The topology of this name. Raises ValueError, with the known names, for another name."""
    known = DATA["topologies"]
    if name not in known:
        raise ValueError(f"topology: expected one of {', '.join(known)}, got {name!r}")
    row = known[name]
    levels = tuple(Level(**DATA["levels"][level]) for level in row["levels"])
    return Topology(name, DEVICES[row["device"]], levels, _protocols(row.get("far")))


PRESETS = tuple(DATA["topologies"])
