"""Formulas for how long the collectives of `treeattn.cost.network` take.

Latency plus bytes over bandwidth, round by round, with the level of links that the round goes
over: the α-β model, as Thakur, Rabenseifner and Gropp (2005, "Optimization of collective
communication operations in MPICH", §3-4) use it for rings, trees and recursive doubling on links
of one kind. The formulas hold for switches and meshes whose units' sizes are powers of two, in
which each round of a tree or a butterfly stays on one level; the tests hold them to the
simulation. Launch costs are not included.
"""

from treeattn.cost.formulas import Number
from treeattn.cost.network import SCHEDULES, message_seconds, schedule, simulate, strides
from treeattn.cost.topology import Topology


def ring_pass_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """(p − 1) times the slowest link's step: every round waits for it."""
    slowest = max(
        topology.step_seconds(level, message_bytes)
        for level in range(topology.stride_level(p - 1) + 1)
    )
    return (p - 1) * slowest


def round_trip_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """p times the slowest link's step."""
    return p / (p - 1) * ring_pass_seconds(p, message_bytes, topology)


def ring_allreduce_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """2 (p − 1) times the slowest link's step, with 1/p of the message."""
    return 2 * ring_pass_seconds(p, message_bytes / p, topology)


def tree_allreduce_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """Twice Σ_k (latency + bytes / bandwidth) over the levels of strides 2^k < p.

    From a node, only the first device sends: nobody shares its link.
    """
    return 2 * sum(
        topology.step_seconds(topology.stride_level(stride), message_bytes) for stride in strides(p)
    )


def butterfly_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """Σ_k (latency + bytes / bandwidth); all of a node's devices share the links out of it."""
    core = 1 << (p.bit_length() - 1)

    def step(stride: int, senders: int) -> float:
        return topology.step_seconds(topology.stride_level(stride), message_bytes, senders)

    seconds = sum(step(stride, core) for stride in strides(core))
    return seconds + (2 * step(core, p - core) if p > core else 0)


def hierarchical_allreduce_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """2 (g − 1) steps in the node and 2 ⌈log₂ p/g⌉ between nodes, with 1/g of the message."""
    g = min(p, topology.node_size)
    if p % g:
        return tree_allreduce_seconds(p, message_bytes, topology)
    part = message_bytes / g
    within = (g - 1) * topology.step_seconds(0, part) if g > 1 else 0
    across = sum(
        topology.step_seconds(topology.stride_level(g * stride), part, senders=g)
        for stride in strides(p // g)
    )
    return 2 * (within + across)


FORMULAS = {
    "ring": ring_pass_seconds,
    "round-trip": round_trip_seconds,
    "all-gather": ring_pass_seconds,
    "ring-allreduce": ring_allreduce_seconds,
    "tree-allreduce": tree_allreduce_seconds,
    "hierarchical-allreduce": hierarchical_allreduce_seconds,
    "butterfly": butterfly_seconds,
}


def collective_rounds(kind: str, p: int, g: int = 1) -> int:
    """Rounds of a collective on p devices, g in a node."""
    g = min(p, g)
    depth = (p - 1).bit_length()  # ⌈log₂ p⌉
    if kind in ("ring", "all-gather"):
        return p - 1
    if kind == "round-trip":
        return p
    if kind == "ring-allreduce":
        return 2 * (p - 1)
    if kind == "butterfly":
        return depth if p & (p - 1) == 0 else depth + 1  # ⌊log₂ p⌋ + 2
    if kind == "hierarchical-allreduce" and p % g == 0:
        return 2 * (g - 1) + 2 * (p // g - 1).bit_length()
    return 2 * depth


def collective_sent_bytes(kind: str, p: int, message_bytes: Number, g: int = 1) -> Number:
    """Bytes that the device that sends most puts on its links, in a collective on p devices.

    The ring's Allreduce sends the least that any Allreduce can (v1 eq. 33, v2 eq. 12).
    """
    g = min(p, g)
    depth = (p - 1).bit_length()
    if kind in ("ring", "all-gather"):
        return (p - 1) * message_bytes
    if kind == "round-trip":
        return p * message_bytes
    if kind == "ring-allreduce":
        return 2 * (p - 1) / p * message_bytes
    if kind == "butterfly":
        return (p.bit_length() - 1 + (p & (p - 1) > 0)) * message_bytes
    if kind == "hierarchical-allreduce" and p % g == 0:
        return (2 * (g - 1) + (p // g - 1).bit_length()) / g * message_bytes
    return depth * message_bytes


def collective_seconds(kind: str, p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of one collective on p devices, by formula where one holds, else by simulation.

    kind and message_bytes as in `network.SCHEDULES`. Raises ValueError for an unknown kind, and
    when the topology has fewer than p devices.
    """
    topology.check_devices(p)
    if kind not in SCHEDULES:
        raise ValueError(f"kind: expected one of {', '.join(SCHEDULES)}, got {kind!r}")
    if p == 1:
        return 0.0
    if topology.has_closed_forms():
        return FORMULAS[kind](p, message_bytes, topology)
    if kind in ("ring", "round-trip", "all-gather"):  # the slowest link's step, every time
        step = message_seconds(next(schedule(kind, p, message_bytes, topology)), topology).max()
        return collective_rounds(kind, p) * float(step)
    return simulate(schedule(kind, p, message_bytes, topology), p, topology).seconds


def merge_seconds(
    kind: str, p: int, state_bytes: Number, topology: Topology, parts: int = 2
) -> float:
    """Seconds to merge states of that size across p devices, launches included.

    kind: "gather", for an all-gather of packed states; "butterfly", a launch for every round; or
          an Allreduce, of which there are `parts`: 3 as Algorithm 3 writes them, 2 as XLA joins
          them. The bytes are those of all parts together.
    """
    if kind == "gather":
        return topology.launch + collective_seconds("all-gather", p, state_bytes, topology)
    seconds = collective_seconds(kind, p, state_bytes, topology)
    if kind == "butterfly":
        return collective_rounds(kind, p) * topology.launch + seconds
    return (
        parts * topology.launch + seconds + (parts - 1) * collective_seconds(kind, p, 0, topology)
    )
