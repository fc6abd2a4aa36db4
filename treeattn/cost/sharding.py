"""How should a cache be sharded? A whole decode step of a model, by every way to split its work.

A plan splits p devices into groups with a share of the batch each; a group splits the key heads,
and what is left of it splits each head's sequence, whose states are merged. The weights are split
over the group (tensor parallelism), or every device has them all, as in the papers' programs.
Heads alone are tensor parallelism: beyond the key heads, keys are on several devices. Heads and
sequence are Helix, and vLLM's and SGLang's decode context parallelism.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treeattn.cost.formulas import DTYPE_BYTES, Number, Workload, numel_kv
from treeattn.cost.merges import MERGES, SCATTERING, Message, merge_messages, traffic
from treeattn.cost.network import collective_seconds
from treeattn.cost.roofline import attend_seconds
from treeattn.cost.topology import DATA, Topology

KERNELS = 7  # a layer: norm, projections, rotary and append, output, norm, gate and up, down


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama: what a step of it reads."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    head_dim: int = 128

    @property
    def layer(self) -> tuple[int, int]:
        """Weights of a layer: to queries, keys and values; the output's and the feed-forward's."""
        projected = self.head_dim * (self.heads + 2 * self.kv_heads)
        return self.width * projected, self.width * (self.heads * self.head_dim + 3 * self.hidden)

    @property
    def weights(self) -> int:
        """Weights that a step reads: all layers' and the last projection's."""
        return self.layers * sum(self.layer) + self.vocabulary * self.width


MODELS = {name: Model(name, **sizes) for name, sizes in DATA["models"].items()}


class Plan(NamedTuple):
    """Shares of the batch, of the heads, of the sequence; the merge; whether weights are split."""

    batch: int
    heads: int
    sequence: int
    merge: str | None
    split_weights: bool

    def __str__(self) -> str:
        parts = [f"{n}× {what}" for what, n in zip(self._fields, self[:3], strict=False) if n > 1]
        text = " · ".join(parts) or "one device"
        text += f", {self.merge}" if self.merge else ""
        return text + ("" if self.split_weights else ", weights everywhere")

    @property
    def group(self) -> int:
        """Devices that share a sequence's work."""
        return self.heads * self.sequence

    @property
    def family(self) -> str:
        """What it splits: "batch", "heads", "sequence", "heads + sequence", … or "one device"."""
        shares = {"batch": self.batch, "heads": self.heads, "sequence": self.sequence}
        return " + ".join(name for name, n in shares.items() if n > 1) or "one device"


class Step(NamedTuple):
    """Seconds of a decode step by what they are for, and the bytes that a device holds."""

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
    model: Model, plan: Plan, batch: int, context: int, topology: Topology, dtype="bfloat16"
) -> Step:
    """A decode step of `batch` sequences of `context` tokens each, by a plan.

    The devices of a sequence are neighbours, then those of the heads, then those of the batch.
    """
    w = Workload(
        context,
        batch=-(-batch // plan.batch),
        heads=max(1, model.heads // plan.heads),
        kv_heads=max(1, model.kv_heads // plan.heads),
        head_dim=model.head_dim,
        dtype=dtype,
    )
    weights = _weights_held(model, plan)
    weights_bytes = weights * DTYPE_BYTES[dtype]
    reading = weights_bytes / topology.device.memory_bandwidth
    multiplying = 2 * w.batch * weights / topology.device.flops
    attend = attend_seconds(w, w.chunk(plan.sequence), 1, topology.device)
    merge = traffic(_merge_messages(plan, w), plan.sequence, topology).seconds
    projections = _projections_seconds(model, plan, w, topology)
    cache_bytes = model.layers * numel_kv(w, plan.sequence) * w.dtype_bytes
    held = weights_bytes + cache_bytes
    return Step(
        plan,
        weights=max(reading, multiplying),
        attend=model.layers * attend,
        merge=model.layers * merge,
        projections=model.layers * projections,
        launches=model.layers * (KERNELS + 1) * topology.launch,
        memory_bytes=held,
        fits=held <= topology.device.memory_bytes,
    )


def _weights_held(model: Model, plan: Plan) -> float:
    """How many of the model's weights a device has, and reads at each step."""
    share = plan.group if plan.split_weights else 1
    # Helix projects all queries of its heads on every device: nothing to gather, more to read.
    projected_share = plan.heads if plan.merge == "helix" else share
    projected, rest = model.layer
    layers = model.layers * (projected / projected_share + rest / share)
    return layers + model.vocabulary * model.width / share


def _merge_messages(plan: Plan, w: Workload) -> list[Message]:
    """What a layer's merge sends, the queries of split projections first."""
    if not plan.merge:
        return []
    messages = merge_messages(plan.merge, w, plan.sequence, gather_queries=False)
    if plan.split_weights and plan.merge != "helix":
        queries = w.batch * w.d * w.dtype_bytes / plan.sequence
        messages = [Message("all-gather", queries), *messages]
    return messages


def _projections_seconds(model: Model, plan: Plan, w: Workload, topology: Topology) -> float:
    """Seconds of a layer's two Allreduces, after the output's and the feed-forward's weights."""
    if not plan.split_weights or plan.group == 1:
        return 0.0
    message_bytes = w.batch * model.width * w.dtype_bytes
    return 2 * kernel_allreduce(plan.group, message_bytes, topology)


def kernel_allreduce(p: int, message_bytes: Number, topology: Topology) -> float:
    """Seconds of an Allreduce as serving systems have it: in one node, by a kernel of their own."""
    kinds = ["allreduce"]
    if p <= topology.node_size:
        kinds += ["one-shot"] + ["in-switch"] * topology.reduces
    return min(collective_seconds(kind, p, message_bytes, topology) for kind in kinds)


def plans(model: Model, batch: int, p: int, merges=MERGES) -> Iterator[Plan]:
    """All plans with shares that are powers of two and come to p devices.

    Raises ValueError for a number of devices that is no power of two.
    """
    if p & (p - 1):
        raise ValueError(f"p: plans are for a power of two, got {p}")
    sizes = [1 << k for k in range(p.bit_length())]
    for shares in sizes:
        for heads in sizes:
            if shares > batch or heads > model.heads or p % (shares * heads):
                continue
            sequence = p // shares // heads
            for split in (True, False):
                if sequence == 1:
                    if split or heads == 1:
                        yield Plan(shares, heads, 1, None, split)
                elif heads <= model.kv_heads and (split or heads == 1):
                    for merge in merges:
                        if split or merge not in SCATTERING:
                            yield Plan(shares, heads, sequence, merge, split)


def advise(
    model: Model, batch: int, context: int, p: int, topology: Topology, merges=MERGES
) -> list[Step]:
    """All plans' steps, the fastest first; those that do not fit come last.

    Merges by one kernel that reads its peers' memory are for devices of one node only.
    """
    steps = [
        step_cost(model, plan, batch, context, topology)
        for plan in plans(model, batch, p, merges)
        if plan.merge != "one-shot" or plan.sequence <= topology.node_size
    ]
    return sorted(steps, key=lambda step: (not step.fits, step.seconds))
