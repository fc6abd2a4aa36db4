"""Merging the states of a sharded cache: what each way sends, and how long that takes.

Every way ends with the same attention; they differ in who gets it: a sharded output projection
needs a share of the heads on each device only.

| merge          | collectives of a layer                                         | ends on      |
|----------------|----------------------------------------------------------------|--------------|
| tree           | Allreduce of max, of denominators, of numerators (Algorithm 3) | every device |
| tree-joined    | Allreduce of max, of both sums in one: what XLA makes of tree  | every device |
| nodes          | the same two, each in three: in the nodes, between them, back  | every device |
| butterfly      | packed states to a partner a round, a permute each             | every device |
| gather         | packed states to everybody                                     | every device |
| one-shot       | the same in one kernel that reads its peers' memory            | every device |
| hierarchical   | all-to-all in the nodes, gather across, gather in the nodes    | every device |
| reduce-scatter | Allreduce of max; both sums scattered over the heads           | their owners |
| ag-rs          | gather q; gather lse; reduce-scatter 16-bit outputs (vLLM)     | their owners |
| a2a            | gather q; all-to-all of 16-bit outputs with lse (vLLM, SGLang) | their owners |
| helix          | all-to-all of 16-bit outputs and two statistics (TensorRT-LLM) | their owners |
| sglang         | gather q; gather lse; Allreduce of 16-bit outputs              | every device |

Sources: vLLM `vllm/v1/attention/ops/common.py` and `dcp_alltoall.py`; SGLang
`python/sglang/srt/layers/dcp/comm.py`; Helix, arXiv 2507.07120, whose devices all project all
queries, so that none are gathered. All of them keep an output in 16 bits and lse in 32. "nodes" is
an Allreduce by nodes as Horovod has it (`HOROVOD_HIERARCHICAL_ALLREDUCE`), "hierarchical" what this
package's `method="hierarchical"` sends.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from labs.cost.formulas import Number, Workload, numel_state
from labs.cost.network import (
    collective_launches,
    collective_rounds,
    collective_seconds,
    collective_sent_bytes,
)
from labs.cost.placement import every_nth
from labs.cost.roofline import attend_seconds
from labs.cost.topology import Topology
from treeattn.idea.arrays import integer


class Message(NamedTuple):
    """`times` collectives of one kind; message_bytes as `schedules.SCHEDULES` counts them.

    devices: among how many, all when None; the others run the same at the same time
    stride:  how far apart those are: 1 for neighbours
    """

    kind: str
    message_bytes: Number
    times: int = 1
    devices: int | None = None
    stride: int = 1


MERGES = (
    "tree",
    "tree-joined",
    "nodes",
    "butterfly",
    "gather",
    "one-shot",
    "hierarchical",
    "reduce-scatter",
    "ag-rs",
    "a2a",
    "helix",
    "sglang",
)
# Those that leave each device with its share of the heads.
SCATTERING = ("reduce-scatter", "ag-rs", "a2a", "helix")


def merge_messages(
    merge: str,
    w: Workload,
    p: int,
    *,
    gather_queries: bool = True,
    node_size: int | None = None,
) -> list[Message]:
    """The collectives of one layer that merge the states (float32, or float64) of p devices.

    gather_queries: whether merges that gather queries pay for it; else they are everywhere.
    node_size:      devices of a node, for "hierarchical"; all of them when None

    Raises ValueError for another merge than those of `MERGES`, and for a node_size below 1.
    """
    if merge not in MERGES:
        raise ValueError(f"merge: expected one of {', '.join(MERGES)}, got {merge!r}")
    if p == 1:
        return []
    rows = w.batch * w.queries * w.heads  # one for each query of each head
    lse = rows * state_bytes(w)
    out = rows * w.value_dim * w.dtype_bytes
    state = numel_state(w) * state_bytes(w)
    queries = rows * w.head_dim * w.dtype_bytes
    gather = [Message("all-gather", queries / p)] if gather_queries else []
    return {
        "tree": [Message("allreduce", lse, 2), Message("allreduce", state - 2 * lse)],
        "tree-joined": [Message("allreduce", lse), Message("allreduce", state - lse)],
        "nodes": [Message("hierarchical-allreduce", x) for x in (lse, state - lse)],
        "butterfly": [Message("butterfly", state)],
        "gather": [Message("all-gather", state)],
        "one-shot": [Message("one-shot", state)],
        "hierarchical": _by_nodes(w, p, p if node_size is None else node_size),
        "reduce-scatter": [Message("allreduce", lse), Message("reduce-scatter", state - lse)],
        "ag-rs": [*gather, Message("all-gather", lse), Message("reduce-scatter", out)],
        "a2a": [*gather, Message("all-to-all", out + lse)],
        "helix": [Message("all-to-all", out + 2 * lse)],
        "sglang": [*gather, Message("all-gather", lse), Message("allreduce", out)],
    }[merge]


def _by_nodes(w: Workload, p: int, node_size: int) -> list[Message]:
    """`method="hierarchical"`: a share of the heads to each of a node's devices, and back.

    Of p devices that do not fill their nodes, parts of nodes that they do fill take their place.
    """
    node_size = integer("node_size", node_size, 1)
    g = p if p <= node_size else math.gcd(p, node_size)
    of_a_head = numel_state(w) // w.heads * state_bytes(w)
    share = -(-w.heads // g) * of_a_head
    parts = [
        Message("all-to-all", g * share, 1, g),
        Message("all-gather", share, 1, p // g, g),
        Message("all-gather", share, 1, g),
    ]
    return [x for x in parts if x.devices != 1]


class Traffic(NamedTuple):
    """What some collectives of one layer come to.

    collectives:   that the program runs
    rounds:        of messages that they take
    operand_bytes: that a device puts into them: what the compiled program shows
    sent_bytes:    that the busiest device puts on its links
    latency:       seconds that they would take without any bytes, launches included
    volume:        seconds that the bytes add
    """

    collectives: int = 0
    rounds: int = 0
    operand_bytes: Number = 0
    sent_bytes: Number = 0
    latency: Number = 0.0
    volume: Number = 0.0

    @property
    def seconds(self) -> float:
        """Latency and volume."""
        return self.latency + self.volume


def traffic(messages: list[Message], p: int, topology: Topology) -> Traffic:
    """What the messages come to on the first p devices of a topology."""
    total = Traffic()
    for kind, size, times, devices, stride in messages:
        among = p if devices is None else devices
        there = topology if stride == 1 else every_nth(topology, stride)
        g = there.node_size
        launches = collective_launches(kind, among, g)
        latency = collective_seconds(kind, among, 0, there)
        once = Traffic(
            collectives=launches,
            rounds=collective_rounds(kind, among, g),
            operand_bytes=_operand_bytes(kind, size, launches, min(among, g)),
            sent_bytes=collective_sent_bytes(kind, among, size, g),
            latency=latency,
            volume=collective_seconds(kind, among, size, there) - latency,
        )
        total = Traffic(*(a + times * b for a, b in zip(total, once, strict=True)))
    return total


def _operand_bytes(kind: str, size: Number, launches: int, g: int) -> Number:
    """Bytes that a device puts into a collective's launches; by nodes, all of it into the first."""
    if kind == "hierarchical-allreduce":
        return size + (launches - 1) * size / g
    return launches * size


