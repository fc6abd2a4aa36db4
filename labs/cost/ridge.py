"""How many tokens of each text a step can verify before it takes longer: with both tree attentions.

A step reads the weights once, however many tokens it multiplies them with, and each text's cache
once, however many of that text's tokens attend to it. With b bytes a number, a device that reads B
bytes and does R operations a second hides the products behind the reading up to

    n* = b/2 · R/B          tokens of all texts together, for the weights, and
    n* = b/2 · R/B · n_kv/n_h    tokens of each text, for the cache, whatever the context and batch

(each key head is multiplied with n_h/n_kv query heads). So what a node of a prefix tree costs falls
with the context: MagicDec, https://arxiv.org/abs/2408.11049, has this for chains of guesses. Where
p devices share the weights and the contexts, they share the reading and the products alike, but
have to send more for every node.
"""

from typing import NamedTuple

from labs.cost.formulas import DTYPE_BYTES, Number, Workload, numel_kv
from labs.cost.merges import Message, merge_messages, traffic
from labs.cost.models import Model
from labs.cost.sharding import kernel_allreduce
from labs.cost.topology import Device, Topology
from treeattn.idea.arrays import integer

MOST = 1024  # tokens of a text that `free_tokens` looks at


class VerifyWork(NamedTuple):
    """What one device reads and computes in a step that verifies trees of tokens.

    weight_bytes, weight_flops:   of its share of the weights
    context_bytes, context_flops: of attending to its share of the contexts
    tree_bytes, tree_flops:       of the trees' nodes attending to each other
    """

    weight_bytes: Number
    weight_flops: Number
    context_bytes: Number
    context_flops: Number
    tree_bytes: Number
    tree_flops: Number

    def seconds(self, device: Device, *, overlap: bool = False) -> float:
        """The roofline: reading or computing, whichever takes longer.

        overlap: whether all of the step's reading hides all of its computing. Else the weights'
                 products and attention, of which each waits for the other's result, have a
                 roofline each, and their times add up.
        """
        pairs = [
            (self.weight_bytes, self.weight_flops),
            (self.context_bytes + self.tree_bytes, self.context_flops + self.tree_flops),
        ]
        if overlap:
            pairs = [tuple(map(sum, zip(*pairs, strict=True)))]
        return sum(max(x / device.memory_bandwidth, y / device.flops) for x, y in pairs)


def verify_work(
    model: Model, tokens: int, batch: int, context: int, *, p: int = 1, dtype: str = "bfloat16"
) -> VerifyWork:
    """What each of p devices does to verify `tokens` of each of `batch` texts, all layers together.

    The weights are split over the devices, and so is each text's context; the tree's own keys are
    on all of them, and each computes the tree's state, all pairs of nodes, for itself.
    """
    w = _workload(model, tokens, batch, context, dtype)
    keys = w.chunk(p)
    weights = model.weights / p
    return VerifyWork(
        weight_bytes=weights * w.dtype_bytes,
        weight_flops=2 * weights * w.batch * w.queries,
        context_bytes=w.layers * numel_kv(w, p) * w.dtype_bytes,
        context_flops=w.layers * 4 * w.batch * w.queries * keys * w.d,
        tree_bytes=w.layers * 2 * w.batch * w.queries * w.d_kv * w.dtype_bytes,
        tree_flops=w.layers * 4 * w.batch * w.queries**2 * w.d,
    )


def verify_seconds(
    model: Model,
    tokens: int,
    batch: int,
    context: int,
    topology: Topology,
    *,
    p: int = 1,
    merge: str = "reduce-scatter",
    overlap: bool = False,
    dtype: str = "bfloat16",
) -> float:
    """The least seconds of a step that verifies `tokens` of each of `batch` texts on p devices.

    Beside the work of `verify_work` it counts what a layer sends: new queries, keys and values to
    all devices, the states by `merge` (one of `MERGES`), and the two Allreduces of split weights.
    Launches of kernels are left out: they do not depend on the number of tokens.

    overlap: as in `VerifyWork.seconds`; what is sent is waited for in any case

    Raises ValueError for an unknown merge or dtype, for sizes below 1, and for more devices than
    the topology joins; TypeError for sizes that are not whole numbers.
    """
    topology.check_devices(p)
    work = verify_work(model, tokens, batch, context, p=p, dtype=dtype)
    w = _workload(model, tokens, batch, context, dtype)
    node_size = topology.node_size
    messages = merge_messages(merge, w, p, gather_queries=False, node_size=node_size)
    if p == 1:
        return work.seconds(topology.device, overlap=overlap)
    rows = w.batch * w.queries * w.dtype_bytes
    messages = [Message("all-gather", rows * (w.d + 2 * w.d_kv) / p), *messages]
    send = traffic(messages, p, topology).seconds
    send += 2 * kernel_allreduce(p, rows * model.width, topology)
    return work.seconds(topology.device, overlap=overlap) + w.layers * send


def free_tokens(
    model: Model, batch: int, context: int, topology: Topology, *, more: float = 0.1, **options
) -> int:
    """How many tokens of each text are free: a step of so many takes at most 1 + more times one's.

    options: of `verify_seconds`. At most `MOST`.
    """
    limit = (1 + more) * verify_seconds(model, 1, batch, context, topology, **options)
    least, beyond = 1, MOST + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        seconds = verify_seconds(model, middle, batch, context, topology, **options)
        least, beyond = (middle, beyond) if seconds <= limit else (least, middle)
    return least


def cache_fits(
    model: Model, batch: int, context: int, device: Device, *, p: int = 1, dtype="bfloat16"
) -> bool:
    """Whether p such devices hold the weights and the caches of `batch` texts."""
    w = _workload(model, 1, batch, context, dtype)
    held = model.weights * DTYPE_BYTES[dtype] / p + w.layers * numel_kv(w, p) * w.dtype_bytes
    return held <= device.memory_bytes


def _workload(model: Model, tokens: int, batch: int, context: int, dtype: str) -> Workload:
    """What attends to what in each layer."""
    return Workload(
        context,
        batch=batch,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        queries=integer("tokens", tokens, 1),
        dtype=dtype,
        layers=model.layers,
    )
