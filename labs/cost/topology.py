"""Devices and the links between them: what a message from one device to another goes through.

A `Topology` is a kind of device and a list of levels, innermost first. Devices are numbered so
that neighbours share a node; p of them fill the nodes in order, and the last node may be partly
empty. A message between devices of one node goes over the first level's links, one that leaves
the node over the next level's, and so on.

Bandwidths are bytes per second in one direction, as data sheets print them; latencies, seconds
until the first byte is there. A `Protocol` is how a library moves messages over the links: what a
collective costs before its first message and at each hop, and which part of the bandwidth is data.
These constants are what a library's authors chose or somebody measured: neither bounds nor laws.
`CORNERS` has other choices of them, to see whether a conclusion depends on the choice.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np

from labs.cost.formulas import Number
from treeattn.idea.arrays import integer, number
from treeattn.measured import CollectiveTimes


@dataclass(frozen=True)
class Device:
    """An accelerator: what it holds, how fast it reads it, how fast it multiplies.

    memory_bytes:     capacity
    memory_bandwidth: bytes per second
    flops:            dense bfloat16 operations per second, used for every dtype
    """

    name: str
    memory_bytes: Number
    memory_bandwidth: Number
    flops: Number

    def __post_init__(self):
        for name in ("memory_bytes", "memory_bandwidth", "flops"):
            number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Level:
    """Links that join `size` units: devices, at the innermost level, else units of the level below.

    name:      of the interconnect
    size:      units that it joins, at most
    latency:   seconds a message waits on it
    bandwidth: bytes per second and direction, of one link
    links:     links that a unit has to this level, shared evenly by its devices in order; one
               per device when None
    wiring:    "switch": a unit's links lead to a switch, and every other unit is one hop away
               "mesh":   every pair of units has a link of its own
               (a, b, …): a torus of these side lengths, whose units have a link to each
               neighbour in each direction, and are numbered along a path of neighbours
    """

    name: str
    size: int
    latency: Number
    bandwidth: Number
    links: int | None = None
    wiring: str | tuple[int, ...] | list[int] = "switch"

    def __post_init__(self):
        object.__setattr__(self, "size", integer("size", self.size, 1))
        if self.links is not None:
            object.__setattr__(self, "links", integer("links", self.links, 1))
        for name in ("latency", "bandwidth"):
            number(name, getattr(self, name), 0)
        if isinstance(self.wiring, list):
            object.__setattr__(self, "wiring", tuple(self.wiring))
        if isinstance(self.wiring, tuple) and math.prod(self.wiring) != self.size:
            raise ValueError(f"wiring: a torus {self.wiring} does not hold {self.size} units")
        if not isinstance(self.wiring, tuple) and self.wiring not in ("switch", "mesh"):
            raise ValueError(
                f'wiring: expected "switch", "mesh" or side lengths, got {self.wiring!r}'
            )


@dataclass(frozen=True)
class Protocol:
    """How a library sends: seconds before the first message and at each hop, and what is data.

    algorithm: "tree" for an Allreduce by trees, "ring" for all else that the library runs, or
               "direct" for a kernel that reads and writes its peers' memory
    launch:    seconds of a collective before its first message
    alone:     seconds of a hop within a node, for a collective that stays there; infinite where the
               library does not run it so
    near, far: seconds of a hop within a node and between nodes, for one that leaves it
    shares:    of the bandwidth that carries data, within a node and between nodes
    between:   bytes per second that all rings or trees of a collective bring into a node together,
               at most: where there are two nodes, and where there are more
    """

    name: str
    algorithm: str
    launch: Number
    alone: Number
    near: Number
    far: Number
    shares: tuple[Number, Number]
    between: tuple[Number, Number] = (math.inf, math.inf)


@dataclass(frozen=True)
class Topology:
    """Devices, and the levels of links between them, innermost first.

    launch:    seconds from one kernel to the next, however small it is
    protocols: of which a collective takes the fastest for its size; without any, the levels' own
               latencies and bandwidths count
    reduces:   whether the innermost switch can add up what passes through it
    gap:       seconds between two messages over a link, at least: NCCL's "arity serialization"
    peers:     whether a kernel may read and write the memory of another device of its node
    table:     name of the protocols' table, to find another version's
    far:       seconds of a hop between nodes where it is not the protocols' own
    measured:  times that count in place of all this, where they have a collective's group
    stride:    devices between two neighbours here, on the network that was measured
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    launch: Number
    protocols: tuple[Protocol, ...] = ()
    reduces: bool = False
    gap: Number = 0.4e-6
    peers: bool = True
    table: str = ""
    far: Number | None = None
    measured: CollectiveTimes | None = None
    stride: int = 1

    def __post_init__(self):
        number("launch", self.launch, 0)
        if not self.levels:
            raise ValueError("levels: expected at least one level of links, got none")
        for level in self.levels[1:]:
            if level.wiring != "switch":
                raise ValueError(f"levels: only the innermost may be a {level.wiring!r}")

    def by_protocol(self, algorithm: str, p: int, *, spread: bool = False) -> list["Topology"]:
        """This topology as each protocol for an algorithm makes it, for a collective of p devices.

        The launch is the collective's then, and the links have the protocol's latencies and the
        share of their bandwidth that is data. spread: whether the collective runs as several rings
        or trees at once, each leaving the node by another link, so that one has them all.
        """
        stays = p <= self.node_size
        chosen = [
            x
            for x in self.protocols
            if x.algorithm == algorithm and math.isfinite(x.alone if stays else x.near)
        ]
        if not chosen:
            return [replace(self, protocols=())]
        return [self._as_moved_by(x, p, spread) for x in chosen]

    def _as_moved_by(self, protocol: Protocol, p: int, spread: bool) -> "Topology":
        """`by_protocol` for one protocol."""
        inside, *outside = self.levels
        near = protocol.alone if p <= self.node_size else protocol.near
        near_share, far_share = protocol.shares
        levels = [replace(inside, latency=near, bandwidth=inside.bandwidth * near_share)]
        for level in outside:
            bandwidth = level.bandwidth * far_share
            if spread:
                more_than_two = p > 2 * self.node_size
                bandwidth *= level.links or self.node_size
                bandwidth = min(bandwidth, protocol.between[more_than_two])
            levels.append(replace(level, latency=protocol.far, bandwidth=bandwidth))
        return replace(self, levels=tuple(levels), launch=protocol.launch, protocols=())

    def as_measured(self, times: CollectiveTimes) -> "Topology":
        """This topology with times of `calibrate` in place of its own, where they have the group.

        It has no kernels of one's own then, and no sums in the switch: they are not in the file,
        and what nobody measured would win against what somebody did.
        """
        return replace(self, measured=times, peers=False, reduces=False)

    def scaled(self, latency: Number = 1.0, bandwidth: Number = 1.0) -> "Topology":
        """This topology with all launches and latencies, and all links' bandwidths, scaled; but not
        what was measured."""
        levels = tuple(
            replace(x, latency=latency * x.latency, bandwidth=bandwidth * x.bandwidth)
            for x in self.levels
        )
        protocols = tuple(
            replace(
                x,
                launch=latency * x.launch,
                alone=latency * x.alone,
                near=latency * x.near,
                far=latency * x.far,
                between=tuple(bandwidth * b for b in x.between),
            )
            for x in self.protocols
        )
        launch = latency * self.launch
        gap = latency * self.gap
        far = None if self.far is None else latency * self.far
        return replace(self, levels=levels, launch=launch, gap=gap, protocols=protocols, far=far)

    @property
    def node_size(self) -> int:
        """Devices of a node: what the innermost level joins, or a row of it, if it is a torus."""
        wiring = self.levels[0].wiring
        return wiring[-1] if isinstance(wiring, tuple) else self.levels[0].size

    @property
    def capacity(self) -> int:
        """Devices that all levels join."""
        return math.prod(level.size for level in self.levels)

    def check_devices(self, p: int) -> None:
        """Raise ValueError unless p is a number of devices that the topology has."""
        p = integer("p", p, 1)
        if p > self.capacity:
            raise ValueError(f"p: {self.name} joins at most {self.capacity} devices, got {p}")

    def unit_sizes(self) -> list[int]:
        """Devices in one unit of each level: 1, then a node's, …"""
        return [1, *np.cumprod([level.size for level in self.levels[:-1]]).tolist()]

    def level_of(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The index of the level that a message from device a to device b goes over."""
        level = np.zeros(np.broadcast(a, b).shape, int)
        for i, size in enumerate(self.unit_sizes()):
            level[np.not_equal(a // size, b // size)] = i
        return level


# ------------------------------------------------------------------------------- presets

DATA = tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))
DEVICES = {name: Device(**x) for name, x in DATA["devices"].items()}
H100, H200, MI300X, RTX4090, TPU_V5P = DEVICES.values()


def _protocols(table: str, far: Number | None = None) -> tuple[Protocol, ...]:
    """The protocols of a library's table, in seconds; `far` replaces their hops between nodes."""
    found = []
    for name, algorithm, launch, alone, near, between, shares, *most in DATA["protocols"][table]:
        protocol = Protocol(
            name,
            algorithm,
            launch=1e-6 * launch,
            alone=1e-6 * alone,
            near=1e-6 * near,
            far=far or 1e-6 * between,
            shares=tuple(shares),
            between=tuple(1e9 * x for x in most) or (math.inf, math.inf),
        )
        found.append(protocol)
    return tuple(found)


def _topology(name: str, device: str, levels: list[str], launch: Number, **more) -> Topology:
    """A row of the presets' topologies: levels and protocols by their names there."""
    table = more.pop("protocols", "")
    links = tuple(Level(**DATA["levels"][level]) for level in levels)
    protocols = _protocols(table, more.get("far")) if table else ()
    return Topology(name, DEVICES[device], links, launch, protocols, table=table, **more)


NCCL_2_28, NCCL_2_8 = (_protocols(table) for table in ("NCCL 2.28", "NCCL 2.8"))
PRESETS = {name: _topology(name, **x) for name, x in DATA["topologies"].items()}

# Other choices of the constants. "fused": everything in kernels of one's own, at the 2.3 us that
# an Allreduce of 8 bytes takes at best (8 H200, github.com/NVIDIA/nccl/issues/1940). "slow":
# NCCL's latencies times 2.2, as on two DGX A100 (issue 812 there) and two p6-b200 (dstack, 3961).
CORNERS: dict[str, Callable[[Topology], Topology]] = {
    "fused": lambda t: replace(
        t, launch=min(t.launch, 1.7e-6), protocols=tuple(_fused(x, t) for x in t.protocols)
    ),
    "NCCL 2.28": lambda t: t,
    "NCCL 2.8": lambda t: replace(t, protocols=_of_nccl_2_8(t) if t.protocols else ()),
    "slow": lambda t: t.scaled(latency=2.2),
}


def _fused(x: Protocol, t: Topology) -> Protocol:
    """The links' own hops in a node; those between nodes stay where the topology has its own."""
    hop = t.levels[0].latency
    far = min(x.far, 5e-6) if t.far is None else t.far
    alone = hop if math.isfinite(x.alone) else x.alone
    return replace(x, launch=1.7e-6, alone=alone, near=hop, far=far)


def _of_nccl_2_8(t: Topology) -> tuple[Protocol, ...]:
    """Another library's as they are."""
    return _protocols(t.table.replace("2.28", "2.8") or "NCCL 2.8", t.far)


def corners(topology: Topology) -> dict[str, Topology]:
    """This topology by other choices of its constants too, each by the choice's name.

    `CORNERS` for one whose protocols are NCCL's; for another library's, without NCCL's versions;
    for one without a library, half and 2.2 times its latencies.
    """
    if topology.protocols:
        table = topology.table
        if not table or table.startswith("NCCL"):
            return {name: choice(topology) for name, choice in CORNERS.items()}
        fused, slow = (CORNERS[name](topology) for name in ("fused", "slow"))
        return {"fused": fused, table: topology, "slow": slow}
    return {
        "halved": topology.scaled(latency=0.5),
        "assumed": topology,
        "slow": topology.scaled(latency=2.2),
    }


def preset(name: str, **changes) -> Topology:
    """The topology of that name, with fields of `Topology` replaced by `changes`.

    Raises ValueError, with the names there are, for another.
    """
    if name not in PRESETS:
        raise ValueError(f"topology: expected one of {', '.join(PRESETS)}, got {name!r}")
    return replace(PRESETS[name], **changes)