def merge_seconds(
    merge: str, w: Workload, p: int, topology: Topology, *, gather_queries: bool = True
) -> float:
    """Seconds to merge one layer's states across p devices."""
    messages = merge_messages(
        merge, w, p, gather_queries=gather_queries, node_size=topology.node_size
    )
    return traffic(messages, p, topology).seconds


def merge_in_pieces(merge: str, w: Workload, p: int, topology: Topology, pieces: int) -> float:
    """Seconds of a layer whose heads are attended to, and merged, in so many pieces.

    A piece is merged while the next one is attended to: the last merge is waited for, and each
    piece has launches of its own. Raises ValueError when the key heads do not divide.
    """
    if w.kv_heads % pieces:
        raise ValueError(f"pieces: expected a divisor of {w.kv_heads} key heads, got {pieces}")
    part = replace(w, heads=w.heads // pieces, kv_heads=w.kv_heads // pieces, layers=1)
    attend = attend_seconds(part, w.chunk(p), w.queries, topology.device) + topology.launch
    messages = merge_messages(merge, part, p, gather_queries=False, node_size=topology.node_size)
    send = traffic(messages, p, topology).seconds
    return attend + (pieces - 1) * max(attend, send) + send


def state_bytes(w: Workload) -> int:
    """Bytes of an element of a state: it is accumulated in float32 at least."""
    return max(4, w.dtype_bytes)
