"""What each way of decoding sends, holds and takes, on a topology.

A strategy is how p devices, each with a chunk of the cache, attend together: which collectives
it runs, with what messages, and what each device computes meanwhile.

| strategy               | sends                                  | each device attends to   |
|------------------------|----------------------------------------|--------------------------|
| ring                   | its keys and values, p − 1 times       | p chunks, one by one     |
| pass-q                 | its queries and their states, p times  | its chunk, p times       |
| kv-gather              | its keys and values, to everybody      | all keys                 |
| ring-allreduce         | states: max, then numerator and        | its chunk                |
| tree-allreduce         |   denominator, by an Allreduce         |                          |
| hierarchical-allreduce |   of that kind                         |                          |
| butterfly              | packed states, to a partner a round    | its chunk                |
| gather                 | packed states, to everybody            | its chunk                |

The first three deal several queries to the devices, ⌈l/p⌉ to each, as `ring_attention` does; the
others have every device attend for all of them. A single query makes the devices of a ring do the
same work p times.

Computing takes what the roofline says, max(bytes / memory bandwidth, operations / peak); sending,
what `network` says, with the topology's launch cost for every collective. Nothing overlaps,
unless asked for. All of these are lower bounds of what a machine would take.
"""

from typing import NamedTuple

from treeattn.cost.formulas import Number, Workload, numel_kv, numel_state
from treeattn.cost.network import (
    collective_launches,
    collective_rounds,
    collective_seconds,
    collective_sent_bytes,
)
from treeattn.cost.topology import Device, Topology

STRATEGIES = (
    "ring", "pass-q", "kv-gather", "ring-allreduce", "tree-allreduce", "hierarchical-allreduce",
    "butterfly", "gather",
)  # fmt: skip


class Message(NamedTuple):
    """`times` collectives of one kind; message_bytes as `schedules.SCHEDULES` counts them."""

    kind: str
    message_bytes: int
    times: int = 1


