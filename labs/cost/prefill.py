"""What a prefill takes, by rings, by gathering the keys, by Ulysses and by a tree."""

import math

from labs.cost.formulas import Number, Workload
from labs.cost.merges import Message, state_bytes, traffic
from labs.cost.roofline import attend_seconds
from labs.cost.strategies import kv_messages_bytes
from labs.cost.topology import Topology


def prefill_seconds(
    strategy: str, w: Workload, p: int, topology: Topology, *, causal: bool = True
) -> tuple[float, float]:
    """(seconds of one layer, seconds of sending in it): the last w.queries of w.context are new.

    strategy: "ring", which sends keys while it attends; "ring-in-order", the same with contiguous
    chunks; "kv-gather", which sends everything before it attends; "ulysses", all-to-alls to whole
    sequences of a share of the heads and back; or "tree", which gathers the queries and scatters
    the states' sums, for a share of the queries at a time while it attends for the next.

    Old and new tokens, and their pairs, are dealt evenly (striped or zigzag), so that a causal
    mask halves everybody's work with the new keys. But in "ring-in-order", as `ring_attention` has
    them without `nodes`, each device has a chunk of the old tokens and one of the new: then the
    last one attends to all keys, in every step, and the others wait for it.

    Raises ValueError for another strategy, and for Ulysses on more devices than query heads.
    """
    if strategy not in PREFILLS:
        raise ValueError(
            f"strategy: expected one of {', '.join(PREFILLS)} for a prefill, got {strategy!r}"
        )
    if p == 1:
        return _attending(w, _pairs(w, causal), w.context, topology), 0.0
    return PREFILLS[strategy](w, p, topology, causal)


def _pairs(w: Workload, causal: bool) -> Number:
    """Pairs of a new token and a token that it sees, of a sequence."""
    return w.queries * (w.context - w.queries) + _pairs_of_new(w.queries, causal)


def _pairs_of_new(new: int, causal: bool) -> Number:
    return new * (new + 1) / 2 if causal else new * new


def _attending(w: Workload, pairs: Number, keys: Number, topology: Topology) -> float:
    """Seconds of a device's launch, its products, or reading so many keys if that is longer."""
    multiplying = 2 * w.batch * pairs * (w.d + w.d_out) / topology.device.flops
    reading = attend_seconds(w, keys, 0, topology.device)
    return max(multiplying, reading) + topology.launch


def _queries_bytes(w: Workload, p: int) -> int:
    """Bytes of the new tokens' queries that one of p devices has."""
    new_here = -(-w.queries // p)
    return w.batch * new_here * w.d * w.dtype_bytes


# Each of these: (workload, p, topology, causal) -> (seconds, seconds of sending).


def _ring(w: Workload, p: int, topology: Topology, causal: bool) -> tuple[float, float]:
    """Keys go round in p − 1 steps, each while the chunk at hand is attended to."""
    step = _attending(w, _pairs(w, causal) / p**2, w.chunk(p), topology)
    send = _ring_send(w, p, topology)
    return (p - 1) * max(step, send / (p - 1)) + step, send


def _ring_send(w: Workload, p: int, topology: Topology) -> float:
    """Seconds in which everybody's keys and values, in one message a step, go around."""
    messages = [Message("ring", sum(kv_messages_bytes(w, p)))]
    return traffic(messages, p, topology).seconds


def _ring_in_order(w: Workload, p: int, topology: Topology, causal: bool) -> tuple[float, float]:
    """As `_ring`, by the steps of the last device, whose new tokens come after all others.

    First it attends to its own chunk, of whose new keys it sees half, then to all of the others'.
    """
    new = -(-w.queries // p)
    old = -(-(w.context - w.queries) // p)
    own = _attending(w, new * old + _pairs_of_new(new, causal), w.chunk(p), topology)
    other = _attending(w, new * (old + new), w.chunk(p), topology)
    send = _ring_send(w, p, topology)
    each = send / (p - 1)
    return max(own, each) + (p - 2) * max(other, each) + other, send


def _kv_gather(w: Workload, p: int, topology: Topology, causal: bool) -> tuple[float, float]:
    """All keys to everybody, and then attending."""
    messages = [Message("all-gather", x) for x in kv_messages_bytes(w, p)]
    send = traffic(messages, p, topology).seconds
    return _attending(w, _pairs(w, causal) / p, w.context, topology) + send, send


def _ulysses(w: Workload, p: int, topology: Topology, causal: bool) -> tuple[float, float]:
    """Whole sequences of a share of the heads: four all-to-alls, and attending between them."""
    if p > w.heads:
        raise ValueError(f"strategy: ulysses needs a query head a device, got {w.heads} heads")
    heads_sent = math.lcm(w.kv_heads, p)  # repeated until the devices divide them
    copies = heads_sent // w.kv_heads
    queries = _queries_bytes(w, p)
    sent = [queries, queries * w.value_dim / w.head_dim]  # there, and outputs back
    sent += [copies * x for x in kv_messages_bytes(w, p)]
    messages = [Message("all-to-all", x) for x in sent]
    send = traffic(messages, p, topology).seconds
    attending = _attending(w, _pairs(w, causal) / p, copies * w.chunk(p), topology)
    return attending + send, send


def _tree(w: Workload, p: int, topology: Topology, causal: bool) -> tuple[float, float]:
    """The queries to everybody, in one piece or in up to 8: the states of one meet while the next
    is attended to. The fastest number of pieces, each of which reads all of a device's keys.
    """
    return min(_tree_in(n, w, p, topology, causal) for n in (1, 2, 4, 8) if n <= w.queries)


def _tree_in(
    pieces: int, w: Workload, p: int, topology: Topology, causal: bool
) -> tuple[float, float]:
    rows = w.batch * w.queries / pieces * w.heads * state_bytes(w)  # a number for each query head
    messages = [
        Message("all-gather", _queries_bytes(w, p) / pieces),
        Message("allreduce", rows),
        Message("reduce-scatter", rows * (w.value_dim + 1)),
    ]
    send = traffic(messages, p, topology).seconds
    step = _attending(w, _pairs(w, causal) / p / pieces, w.chunk(p), topology)
    return step + (pieces - 1) * max(step, send) + send, pieces * send


PREFILLS = {
    "ring": _ring,
    "ring-in-order": _ring_in_order,
    "kv-gather": _kv_gather,
    "ulysses": _ulysses,
    "tree": _tree,
}
