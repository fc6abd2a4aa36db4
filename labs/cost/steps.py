"""A whole decode step of a model, by a plan that splits its work over devices.

A plan splits its devices into groups, each with a share of the batch. A group splits the heads. The
devices that share heads split the sequence, and merge its states. The weights are split over the
group (tensor parallelism), over parts of it, each with a copy of the weights, or not at all, as in
the papers' programs. Heads alone are tensor parallelism, with keys on several devices beyond the
key heads. Heads and sequence are Helix, and vLLM's and SGLang's decode context parallelism. With a
copy of the weights in each node, so that only merges leave a node, they are Meta's context and
tensor parallelism (arXiv 2411.01783). Stages of layers are a pipeline.
"""

import functools
from typing import NamedTuple

from labs.cost.merges import Message, merge_messages, message_seconds
from labs.cost.models import Model
from labs.cost.network import collective_seconds
from labs.cost.topology import Device, Topology, every_nth
from labs.cost.workload import Number, Workload, stored_bytes

KERNELS = 7  # a layer: norm, projections, rotary and append, output, norm, gate and up, down
IN_SWITCH = 2**18  # bytes from which sums in the switch count; no measured time has fewer bytes
# The part of a device's memory for activations, buffers and the library. vLLM leaves as much (its
# `gpu_memory_utilization` is 0.9).
HEADROOM = 0.1


class Rates(NamedTuple):
    """The constants of a step, besides the data sheets and the library's table.

    read:     part of the memory's bandwidth that is reached
    start:    seconds of attending to no keys, the kernel's launch included
    kernel:   seconds from one of a layer's other kernels to the next
    inside:   a factor on the network's times for a collective within a node
    between:  … and for a collective that leaves its node
    exchange: seconds of a merge that leaves its node, at least
    send:     seconds to send rows to another node, at least
    """

    read: float
    start: float
    kernel: float
    inside: float = 1.0
    between: float = 1.0
    exchange: float = 0.0
    send: float = 0.0


DATA_SHEETS = Rates(read=1.0, start=3e-6, kernel=3e-6)
# As published steps of Llama 3 405B repair them, row by row (`observed.repairs`).
REPAIRED = Rates(0.62, 6.6e-6, 12.6e-6, between=1.85, exchange=81e-6, send=31e-6)
# Two clusters of A100s and B200s took 2.2 times what the table says, in a node and beyond.
CORNERS = {
    "as repaired": REPAIRED,
    "data sheets": DATA_SHEETS,
    "slow network": REPAIRED._replace(inside=2.2, between=2.2 * 1.85),
}


class Plan(NamedTuple):
    """How a model's work is split.

    batch, heads, sequence: shares of each
    merge:         of a sequence's states, one of `MERGES`; None where it is not split
    split_weights: whether the weights are split over a group's devices
    copies:        parts of a group, each with all weights, that split the sequence first
    stages:        stages of a pipeline, each with a share of the layers
    """

    batch: int = 1
    heads: int = 1
    sequence: int = 1
    merge: str | None = None
    split_weights: bool = True
    copies: int = 1
    stages: int = 1

    def __str__(self) -> str:
        text = " · ".join(f"{n}× {what}" for what, n in self._shares()) or "one device"
        text += f", {self.merge}" if self.merge else ""
        if not self.split_weights:
            return text + ", weights everywhere"
        return text + (f", weights {self.copies} times" if self.copies > 1 else "")

    def _shares(self) -> list[tuple[str, int]]:
        names = ("batch", "layers", "heads", "sequence")
        numbers = (self.batch, self.stages, self.heads, self.sequence)
        return [(what, n) for what, n in zip(names, numbers, strict=True) if n > 1]

    @property
    def family(self) -> str:
        """The split axes: "batch", "heads", "sequence", "heads + sequence", … or "one device"."""
        return " + ".join(what for what, _ in self._shares()) or "one device"

    @property
    def group(self) -> int:
        """Devices that share a sequence's work in a layer."""
        return self.heads * self.sequence

    @property
    def weights_over(self) -> int:
        """Devices that share the weights of a layer."""
        return self.group // self.copies if self.split_weights else 1

    @property
    def merge_stride(self) -> int:
        """How far apart the devices are whose states merge."""
        return self.heads if self.copies > 1 else 1

    @property
    def devices(self) -> int:
        """All devices that the plan uses."""
        return self.batch * self.stages * self.group