class Cost(NamedTuple):
    """One decode step on every one of p devices, all layers together.

    collectives:     that the program runs
    rounds:          of messages that they take
    operand_bytes:   that a device puts into them: what the compiled program shows
    sent_bytes:      that the busiest device puts on its links
    memory_bytes:    that a device holds at its peak
    compute_seconds: of attending
    latency_seconds: of launches and of the links' latencies
    volume_seconds:  of the bytes on the links
    seconds:         in all; less than the three together where they overlap
    limit:           what takes the most time, or "memory" where the devices cannot hold it
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
    limit: str


def attend_seconds(w: Workload, keys: int, queries: int, device: Device) -> float:
    """Roofline (Williams et al. 2009) of `queries` over `keys` on one device, for the whole batch.

    Reads keys and values once, 2 b keys d_kv elements; multiplies and adds each with every query
    head, 4 b queries keys d operations.
    """
    return max(_attend_bounds(w, keys, queries, device))


def _attend_bounds(w: Workload, keys: int, queries: int, device: Device) -> tuple[float, float]:
    """(seconds of reading the keys and values, seconds of arithmetic)."""
    read = 2 * w.batch * keys * w.d_kv * w.dtype_bytes / device.memory_bandwidth
    return read, 4 * w.batch * queries * keys * w.d / device.flops


def messages(strategy: str, w: Workload, p: int) -> list[Message]:
    """The collectives of one layer on p devices, as the compiled program has them.

    A ring sends keys and values apart. Of Algorithm 3's three Allreduces XLA joins the two sums.
    States are float32, or float64 where the cache is.
    """
    check_strategy(strategy)
    if p == 1:
        return []
    chunk = numel_kv(w, p) // 2 * w.dtype_bytes  # keys, or values
    max_, state = (n * state_bytes(w) for n in (w.batch * w.queries * w.heads, numel_state(w)))
    share = w.batch * -(-w.queries // p)
    by_strategy = {
        "ring": [Message("ring", chunk, 2)],
        "kv-gather": [Message("all-gather", chunk, 2)],
        "pass-q": [  # the queries, max and denominator, numerator
            Message("round-trip", share * w.d * w.dtype_bytes),
            Message("round-trip", share * w.heads * state_bytes(w), 2),
            Message("round-trip", share * w.d * state_bytes(w)),
        ],
        "gather": [Message("all-gather", state)],
        "butterfly": [Message("butterfly", state)],
    }
    return by_strategy.get(strategy, [Message(strategy, max_), Message(strategy, state - max_)])


def memory_bytes(strategy: str, w: Workload, p: int) -> int:
    """Bytes that a device holds at its peak: the caches of all layers, and one layer's work.

    ring and the Allreduces as v1 eq. 29 and 30 (v2 8 and 9), the others in their manner.
    """
    check_strategy(strategy)
    chunk, whole = (numel_kv(w, n) * w.dtype_bytes for n in (p, 1))
    state = numel_state(w) * state_bytes(w)
    query = w.batch * w.queries * w.d * w.dtype_bytes
    working = {
        "ring": chunk + query,
        "kv-gather": whole + query,
        "pass-q": query + 2 * state,
        "gather": p * state,
        "butterfly": 2 * state,
    }
    return w.layers * chunk + query + working.get(strategy, state)


def _sending(message: Message, p: int, topology: Topology) -> list[Number]:
    """What the message adds to `Cost`, for one layer: collectives, rounds, … volume_seconds."""
    kind, size, times = message
    g, launches = topology.node_size, collective_launches(kind, p)
    empty = collective_seconds(kind, p, 0, topology)
    once = (
        launches,
        collective_rounds(kind, p, g),
        launches * size,
        collective_sent_bytes(kind, p, size, g),
        launches * topology.launch + empty,
        collective_seconds(kind, p, size, topology) - empty,
    )
    return [times * x for x in once]


def decode_cost(
    strategy: str, w: Workload, p: int, topology: Topology, *, overlap: bool = False
) -> Cost:
    """What one step of decoding costs on the first p devices of a topology.

    p need not fill the topology's nodes: devices are taken node by node, the last node is partly
    empty, and an Allreduce that would go by nodes is a plain tree then. Nor need p divide the
    context: everything waits for the longest chunk.

    overlap: whether a ring sends its next chunk while it attends to this one. Nothing else has
             anything to send before it has attended.

    Raises ValueError for an unknown strategy, and for more devices than the topology joins.
    """
    topology.check_devices(p)
    sent = [_sending(m, p, topology) for m in messages(strategy, w, p)] or [[0] * 6]
    *counts, latency, volume = map(sum, zip(*sent, strict=True))

    visits = p if strategy in ("ring", "pass-q") else 1
    keys = w.context if strategy == "kv-gather" else w.chunk(p)
    dealt = strategy in ("ring", "pass-q", "kv-gather")
    queries = -(-w.queries // p) if dealt else w.queries
    read, arithmetic = (visits * x for x in _attend_bounds(w, keys, queries, topology.device))
    compute = max(read, arithmetic)
    seconds = compute + latency + volume
    if overlap and strategy == "ring" and p > 1:
        step, send = compute / p, (latency + volume) / (p - 1)  # p chunks, p − 1 sent
        seconds = step + (p - 1) * max(step, send)

    held = memory_bytes(strategy, w, p)
    parts = {"latency": latency, "link bandwidth": volume}
    parts |= {"memory bandwidth": read} if read >= arithmetic else {"arithmetic": arithmetic}
    fits = held <= topology.device.memory_bytes
    limit = max(parts, key=parts.get) if fits else "memory"
    counts = (w.layers * x for x in counts)
    times = (w.layers * x for x in (compute, latency, volume, seconds))
    return Cost(strategy, *counts, held, *times, limit)


def compare(w: Workload, p: int, topology: Topology, *, overlap: bool = False) -> list[Cost]:
    """`decode_cost` of every strategy, in the order of `STRATEGIES`."""
    return [decode_cost(s, w, p, topology, overlap=overlap) for s in STRATEGIES]


def state_bytes(w: Workload) -> int:
    """Bytes of an element of a state: it is accumulated in float32 at least."""
    return max(4, w.dtype_bytes)


def check_strategy(strategy: str) -> None:
    """Raise ValueError for a strategy that is not one of `STRATEGIES`."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
