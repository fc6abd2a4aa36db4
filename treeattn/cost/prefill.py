"""What a prefill takes, by ring, by gathering the keys, by Ulysses and by a tree."""

from treeattn.cost.formulas import Workload, numel_kv
from treeattn.cost.merges import Message, state_bytes, traffic
from treeattn.cost.roofline import attend_seconds
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
    new = w.queries
    d = w.dtype_bytes
    pairs = new * (w.context - new) + new * (new + 1 if causal else 2 * new) / 2
    compute = max(
        4 * w.batch * pairs * w.d / p / topology.device.flops,
        attend_seconds(w, w.chunk(p), 0, topology.device),
    )
    chunk = numel_kv(w, p) // 2 * d
    share = w.batch * -(-new // p)
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