class Step(NamedTuple):
    """Seconds of a decode step by purpose, and the bytes that a device holds.

    sums: the Allreduces after output projections, feed-forward networks and the embedding, the
          gather of logits, and the sends between a pipeline's stages
    fits: whether `memory_bytes`, of weights and cache, leave `HEADROOM`
    """

    plan: Plan
    weights: float
    attend: float
    merge: float
    sums: float
    kernels: float
    memory_bytes: Number
    fits: bool

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.weights + self.attend + self.merge + self.sums + self.kernels


def step_cost(
    model: Model,
    plan: Plan,
    batch: int,
    context: int,
    topology: Topology,
    rates: Rates = REPAIRED,
    *,
    weight_dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
    feed_forward_dtype: str | None = None,
) -> Step:
    """A decode step of `batch` sequences of `context` tokens each, by a plan. Nothing overlaps.

    weight_dtype, cache_dtype: each one of `STORED_BYTES`; feed_forward_dtype: of feed-forward
    weights, weight_dtype when None. Activations and Allreduces have 16 bits, as in serving systems,
    and products run at the device's bfloat16 peak.

    The devices of a sequence are neighbours, then those of the heads, the stages, the batch. With
    copies of the weights, the devices of the heads come first, so that a copy's are neighbours.
    Each stage of a pipeline works on a share of the sequences, and passes it on.

    Raises ValueError for an unknown dtype.
    """
    dtypes = (weight_dtype, feed_forward_dtype or weight_dtype)
    sequences = -(-batch // plan.batch)
    w = _workload(model, plan, -(-sequences // plan.stages), context, cache_dtype)
    states = _workload(model, plan, w.batch, 1, cache_dtype)  # merges do not depend on context
    # Stages wait for each other, so all take as long as the longest. One sequence passes each
    # layer once.
    layers = plan.stages * -(-model.layers // plan.stages) if sequences > 1 else model.layers
    device = topology.device
    share = layers / model.layers
    stored, _ = _weights(model, plan, w, w.batch, share, dtypes)
    _, used = _weights(model, plan, w, 1, share, dtypes)
    reading = stored / (rates.read * device.memory_bandwidth)
    held = held_bytes(model, plan, batch, context, dtypes, cache_dtype)
    keys = w.keys_on(plan.sequence)
    return Step(
        plan,
        weights=max(reading, 2 * w.batch * used / device.flops),
        attend=layers * attend_seconds(w, keys, device, rates),
        merge=layers * _merge_seconds(plan, states, topology, rates),
        sums=_sums_seconds(model, plan, w.batch, layers, topology, rates),
        kernels=layers * KERNELS * rates.kernel,
        memory_bytes=held,
        fits=held <= (1 - HEADROOM) * device.memory_bytes,
    )


def attend_seconds(w: Workload, keys: int, device: Device, rates: Rates = REPAIRED) -> float:
    """Seconds of a kernel's start, and of reading keys and values or of products, if longer."""
    read = w.bytes_of(keys) / (rates.read * device.memory_bandwidth)
    return rates.start + max(read, w.flops(keys) / device.flops)


def held_bytes(
    model: Model,
    plan: Plan,
    batch: int,
    context: int,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    cache_dtype: str = "bfloat16",
) -> Number:
    """Bytes of the weights, including both embeddings, and of the cache on a plan's device.

    dtypes: (of attention and embeddings, of feed-forward networks)
    """
    w = _workload(model, plan, -(-batch // plan.batch), context, cache_dtype)
    layers = -(-model.layers // plan.stages)
    weights, _ = _weights(model, plan, w, float("inf"), layers / model.layers, dtypes)
    matrix = model.vocabulary * model.width / plan.weights_over * stored_bytes("", dtypes[0])
    one = model.tied or plan.stages > 1  # a pipeline's ends have one embedding each
    return weights + (0 if one else matrix) + layers * w.cache_bytes(plan.sequence)


@functools.lru_cache(maxsize=65536)
def _workload(model: Model, plan: Plan, batch: int, context: int, cache_dtype: str) -> Workload:
    """The workload of a plan's device with most heads: whole key heads, or a part of one."""
    together = model.heads // model.kv_heads  # query heads of a key head
    kv_heads = -(-model.kv_heads // plan.heads)
    if plan.heads <= model.kv_heads:
        heads = kv_heads * together
    else:
        heads = -(-together // (plan.heads // model.kv_heads))
    return Workload(
        context,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        latent=model.latent,
        cache_dtype=cache_dtype,
    )


def _weights(
    model: Model, plan: Plan, w: Workload, tokens: Number, share: float, dtypes: tuple[str, str]
) -> tuple[Number, Number]:
    """(bytes, number) of a device's weights that so many tokens use: a share of the layers'
    attention and feed-forward, and the last projection."""
    last = model.vocabulary * model.width / plan.weights_over
    others = share * model.layers * _attention_weights(model, plan, w) + last
    feed_forward = share * model.feed_forward(tokens) / plan.weights_over
    stored = others * stored_bytes("weight_dtype", dtypes[0])
    stored += feed_forward * stored_bytes("feed_forward_dtype", dtypes[1])
    return stored, others + feed_forward


def _attention_weights(model: Model, plan: Plan, w: Workload) -> int:
    """How many weights of a layer's attention a device has, and reads at each step."""
    if not plan.split_weights:
        return model.projections(model.heads, model.kv_heads) + model.output(model.heads)
    sharing = plan.weights_over // plan.heads  # devices that split the weights of the same heads
    heads = -(-w.heads // sharing)
    kv_heads = -(-w.kv_heads // sharing)
    if plan.merge == "helix":  # a device projects all queries of its heads, and gathers none
        return model.projections(w.heads, w.kv_heads) + model.output(heads)
    return model.projections(heads, kv_heads) + model.output(heads)


def sent_seconds(messages: list[Message], p: int, topology: Topology, rates: Rates) -> float:
    """Seconds of a layer's merge among p devices; at least `exchange` if it leaves its node."""
    total, leaves_node = 0.0, False
    for x in messages:
        seconds, leaves = message_seconds(x, p, topology)
        total += seconds * (rates.between if leaves else rates.inside)
        leaves_node |= leaves
    return max(total, rates.exchange) if leaves_node else total


@functools.lru_cache(maxsize=65536)
def _merge_seconds(plan: Plan, w: Workload, topology: Topology, rates: Rates) -> float:
    """Seconds of a layer's merge, with the gather of queries if their projection is split."""
    if not plan.merge:
        return 0.0
    there = every_nth(topology, plan.merge_stride)
    messages = merge_messages(plan.merge, w, plan.sequence, node_size=there.node_size)
    sharing = plan.weights_over // plan.heads
    if plan.split_weights and plan.merge != "helix" and sharing > 1:
        messages.append(Message("all-gather", w.query_bytes / sharing, 1, sharing))
    return sent_seconds(messages, plan.sequence, there, rates)


@functools.lru_cache(maxsize=65536)
def _sums_seconds(
    model: Model, plan: Plan, batch: int, layers: int, topology: Topology, rates: Rates
) -> float:
    """Seconds of a step's Allreduces, of the logits' gather and of a pipeline's sends."""
    p = plan.weights_over
    row = 2 * batch * model.width  # bytes
    factor = rates.between if p > topology.node_size else rates.inside
    seconds = 0.0
    if p > 1:
        seconds += factor * (2 * layers + 1) * allreduce_seconds(p, row, topology)  # and embedding
        logits = 2 * batch * model.vocabulary / p
        seconds += factor * collective_seconds("all-gather", p, logits, topology)
    if plan.stages > 1:
        # One permute a stage: the last stage sends the next token back to the first.
        one_node = plan.stages * plan.group <= topology.node_size
        stride = plan.group if one_node else max(plan.group, topology.node_size)
        hop = collective_seconds("butterfly", 2, row, every_nth(topology, stride))
        hop = rates.inside * hop if one_node else max(rates.between * hop, rates.send)
        seconds += plan.stages * hop
    return seconds


def allreduce_seconds(p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of the fastest Allreduce of serving systems: the library's, in one node also a
    kernel that reads its peers' memory, and for many bytes sums in the switch."""
    kinds = ["allreduce"]
    if p <= topology.node_size:
        kinds.append("one-shot")
        if message_bytes >= IN_SWITCH:
            kinds.append("in-switch")
    return min(collective_seconds(kind, p, message_bytes, topology) for kind in kinds)
