"""Devices and the links between them: what a message from one device to another goes through.

A `Topology` is a kind of device and a list of levels, innermost first. Devices are numbered so
that neighbours share a node; p of them fill the nodes in order, and the last node may be partly
empty. A message between devices of one node goes over the first level's links, one that leaves
the node over the next level's, and so on.

Bandwidths are bytes per second in one direction, latencies seconds from the moment both sides
are ready until the first byte is there. Data sheets give peaks, so a time computed from them is
a lower bound, and a *ratio* of times is what to look at.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from treeattn.cost.formulas import Number, check_count

GB, TB, GIB = 1e9, 1e12, 2**30


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
            check_positive(name, getattr(self, name))


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
    wiring: str | tuple[int, ...] = "switch"

    def __post_init__(self):
        check_count("size", self.size)
        if self.links is not None:
            check_count("links", self.links)
        for name in ("latency", "bandwidth"):
            check_positive(name, getattr(self, name))
        if isinstance(self.wiring, tuple) and math.prod(self.wiring) != self.size:
            raise ValueError(f"wiring: a torus {self.wiring} does not hold {self.size} units")
        if not isinstance(self.wiring, tuple) and self.wiring not in ("switch", "mesh"):
            raise ValueError(
                f'wiring: expected "switch", "mesh" or side lengths, got {self.wiring!r}'
            )


@dataclass(frozen=True)
class Topology:
    """Devices, and the levels of links between them, innermost first.

    launch: seconds that every collective costs before its first message, however small.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    launch: Number

    def __post_init__(self):
        check_positive("launch", self.launch)
        if not self.levels:
            raise ValueError("levels: expected at least one level of links, got none")
        for level in self.levels[1:]:
            if level.wiring != "switch":
                raise ValueError(f"levels: only the innermost may be a {level.wiring!r}")

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
        check_count("p", p)
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

    def step_seconds(self, level: int, message_bytes: Number) -> float:
        """Time of a message over a link of a level that it has for itself."""
        return self.levels[level].latency + message_bytes / self.levels[level].bandwidth


def check_positive(name: str, value: Number) -> None:
    """Raise unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")


# ------------------------------------------------------------------------------- presets
#
# Bandwidths, capacities and peak operations are the vendors'. Latencies, no vendor prints: they
# are the constants by which NVIDIA's NCCL chooses its algorithms (src/graph/tuning.cc; protocol
# LL, for small messages, in microseconds: a hop takes 0.5 over NVLink, 1.0 over PCIe, 2.7 in a
# ring or 5.0 in a tree over a network; a collective 3.6 to 4.4 before that). For AMD, TPU and
# Ethernet they are *assumed*.

_NCCL_LAUNCH = 4.4e-6
_NVLINK_LATENCY, _PCIE_LATENCY, _NETWORK_LATENCY = 0.5e-6, 1.0e-6, 5.0e-6

# NVIDIA H100 Tensor Core GPU data sheet, SXM5: 80 GB, 3.35 TB/s, 989 TFLOPS dense bf16.
H100 = Device("H100 SXM", 80 * GB, 3.35 * TB, 989e12)
# NVIDIA H200 Tensor Core GPU data sheet, SXM: 141 GB, 4.8 TB/s; multiplies like an H100.
H200 = Device("H200 SXM", 141 * GB, 4.8 * TB, 989e12)
# AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1307 TFLOPS dense bf16.
MI300X = Device("MI300X", 192 * GB, 5.3 * TB, 1307e12)
# NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 24 GB, 1,008 GB/s, 165 TFLOPS dense
# bf16 with float32 sums.
RTX4090 = Device("RTX 4090", 24 * GB, 1.008 * TB, 165e12)
# Google Cloud documentation, "TPU v5p": 95 GiB, 2,765 GB/s, 459 TFLOPS bf16.
TPU_V5P = Device("TPU v5p", 95 * GIB, 2.765 * TB, 459e12)

# NVLink 4: 900 GB/s a GPU, both directions together, through NVSwitch (H100 data sheet).
_NVLINK4 = Level("NVLink 4", 8, _NVLINK_LATENCY, 450 * GB)
# One ConnectX-7 at 400 Gb/s for each GPU (NVIDIA DGX H100 user guide; v1 §6).
_NDR = Level("InfiniBand NDR", 512, _NETWORK_LATENCY, 50 * GB)

# Each pair has a link of 64 GB/s a direction, of which 48 are usable (AMD ROCm blog,
# "Understanding RCCL bandwidth and xGMI performance on AMD Instinct MI300X"); RoCE at
# 400 Gb/s a GPU between nodes. Latencies assumed to be NVIDIA's.
_XGMI = Level("xGMI", 8, _NVLINK_LATENCY, 48 * GB, wiring="mesh")
_ROCE = Level("RoCE", 512, _NETWORK_LATENCY, 50 * GB)
# PCI Express 4.0: 16 GT/s on 16 lanes, 128 of 130 bits used. Two cards; more are joined by
# 10 Gb/s Ethernet, which is an assumption, as is TCP's 30 µs.
_PCIE4 = Level("PCIe 4.0 x16", 2, _PCIE_LATENCY, 31.5 * GB)
_GBE_10 = Level("10 GbE", 512, 30e-6, 1.25 * GB, links=1)
# A slice of 16 x 16 x 16 chips; 1,200 GB/s of links a chip, which is six links, of 100 GB/s a
# direction ("TPU v5p", Google Cloud documentation). 1 µs a hop is assumed, and below that XLA
# starts a collective in 1 µs.
_ICI = Level("ICI", 4096, 1e-6, 100 * GB, wiring=(16, 16, 16))
# One 100 Gb/s Ethernet port for the eight GPUs of a node to share. TCP's 30 µs is assumed.
_GBE_100 = Level("100 GbE", 512, 30e-6, 12.5 * GB, links=1)

_ALL = (
    Topology("dgx-h100", H100, (_NVLINK4, _NDR), _NCCL_LAUNCH),
    Topology("dgx-h200", H200, (_NVLINK4, _NDR), _NCCL_LAUNCH),
    Topology("mi300x", MI300X, (_XGMI, _ROCE), _NCCL_LAUNCH),
    Topology("rtx4090", RTX4090, (_PCIE4, _GBE_10), _NCCL_LAUNCH),
    Topology("tpu-v5p", TPU_V5P, (_ICI,), 1e-6),
    Topology("ethernet", H100, (_NVLINK4, _GBE_100), _NCCL_LAUNCH),
)
PRESETS = {topology.name: topology for topology in _ALL}


def preset(name: str, **changes) -> Topology:
    """The topology of that name, with fields of `Topology` replaced by `changes`.

    Raises ValueError, with the names there are, for another.
    """
    if name not in PRESETS:
        raise ValueError(f"topology: expected one of {', '.join(PRESETS)}, got {name!r}")
    return replace(PRESETS[name], **changes)
