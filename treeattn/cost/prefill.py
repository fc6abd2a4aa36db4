"""What a prefill takes, by ring, by gathering the keys, by Ulysses and by a tree."""

import math

from treeattn.cost.formulas import Workload
from treeattn.cost.merges import Message, state_bytes, traffic
from treeattn.cost.roofline import attend_seconds
from treeattn.cost.strategies import kv_messages_bytes
from treeattn.cost.topology import Topology


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
    if strategy not in PREFILLS:
        raise ValueError(
            f"strategy: expected ring, kv-gather, ulysses or tree for a prefill, got {strategy!r}"
        )
    compute = _compute_seconds(w, p, topology, causal)
    if p == 1:
        return compute + topology.launch, 0.0
    return PREFILLS[strategy](w, p, topology, compute)


def _compute_seconds(w: Workload, p: int, topology: Topology, causal: bool) -> float:
    """Seconds of a device's share of one layer: products, or reading its keys if that is longer."""
    new = w.queries
    old = w.context - new
    pairs_of_new = new * (new + 1) / 2 if causal else new * new
    pairs = new * old + pairs_of_new
    multiplying = 2 * w.batch * pairs * (w.d + w.d_out) / p / topology.device.flops
    reading = attend_seconds(w, w.chunk(p), 0, topology.device)
    return max(multiplying, reading)


def _queries_bytes(w: Workload, p: int) -> int:
    """Bytes of the new tokens' queries that one of p devices has."""
    new_here = -(-w.queries // p)
    return w.batch * new_here * w.d * w.dtype_bytes


# Each of these: (workload, p, topology, seconds of computing) -> (seconds, seconds of sending).


def _ring(w: Workload, p: int, topology: Topology, compute: float) -> tuple[float, float]:
    """Keys go round in p − 1 steps, each while the chunk at hand is attended to."""
    messages = [Message("ring", x) for x in kv_messages_bytes(w, p)]
    send = traffic(messages, p, topology).seconds
    step = compute / p + topology.launch
    return step + (p - 1) * max(step, send / (p - 1)), send


def _kv_gather(w: Workload, p: int, topology: Topology, compute: float) -> tuple[float, float]:
    """All keys to everybody, and then attending."""
    messages = [Message("all-gather", x) for x in kv_messages_bytes(w, p)]
    send = traffic(messages, p, topology).seconds
    return compute + topology.launch + send, send


def _ulysses(w: Workload, p: int, topology: Topology, compute: float) -> tuple[float, float]:
    """Whole sequences of a share of the heads: four all-to-alls, and attending between them."""
    if p > w.heads:
        raise ValueError(f"strategy: ulysses needs a query head a device, got {w.heads} heads")
    heads_sent = math.lcm(w.kv_heads, p)  # repeated until the devices divide them
    copies = heads_sent / w.kv_heads
    queries = _queries_bytes(w, p)
    sent = [queries, queries * w.value_dim / w.head_dim]  # there, and outputs back
    sent += [copies * x for x in kv_messages_bytes(w, p)]
    messages = [Message("all-to-all", x) for x in sent]
    send = traffic(messages, p, topology).seconds
    return compute + topology.launch + send, send


def _tree(w: Workload, p: int, topology: Topology, compute: float) -> tuple[float, float]:
    """A share of the queries at a time to everybody, whose states meet while the next attend."""
    pieces = min(8, max(1, w.queries))
    rows = w.batch * w.queries / pieces * w.heads * state_bytes(w)  # a number for each query head
    messages = [
        Message("all-gather", _queries_bytes(w, p) / pieces),
        Message("allreduce", rows),
        Message("reduce-scatter", rows * (w.value_dim + 1)),
    ]
    send = traffic(messages, p, topology).seconds
    step = compute / pieces + topology.launch
    return step + (pieces - 1) * max(step, send) + send, pieces * send


PREFILLS = {"ring": _ring, "kv-gather": _kv_gather, "ulysses": _ulysses, "tree": _tree}
