"""What each way of attending to a sharded cache sends, holds and takes, on a topology.

A strategy is how p devices, each with a chunk of the cache, attend together: what they send, and
what each device computes meanwhile.

| strategy          | sends                                  | each device attends to  |
|-------------------|----------------------------------------|-------------------------|
| ring              | its keys and values, p − 1 times       | p chunks, one by one    |
| pass-q            | its queries and their states, p times  | its chunk, p times      |
| kv-gather         | its keys and values, to everybody      | all keys                |
| any of `MERGES`   | states, by that merge                  | its chunk               |

The first three deal several queries to the devices, ⌈l/p⌉ to each, as `ring_attention` does; the
others have every device attend for all of them. A single query makes the devices of a ring do the
same work p times.

Attending takes what the roofline says, max(bytes / memory bandwidth, operations / peak), and a
launch; sending, what `network` says. Nothing overlaps, unless asked for.
"""

from typing import NamedTuple

from treeattn.cost.formulas import Workload, numel_kv, numel_state
from treeattn.cost.merges import MERGES, Message, merge_messages, state_bytes, traffic
from treeattn.cost.topology import Device, Topology

STRATEGIES = ("ring", "pass-q", "kv-gather", *MERGES)


class Cost(NamedTuple):
    """One decode step on every one of p devices, all layers together.

    collectives … sent_bytes, latency_seconds and volume_seconds as in `merges.Traffic`
    memory_bytes:    that a device holds at its peak
    compute_seconds: of attending, launches included
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


def messages(strategy: str, w: Workload, p: int, *, gather_queries: bool = False) -> list[Message]:
    """The collectives of one layer on p devices; a ring sends keys and values apart.

    gather_queries: as for `merge_messages`. The papers have them everywhere.
    """
    check_strategy(strategy)
    if strategy in MERGES:
        return merge_messages(strategy, w, p, gather_queries=gather_queries)
    if p == 1:
        return []
    chunk = numel_kv(w, p) // 2 * w.dtype_bytes  # keys, or values
    share = w.batch * -(-w.queries // p)
    return {
        "ring": [Message("ring", chunk, 2)],
        "kv-gather": [Message("all-gather", chunk, 2)],
        "pass-q": [  # the queries, max and denominator, numerator
            Message("round-trip", share * w.d * w.dtype_bytes),
            Message("round-trip", share * w.heads * state_bytes(w), 2),
            Message("round-trip", share * w.d * state_bytes(w)),
        ],
    }[strategy]


def memory_bytes(strategy: str, w: Workload, p: int) -> int:
    """Bytes that a device holds at its peak: the caches of all layers, and one layer's work.

    A ring and the trees as v1 eq. 29 and 30 (v2 8 and 9), the others in their manner.
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
        "one-shot": p * state,
        "butterfly": 2 * state,
    }
    return w.layers * chunk + query + working.get(strategy, state)


