"""What each way of attending to a sharded cache sends, holds and takes, on a topology.

A strategy is how p devices, each with a chunk of the cache, attend together. A ring sends its keys
and values to the next device, p − 1 times, in one message, as `ring_decode` does on GPUs; pass-q,
its queries, and then all their states home at once; kv-gather gives its keys and values to
everybody; these three deal several queries to the devices, ⌈l/p⌉ to each. Any of `MERGES` sends
states, after each device has attended to its chunk for all queries.

Attending takes what the roofline says, max(bytes / memory bandwidth, operations / peak), and a
launch; sending, what `network` says. Nothing overlaps, unless asked for.
"""

from typing import NamedTuple

from labs.cost.formulas import Workload, numel_kv, numel_state
from labs.cost.merges import MERGES, Message, merge_messages, state_bytes, traffic
from labs.cost.roofline import attend_seconds
from labs.cost.topology import Topology

STRATEGIES = ("ring", "pass-q", "kv-gather", *MERGES)


class Cost(NamedTuple):
    """One decode step on every one of p devices, all layers together.

    collectives … sent_bytes, latency_seconds and volume_seconds as in `merges.Traffic`
    memory_bytes:    that a device holds at its peak
    compute_seconds: of attending, launches included
    seconds:         in all; less than the three together where they overlap
    """

    strategy: str
    collectives: int
    rounds: int
    operand_bytes: int
    sent_bytes: float
    memory_bytes: int
    compute_seconds: float
    latency_seconds: float
    volume_seconds: float
    seconds: float


def strategy_messages(
    strategy: str, w: Workload, p: int, node_size: int | None = None
) -> list[Message]:
    """The collectives of one layer on p devices; the queries are everywhere, as the papers' are.

    node_size: as in `merge_messages`
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy in MERGES:
        return merge_messages(strategy, w, p, gather_queries=False, node_size=node_size)
    if p == 1:
        return []
    share = w.batch * -(-w.queries // p)
    return {
        "ring": [Message("ring", sum(kv_messages_bytes(w, p)))],
        "kv-gather": [Message("all-gather", x) for x in kv_messages_bytes(w, p)],
        "pass-q": [  # the queries from device to device, everybody's states of them home
            Message("ring", share * w.d * w.dtype_bytes),
            Message("all-to-all", p * share * (w.d_out + 2 * w.heads) * state_bytes(w)),
        ],
    }[strategy]


def kv_messages_bytes(w: Workload, p: int) -> list[int]:
    """Bytes of a device's keys and of its values; of latent ones the keys' alone."""
    keys = w.batch * w.chunk(p) * w.d_kv * w.cache_bytes
    both = numel_kv(w, p) * w.cache_bytes
    return [keys] if w.latent else [keys, both - keys]


def memory_bytes(strategy: str, w: Workload, p: int) -> int:
    """Bytes that a device holds at its peak: the caches of all layers, and one layer's work.

    A ring and the trees as 2024 eq. 29 and 30 (2025 8 and 9), the others in their manner.
    """
    chunk = numel_kv(w, p) * w.cache_bytes
    whole = numel_kv(w, 1) * w.cache_bytes
    state = numel_state(w) * state_bytes(w)
    query = w.batch * w.queries * w.d * w.dtype_bytes
    working = {
        "ring": chunk + query,
        "kv-gather": whole + query,
        "pass-q": query + 2 * state,
        "gather": p * state,
        "one-shot": p * state,
        "butterfly": 2 * state,
        "hierarchical": 2 * state,
    }
    return w.layers * chunk + query + working.get(strategy, state)


def decode_cost(
    strategy: str, w: Workload, p: int, topology: Topology, *, overlap: bool = False
) -> Cost:
    """What one step of decoding costs on the first p devices of a topology.

    p need not fill the topology's nodes: devices are taken node by node, and the last node is
    partly empty. Nor need p divide the context: everything waits for the longest chunk.

    overlap: whether a ring sends its next chunk while it attends to this one. What a merge has to
             send, it has after attending.

    Raises ValueError for an unknown strategy, and for more devices than the topology joins.
    """
    topology.check_devices(p)
    messages = strategy_messages(strategy, w, p, topology.node_size)
    sent = traffic(messages, p, topology)
    visits = p if strategy in ("ring", "pass-q") else 1
    keys = w.context if strategy == "kv-gather" else w.chunk(p)
    dealt = strategy in ("ring", "pass-q", "kv-gather")
    queries = -(-w.queries // p) if dealt else w.queries
    compute = visits * (attend_seconds(w, keys, queries, topology.device) + topology.launch)
    seconds = compute + sent.seconds
    if overlap and strategy == "ring" and p > 1:
        step = compute / p  # there are p chunks
        send = sent.seconds / (p - 1)  # … of which p − 1 are sent
        seconds = step + (p - 1) * max(step, send)

    return Cost(
        strategy,
        collectives=w.layers * sent.collectives,
        rounds=w.layers * sent.rounds,
        operand_bytes=w.layers * sent.operand_bytes,
        sent_bytes=w.layers * sent.sent_bytes,
        memory_bytes=memory_bytes(strategy, w, p),
        compute_seconds=w.layers * compute,
        latency_seconds=w.layers * sent.latency,
        volume_seconds=w.layers * sent.volume,
        seconds=w.layers * seconds,
    )
