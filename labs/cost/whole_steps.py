"""Forecasts of whole decode steps, one term at a time, to be held against measured ones.

What they are held against: arXiv 2411.01783 ("Context Parallelism for Scalable Million-Token
Inference"), Tables 6 to 8. Llama 3 405B on nodes of eight H100s, one sequence, a cache and
projections of 16 bits, a feed-forward network of 8; tensor parallelism over 8, 16 and 32 GPUs, or
over the 8 of each node while nodes share the sequence ("pass-Q").

A forecast adds up what `Rates` says. `data_sheet` has nobody's measurements in it; a repair
replaces one field by something measured elsewhere, or on a row that is then no longer a test.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labs.cost.formulas import Workload
from labs.cost.merges import merge_messages, traffic
from labs.cost.models import MODELS, Model
from labs.cost.network import collective_seconds
from labs.cost.placement import every_nth
from labs.cost.sharding import KERNELS, Plan, step_cost
from labs.cost.topology import Topology, preset

LLAMA_405B = MODELS["llama-3.1-405b"]
MEASURED_STEPS = {8: 46.26e-3, 16: 39.52e-3, 32: 47.3e-3}  # seconds of a token, by H100s
MEASURED_KEYS = 131_072


class Rates(NamedTuple):
    """What a forecast takes for granted.

    network:  the topology that collectives go over
    read:     bytes of weights per second
    attend:   bytes of keys and values per second
    start:    seconds of attending that no key adds to, its launch included
    kernel:   seconds from one of a layer's other kernels to the next
    between:  by which the network's times are multiplied where a collective leaves its node
    exchange: seconds of merging partial outputs across nodes; the network's when None
    send:     seconds of handing queries to the next node; the network's when None
    across:   kind of an Allreduce that leaves its node: the library's fastest, or "ring-allreduce"
    """

    network: Topology
    read: float
    attend: float
    start: float
    kernel: float
    between: float = 1.0
    exchange: float | None = None
    send: float | None = None
    across: str = "allreduce"


class StepForecast(NamedTuple):
    """Seconds of a whole decode step by what they are for."""

    weights: float
    attending: float
    kernels: float
    allreduces: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self)


def data_sheet(topology: Topology) -> Rates:
    """Rates from data sheets and a library's table alone."""
    bandwidth = topology.device.memory_bandwidth
    return Rates(topology, bandwidth, bandwidth, topology.launch, topology.launch)


def forecast_attending(rates: Rates, keys: int, kv_heads: int = 1, head_dim: int = 128) -> float:
    """Seconds of one layer's attending to so many keys of 16 bits, and their values."""
    return rates.start + keys * 2 * kv_heads * head_dim * 2 / rates.attend


def forecast_step(rates: Rates, p: int, context: int, model: Model = LLAMA_405B) -> StepForecast:
    """A step of one sequence by tensor parallelism over p devices.

    Attention's weights and the last projection have 16 bits, the feed-forward network's 8. Beyond
    the key heads devices keep the same keys, and the same weights that make them. Nothing overlaps.
    Allreduces within a node are those of a kernel that reads its peers' memory.
    """
    kv_heads = -(-model.kv_heads // p)
    attention = 2 * model.width * model.head_dim * (model.heads / p + kv_heads)
    feed_forward = 3 * model.width * model.hidden / p
    last = model.vocabulary * model.width / p
    stored = model.layers * (2 * attention + feed_forward) + 2 * last
    keys = forecast_attending(rates, context, kv_heads, model.head_dim)
    one_node = p <= rates.network.node_size
    kind = "one-shot" if one_node else rates.across
    allreduce = collective_seconds(kind, p, 2 * model.width, rates.network)
    if not one_node:
        allreduce *= rates.between
    return StepForecast(
        weights=stored / rates.read,
        attending=model.layers * keys,
        kernels=model.layers * KERNELS * rates.kernel,
        allreduces=2 * model.layers * allreduce,
    )


def _one_a_node(topology: Topology) -> Topology:
    return every_nth(topology, topology.node_size)


def forecast_exchange(rates: Rates, nodes: int, model: Model = LLAMA_405B) -> float:
    """Seconds to merge a layer's partial outputs across nodes, a device of each: one all-to-all."""
    if rates.exchange is not None:
        return rates.exchange
    heads = model.heads // rates.network.node_size
    w = Workload(1, heads=heads, kv_heads=1, head_dim=model.head_dim)
    messages = merge_messages("helix", w, nodes)
    return rates.between * traffic(messages, nodes, _one_a_node(rates.network)).seconds


def forecast_pass_q(rates: Rates, nodes: int, context: int, model: Model = LLAMA_405B) -> float:
    """Seconds of a layer in which queries go round the nodes, and partial outputs home at the end.

    Each of so many steps attends to a node's share of the keys; queries move between steps.
    """
    send = rates.send
    if send is None:
        g = rates.network.node_size
        size = 2 * model.heads // g * model.head_dim
        send = rates.between * collective_seconds("butterfly", 2, size, _one_a_node(rates.network))
    attending = nodes * forecast_attending(rates, context // nodes)
    return attending + (nodes - 1) * send + forecast_exchange(rates, nodes, model)


def forecast(rates: Rates, kind: str, devices: int, keys: int) -> float:
    """Seconds of what was measured: Llama 3 405B's step, or a layer's attending, exchange, pass-Q.

    kind:    "step" by tensor parallelism, "attend", "exchange" of partial outputs, "pass-q"
    devices: of the step; of the other kinds the nodes, each with all eight shares of the heads
    keys:    of the cache; in "attend", those that a device attends to

    Raises ValueError for another kind.
    """
    if kind == "step":
        return forecast_step(rates, devices, keys).seconds
    if kind == "attend":
        return forecast_attending(rates, keys)
    if kind == "exchange":
        return forecast_exchange(rates, devices)
    if kind == "pass-q":
        return forecast_pass_q(rates, devices, keys)
    raise ValueError(f"kind: expected step, attend, exchange or pass-q, got {kind!r}")


def advice_over_measured() -> dict[int, float]:
    """A step as `step_cost` has it over the measured one, on 8, 16 and 32 H100s, all weights of 8
    bits. Nothing in that calculation was fitted to any of them."""
    dgx = preset("dgx-h100")
    ratios = {}
    for p, seconds in MEASURED_STEPS.items():
        plan = Plan(1, p, 1, None, True)
        step = step_cost(LLAMA_405B, plan, 1, MEASURED_KEYS, dgx, weight_dtype="float8")
        ratios[p] = step.seconds / seconds
    return ratios


def fit_attending(
    rates: Rates, keys: Sequence[int], seconds: Sequence[float], head_dim: int = 128
) -> Rates:
    """The rates with the bandwidth and the start that times of attending to one key head show.

    Least squares of a line. Raises ValueError unless there are two lengths and time grows.
    """
    if len(set(keys)) < 2:
        raise ValueError(f"keys: expected two lengths at least, got {list(keys)}")
    stored = 4 * head_dim * np.asarray(keys, float)
    slope, start = np.polyfit(stored, np.asarray(seconds, float), 1)
    if slope <= 0:
        raise ValueError(f"seconds: expected more for more keys, got {list(seconds)}")
    return rates._replace(attend=1 / float(slope), start=float(start))