def decode_cost(
    strategy: str,
    w: Workload,
    p: int,
    topology: Topology,
    *,
    overlap: bool = False,
    gather_queries: bool = False,
) -> Cost:
    """What one step of decoding costs on the first p devices of a topology.

    p need not fill the topology's nodes: devices are taken node by node, and the last node is
    partly empty. Nor need p divide the context: everything waits for the longest chunk.

    overlap: whether a ring sends its next chunk while it attends to this one. What a merge has to
             send, it has after attending; `merge_in_pieces` says what pieces would save.

    Raises ValueError for an unknown strategy, and for more devices than the topology joins.
    """
    topology.check_devices(p)
    sent = traffic(messages(strategy, w, p, gather_queries=gather_queries), p, topology)
    visits = p if strategy in ("ring", "pass-q") else 1
    keys = w.context if strategy == "kv-gather" else w.chunk(p)
    dealt = strategy in ("ring", "pass-q", "kv-gather")
    queries = -(-w.queries // p) if dealt else w.queries
    read, arithmetic = (visits * x for x in _attend_bounds(w, keys, queries, topology.device))
    compute = max(read, arithmetic) + visits * topology.launch
    seconds = compute + sent.seconds
    if overlap and strategy == "ring" and p > 1:
        step, send = compute / p, sent.seconds / (p - 1)  # p chunks, p − 1 sent
        seconds = step + (p - 1) * max(step, send)

    held = memory_bytes(strategy, w, p)
    parts = {"latency": sent.latency + visits * topology.launch, "link bandwidth": sent.volume}
    parts |= {"memory bandwidth": read} if read >= arithmetic else {"arithmetic": arithmetic}
    fits = held <= topology.device.memory_bytes
    limit = max(parts, key=parts.get) if fits else "memory"
    counts = (w.layers * x for x in sent[:4])
    times = (w.layers * x for x in (compute, sent.latency, sent.volume, seconds))
    return Cost(strategy, *counts, held, *times, limit)


def compare(w: Workload, p: int, topology: Topology, *, overlap: bool = False) -> list[Cost]:
    """`decode_cost` of every strategy, in the order of `STRATEGIES`."""
    return [decode_cost(s, w, p, topology, overlap=overlap) for s in STRATEGIES]


def merge_in_pieces(merge: str, w: Workload, p: int, topology: Topology, pieces: int) -> float:
    """Seconds of a layer whose heads are attended to, and merged, in so many pieces.

    A piece is merged while the next one is attended to: the last merge is waited for, and each
    piece has launches of its own. Raises ValueError when the key heads do not divide.
    """
    if w.kv_heads % pieces:
        raise ValueError(f"pieces: expected a divisor of {w.kv_heads} key heads, got {pieces}")
    part = Workload(
        w.context, w.batch, w.heads // pieces, w.kv_heads // pieces, w.head_dim, w.queries, w.dtype
    )
    attend = attend_seconds(part, w.chunk(p), w.queries, topology.device) + topology.launch
    send = traffic(merge_messages(merge, part, p, gather_queries=False), p, topology).seconds
    return attend + (pieces - 1) * max(attend, send) + send


def prefill_seconds(
    strategy: str, w: Workload, p: int, topology: Topology, *, causal: bool = True
) -> tuple[float, float]:
    """(seconds of one layer, seconds of sending in it): the last w.queries of w.context are new.

    Old and new tokens, and their pairs, are dealt evenly (striped or zigzag), so that a causal
    mask halves everybody's work with the new keys. strategy: "ring", which sends keys while it
    attends; "kv-gather", everything before it attends; "ulysses", all-to-alls to whole sequences
    of a share of the heads and back; or "tree", which gathers the queries and scatters the states'
    sums, for a share of the queries at a time while it attends for the next.

    Raises ValueError for another strategy, and for Ulysses on more devices than query heads.
    """
    new, d = w.queries, w.dtype_bytes
    pairs = new * (w.context - new) + new * (new + 1 if causal else 2 * new) / 2
    compute = max(
        4 * w.batch * pairs * w.d / p / topology.device.flops,
        _attend_bounds(w, w.chunk(p), 0, topology.device)[0],
    )
    chunk, share = numel_kv(w, p) // 2 * d, w.batch * -(-new // p)
    if p == 1:
        return compute + topology.launch, 0.0
    if strategy == "ring":
        send = traffic([Message("ring", chunk, 2)], p, topology).seconds
        step = compute / p + topology.launch
        return step + (p - 1) * max(step, send / (p - 1)), send
    if strategy == "kv-gather":
        send = traffic([Message("all-gather", chunk, 2)], p, topology).seconds
        return compute + topology.launch + send, send
    if strategy == "ulysses":
        if p > w.heads:
            raise ValueError(f"strategy: ulysses needs a query head a device, got {w.heads} heads")
        keys = w.batch * w.context * max(w.kv_heads, p) * w.head_dim * d / p
        back_and_forth = Message("all-to-all", share * w.d * d, 2)
        send = traffic([back_and_forth, Message("all-to-all", keys, 2)], p, topology).seconds
        return compute + topology.launch + send, send
    if strategy == "tree":
        pieces = min(8, max(1, new))
        rows = w.batch * new / pieces * w.heads * state_bytes(w)  # one number for each query head
        send = traffic(
            [
                Message("all-gather", share * w.d * d / pieces),
                Message("allreduce", rows),
                Message("reduce-scatter", rows * (w.head_dim + 1)),
            ],
            p,
            topology,
        ).seconds
        step = compute / pieces + topology.launch
        return step + (pieces - 1) * max(step, send) + send, pieces * send
    raise ValueError(
        f"strategy: expected ring, kv-gather, ulysses or tree for a prefill, got {strategy!r}"
    )


def check_strategy(strategy: str) -> None:
    """Raise ValueError for a strategy that is not one of `STRATEGIES`."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
