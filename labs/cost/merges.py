"""Merging the states of a sharded cache: what each way sends, and how long that takes.

Every way ends with the same attention; they differ in who gets it: a sharded output projection
needs a share of the heads on each device only.

| merge        | collectives of a layer                                         | ends on      |
|--------------|----------------------------------------------------------------|--------------|
| tree         | Allreduce of max, of denominators, of numerators (Algorithm 3) | every device |
| tree-joined  | Allreduce of max, of both sums in one: what XLA makes of tree  | every device |
| butterfly    | packed states to a partner a round, a permute each             | every device |
| gather       | packed states to everybody                                     | every device |
| one-shot     | the same in one kernel that reads its peers' memory            | every device |
| hierarchical | all-to-all in the nodes, gather across, gather in the nodes    | every device |
| ag-rs        | gather q; gather lse; reduce-scatter 16-bit outputs (vLLM)     | their owners |
| a2a          | gather q; all-to-all of 16-bit outputs with lse (vLLM, SGLang) | their owners |
| helix        | all-to-all of 16-bit outputs and two statistics (TensorRT-LLM) | their owners |

The first six are this project's and the papers', in float32. The others keep an output in 16 bits
and lse in 32. Their sources: vLLM `vllm/v1/attention/ops/common.py` and `dcp_alltoall.py`; SGLang
`python/sglang/srt/layers/dcp/comm.py`; Helix, arXiv 2507.07120, whose devices all project all
queries, so that none are gathered.
"""

import math
from typing import NamedTuple

from labs.cost.network import collective_seconds, collective_sent_bytes
from labs.cost.topology import Topology, every_nth
from labs.cost.workload import Number, Workload


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


SCATTERING = ("ag-rs", "a2a", "helix")  # those that leave each device with its share of the heads
MERGES = ("tree", "tree-joined", "butterfly", "gather", "one-shot", "hierarchical", *SCATTERING)


def merge_messages(
    merge: str, w: Workload, p: int, *, node_size: int, gather_queries: bool = False
) -> list[Message]:
    """The collectives of one layer that merge the states of p devices, node_size in a node.

    gather_queries: whether merges that gather queries pay for it; else they are everywhere.

    Raises ValueError for another merge than those of `MERGES`.
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

    Of p devices that do not fill their nodes, parts of nodes that they do fill take their place.
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
    """Seconds to merge one layer's states across p devices, queries being everywhere."""
    messages = merge_messages(merge, w, p, node_size=topology.node_size)
    return sum(message_seconds(x, p, topology)[0] for x in messages)
