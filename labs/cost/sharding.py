"""How should a cache be sharded? A whole decode step of a model, by a plan that splits its work.

A plan splits its devices into groups with a share of the batch each; a group splits the key heads,
and what is left of it splits each head's sequence, whose states are merged. The weights are split
over the group (tensor parallelism), or over parts of it, each of which has all of them, or not at
all, as in the papers' programs. Heads alone are tensor parallelism: beyond the key heads, keys are
on several devices. Heads and sequence are Helix, and vLLM's and SGLang's decode context
parallelism; with a copy of the weights in each node, so that only merges leave a node, Meta's
context and tensor parallelism (arXiv 2411.01783). Stages of layers are a pipeline.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

from labs.cost.formulas import STORED_BYTES, Number, Workload, numel_kv
from labs.cost.merges import Message, merge_messages, traffic
from labs.cost.models import Model
from labs.cost.network import collective_seconds
from labs.cost.placement import every_nth
from labs.cost.roofline import attend_seconds
from labs.cost.topology import Topology

KERNELS = 7  # a layer: norm, projections, rotary and append, output, norm, gate and up, down
IN_SWITCH = 2**18  # bytes; a kernel that reads all of its peers' is no longer the best there
# Of a device's memory, left for activations, buffers and the library: what vLLM leaves, too (its
# `gpu_memory_utilization` is 0.9).
HEADROOM = 0.1


class Plan(NamedTuple):
    """How a model's work is split.

    batch, heads, sequence: shares of each
    merge:         of a sequence's states, one of `MERGES`; None where it is not split
    split_weights: whether the weights are split over a group's devices
    copies:        parts of a group with all weights each, among which the sequence is split first
    stages:        of a pipeline, with a share of the layers each
    """

    batch: int
    heads: int
    sequence: int
    merge: str | None
    split_weights: bool
    copies: int = 1
    stages: int = 1

    def __str__(self) -> str:
        shares = {"batch": self.batch, "layers": self.stages, "heads": self.heads}
        shares["sequence"] = self.sequence
        text = " · ".join(f"{n}× {what}" for what, n in shares.items() if n > 1) or "one device"
        text += f", {self.merge}" if self.merge else ""
        if not self.split_weights:
            return text + ", weights everywhere"
        return text + (f", weights {self.copies} times" if self.copies > 1 else "")

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
        """All that the plan uses."""
        return self.batch * self.stages * self.group

    @property
    def family(self) -> str:
        """What it splits: "batch", "heads", "sequence", "heads + sequence", … or "one device"."""
        shares = {"batch": self.batch, "layers": self.stages, "heads": self.heads}
        shares["sequence"] = self.sequence
        return " + ".join(name for name, n in shares.items() if n > 1) or "one device"


class Step(NamedTuple):
    """Seconds of a decode step by what they are for, and the bytes that a device holds.

    projections: the Allreduces after the output's and the feed-forward's weights, those of the
                 embedding and the logits' gather, and what a pipeline's stages send
    fits:        whether `memory_bytes`, of weights and cache, leave `HEADROOM`
    """

    plan: Plan
    weights: float
    attend: float
    merge: float
    projections: float
    launches: float
    memory_bytes: Number
    fits: bool

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self[1:6])


def step_cost(
    model: Model,
    plan: Plan,
    batch: int,
    context: int,
    topology: Topology,
    *,
    weight_dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
) -> Step:
    """A decode step of `batch` sequences of `context` tokens each, by a plan.

    weight_dtype, cache_dtype: one of `STORED_BYTES` each; activations and Allreduces have 16 bits,
    as in serving systems, and products run at the device's bfloat16 peak.

    The devices of a sequence are neighbours, then those of the heads; where there are copies of
    the weights, those that share one are, its heads' first. Then come the stages, then the batch.
    A pipeline's stages work on a share of its sequences each, and pass them on.

    Raises ValueError for an unknown dtype.
    """
    sequences = -(-batch // plan.batch)
    w = _workload(model, plan, -(-sequences // plan.stages), context, cache_dtype)
    # Stages wait for each other, so that all take as long as the longest; one sequence waits for
    # nobody.
    layers = plan.stages * -(-model.layers // plan.stages) if sequences > 1 else model.layers
    more = layers / model.layers
    device = topology.device
    split_last = model.vocabulary * model.width / plan.weights_over
    attention = model.layers * _attention_weights(model, plan, w)
    read = more * (attention + _feed_forward(model, plan, w.batch)) + split_last
    used = more * (attention + _feed_forward(model, plan, 1)) + split_last
    reading = read * _stored(weight_dtype) / device.memory_bandwidth
    multiplying = 2 * w.batch * used / device.flops
    held = held_bytes(
        model, plan, batch, context, weight_dtype=weight_dtype, cache_dtype=cache_dtype
    )
    return Step(
        plan,
        weights=max(reading, multiplying),
        attend=layers * attend_seconds(w, w.chunk(plan.sequence), 1, device),
        merge=layers * _merge_seconds(plan, replace(w, context=1), topology),
        projections=_projections_seconds(model, plan, w.batch, layers, topology),
        launches=layers * (KERNELS + 1) * topology.launch,
        memory_bytes=held,
        fits=held <= (1 - HEADROOM) * device.memory_bytes,
    )


def held_bytes(
    model: Model,
    plan: Plan,
    batch: int,
    context: int,
    *,
    weight_dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
) -> float:
    """Bytes of weights, both embeddings among them, and of the cache on a device of a plan."""
    w = _workload(model, plan, -(-batch // plan.batch), context, cache_dtype)
    part = -(-model.layers // plan.stages) / model.layers  # of the layers
    attention = model.layers * _attention_weights(model, plan, w)
    layers = part * (attention + _feed_forward(model, plan, float("inf")))
    matrices = 1 if model.tied or plan.stages > 1 else 2  # a pipeline's ends have one each
    embeddings = matrices * model.vocabulary * model.width / plan.weights_over
    cache = part * model.layers * numel_kv(w, plan.sequence) * w.cache_bytes
    return (layers + embeddings) * _stored(weight_dtype) + cache


def _stored(dtype: str) -> int:
    if dtype not in STORED_BYTES:
        known = ", ".join(STORED_BYTES)
        raise ValueError(f"weight_dtype: expected one of {known}, got {dtype!r}")
    return STORED_BYTES[dtype]


@functools.lru_cache(maxsize=65536)
def _workload(model: Model, plan: Plan, batch: int, context: int, cache_dtype: str) -> Workload:
    """What the device of a plan with most heads attends to: whole key heads, or parts of one."""
    together = model.heads // model.kv_heads  # query heads on a key head
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


def _attention_weights(model: Model, plan: Plan, w: Workload) -> int:
    """How many weights of a layer's attention a device has, and reads at each step."""
    if not plan.split_weights:
        return model.projections(model.heads, model.kv_heads) + model.output(model.heads)
    sharing = plan.weights_over // plan.heads  # devices that split the weights of the same heads
    heads = -(-w.heads // sharing)
    kv_heads = -(-w.kv_heads // sharing)
    if plan.merge == "helix":  # all queries of its heads on every device: none to gather
        return model.projections(w.heads, w.kv_heads) + model.output(heads)
    return model.projections(heads, kv_heads) + model.output(heads)


def _feed_forward(model: Model, plan: Plan, tokens: Number) -> float:
    return model.feed_forward(tokens) / plan.weights_over


@functools.lru_cache(maxsize=65536)
def _merge_seconds(plan: Plan, w: Workload, topology: Topology) -> float:
    """Seconds of a layer's merge, the gather of split projections' queries first."""
    if not plan.merge:
        return 0.0
    between = every_nth(topology, plan.merge_stride)
    messages = merge_messages(
        plan.merge, w, plan.sequence, gather_queries=False, node_size=between.node_size
    )
    seconds = traffic(messages, plan.sequence, between).seconds
    sharing = plan.weights_over // plan.heads
    if plan.split_weights and plan.merge != "helix" and sharing > 1:
        queries = w.batch * w.d * w.dtype_bytes / sharing
        seconds += traffic([Message("all-gather", queries)], sharing, between).seconds
    return seconds


@functools.lru_cache(maxsize=65536)
def _projections_seconds(
    model: Model, plan: Plan, batch: int, layers: int, topology: Topology
) -> float:
    """Seconds of a step's Allreduces, of the logits' gather and of a pipeline's sends."""
    p = plan.weights_over
    row = 2 * batch * model.width  # bytes
    seconds = 0.0
    if p > 1:
        seconds += (2 * layers + 1) * kernel_allreduce(p, row, topology)  # and the embedding
        logits = 2 * batch * model.vocabulary / p
        seconds += collective_seconds("all-gather", p, logits, topology)
    if plan.stages > 1:
        # One permute a stage: the last one's goes back to the first, with the next token.
        between = every_nth(topology, stage_stride(plan, topology))
        seconds += plan.stages * collective_seconds("butterfly", 2, row, between)
    return seconds


def stage_stride(plan: Plan, topology: Topology) -> int:
    """How far apart the devices are of which one hands a pipeline's tokens to the other."""
    one_node = plan.stages * plan.group <= topology.node_size
    return plan.group if one_node else max(plan.group, topology.node_size)


def kernel_allreduce(p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of an Allreduce as serving systems have it: in one node, by a kernel of their own.

    A kernel that reads its peers' memory, for few bytes; else the library's. Sums in the switch
    count from `IN_SWITCH` bytes on: nobody printed a time of one with as few as a token has.
    """
    kinds = ["allreduce"]
    if p <= topology.node_size and topology.peers:
        kinds.append("one-shot")
        if topology.reduces and message_bytes >= IN_SWITCH:
            kinds.append("in-switch")
    return min(collective_seconds(kind, p, message_bytes, topology) for kind in kinds)
