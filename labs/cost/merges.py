"""Merging the states of a sharded cache: the bytes that each way sends, and its time.

All merges calculate the same attention. They differ in the devices that receive it, because a
sharded output projection needs only a share of the heads on each device.

| merge        | collectives of a layer                                         | ends on      |
|--------------|----------------------------------------------------------------|--------------|
| tree         | Allreduce of max, of denominators, of numerators (Algorithm 3) | every device |
| tree-joined  | Allreduce of max, of both sums in one, as XLA compiles tree    | every device |
| butterfly    | packed states to a partner a round, a permute each             | every device |
| gather       | packed states to all devices                                   | every device |
| one-shot     | the same in one kernel that reads its peers' memory            | every device |
| hierarchical | all-to-all in the nodes, gather across, gather in the nodes    | every device |
| ag-rs        | gather q; gather lse; reduce-scatter 16-bit outputs (vLLM)     | their owners |
| a2a          | gather q; all-to-all of 16-bit outputs with lse (vLLM, SGLang) | their owners |
| helix        | all-to-all of 16-bit outputs and two statistics (TensorRT-LLM) | their owners |

The first six are this project's and the papers', in float32. The others send outputs in 16 bits
and lse in 32. Their sources: vLLM `vllm/v1/attention/ops/common.py` and `dcp_alltoall.py`, SGLang
`python/sglang/srt/layers/dcp/comm.py`, and Helix, arXiv 2507.07120. In Helix every device projects
all queries, so none are gathered.
"""

import math
from typing import NamedTuple

from labs.cost.network import collective_seconds, collective_sent_bytes
from labs.cost.topology import Topology, every_nth
from labs.cost.workload import Number, Workload


class Message(NamedTuple):
    """`times` collectives of one kind; message_bytes as `schedules.SCHEDULES` counts them.

    devices: how many take part, all when None; the others run the same at the same time
    stride:  how far apart the devices are: 1 for neighbours
    """

    kind: str
    message_bytes: Number
    times: int = 1
    devices: int | None = None
    stride: int = 1


SCATTERING = ("ag-rs", "a2a", "helix")  # these leave each device with its share of the heads
MERGES = ("tree", "tree-joined", "butterfly", "gather", "one-shot", "hierarchical", *SCATTERING)


def merge_messages(
    merge: str, w: Workload, p: int, *, node_size: int, gather_queries: bool = False
) -> list[Message]:
    """The collectives of one layer that merge the states of p devices, node_size in a node.

    gather_queries: whether the gather of queries counts; else every device has them.

    Raises ValueError for a merge that is not in `MERGES`.
    """
    if merge not in MERGES:
        raise ValueError(f"merge: expected one of {', '.join(MERGES)}, got {merge!r}")
    if p == 1:
        return []
    lse = 4 * w.rows
    gather = [Message("all-gather", w.query_bytes / p)] if gather_queries else []
    return {
        "tree": [Message("allreduce", lse, 2), Message("allreduce", w.state_bytes - 2 * lse)],
        "tree-joined": [Message("allreduce", lse), Message("allreduce", w.state_bytes - lse)],
        "butterfly": [Message("butterfly", w.state_bytes)],
        "gather": [Message("all-gather", w.state_bytes)],
        "one-shot": [Message("one-shot", w.state_bytes)],
        "hierarchical": _by_nodes(w, p, node_size),
        "ag-rs": [*gather, Message("all-gather", lse), Message("reduce-scatter", w.output_bytes)],
        "a2a": [*gather, Message("all-to-all", w.output_bytes + lse)],
        "helix": [Message("all-to-all", w.output_bytes + 2 * lse)],
    }[merge]


def _by_nodes(w: Workload, p: int, node_size: int) -> list[Message]:
    """`method="hierarchical"`: a share of the heads to each of a node's devices, and back.

    If p devices do not fill their nodes, the largest parts that they fill count as nodes.
    """
    g = p if p <= node_size else math.gcd(p, node_size)
    share = -(-w.heads // g) * w.state_bytes / w.heads
    parts = [
        Message("all-to-all", g * share, 1, g),
        Message("all-gather", share, 1, p // g, g),
        Message("all-gather", share, 1, g),
    ]
    return [x for x in parts if x.devices != 1]


def sent_bytes(messages: list[Message], p: int, node_size: int) -> Number:
    """Bytes that the busiest of p devices puts on its links."""
    return sum(
        x.times * collective_sent_bytes(x.kind, x.devices or p, x.message_bytes, node_size)
        for x in messages
    )


def message_seconds(x: Message, p: int, topology: Topology) -> tuple[float, bool]:
    """(seconds of the message's collectives, whether they leave a node)."""
    among = x.devices or p
    there = every_nth(topology, x.stride)
    seconds = x.times * collective_seconds(x.kind, among, x.message_bytes, there)
    return seconds, among > there.node_size


def merge_seconds(merge: str, w: Workload, p: int, topology: Topology) -> float:
    """Seconds to merge one layer's states across p devices that all have the queries."""
    messages = merge_messages(merge, w, p, node_size=topology.node_size)
    return sum(message_seconds(x, p, topology)[0] for x in messages)
