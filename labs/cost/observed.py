"""Published steps of Llama 3 405B: forecast, missed, and repaired a term at a time.

Forecasts are compared with Tables 6 to 8 of arXiv 2411.01783 ("Context Parallelism for Scalable
Million-Token Inference"), stored in data/observed_steps.json. They have nodes of eight H100s, one
sequence, a cache and projections of 16 bits, and feed-forward weights of 8. Tensor parallelism is
over 8, 16 and 32 GPUs, or over a node's 8 while nodes share the sequence ("pass-Q"). No repair
uses rows marked "held out".
"""

import json
from pathlib import Path

import numpy as np

from labs.cost.merges import merge_messages
from labs.cost.models import MODELS
from labs.cost.network import collective_seconds
from labs.cost.steps import (
    DATA_SHEETS,
    KERNELS,
    Plan,
    Rates,
    attend_seconds,
    sent_seconds,
    step_cost,
)
from labs.cost.topology import every_nth, preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")
LLAMA_405B = MODELS["llama-3.1-405b"]
DATA = Path(__file__).parent / "data"


def observed_steps() -> list[dict]:
    """Rows: a name in "row", the inputs of `forecast`, "microseconds", and the row's "use"."""
    return json.loads((DATA / "observed_steps.json").read_text(encoding="utf-8"))["rows"]


def observed_collectives() -> list[dict]:
    """Tables of collectives' times from public threads: [bytes, microseconds] by machine."""
    return json.loads((DATA / "observed_collectives.json").read_text(encoding="utf-8"))


def forecast(rates: Rates, row: dict) -> float:
    """Seconds that a row measured, forecast by the same functions as the advice.

    kind "step": a token by tensor parallelism over `devices`. The other kinds are of one layer on
    `devices` nodes, each with all eight shares of the heads: "attend" to `keys` on one device,
    "exchange" partial outputs, and "pass-q". There queries go round the nodes, each node attends
    to its share of the keys, and partial outputs return at the end.
    """
    kind, n, keys = row["kind"], row["devices"], row["keys"]
    one_head = Workload(1, heads=LLAMA_405B.heads // 8, kv_heads=1)
    if kind == "step":
        plan = Plan(heads=n)
        step = step_cost(LLAMA_405B, plan, 1, keys, DGX, rates, feed_forward_dtype="float8")
        return step.seconds
    if kind == "attend":
        return attend_seconds(one_head, keys, DGX.device, rates)
    one_a_node = every_nth(DGX, DGX.node_size)
    messages = merge_messages("helix", one_head, n, node_size=1)
    exchange = sent_seconds(messages, n, one_a_node, rates)
    if kind == "exchange":
        return exchange
    if kind == "pass-q":
        hop = collective_seconds("butterfly", 2, one_head.query_bytes, one_a_node)
        send = max(rates.between * hop, rates.send)
        attending = attend_seconds(one_head, keys // n, DGX.device, rates)
        return n * attending + (n - 1) * send + exchange
    raise ValueError(f"kind: expected step, attend, exchange or pass-q, got {kind!r}")


def over_measured(rates: Rates, row: dict) -> float:
    """The forecast over the measured time."""
    return forecast(rates, row) / (1e-6 * row["microseconds"])


def repairs(rows: list[dict]) -> dict[str, Rates]:
    """The rates after each repair, by its evidence, which is never a held-out row."""
    seen = {(x["kind"], x["devices"]): x for x in rows if x["use"] == "fit"}
    found = {"data sheets, NCCL's table": DATA_SHEETS}

    # Attending is a start and a bandwidth: a line through two lengths.
    lengths = [x for x in rows if (x["kind"], x["use"]) == ("attend", "fit")]
    stored = [4 * 128 * x["keys"] for x in lengths]
    slope, start = np.polyfit(stored, [1e-6 * x["microseconds"] for x in lengths], 1)
    read = 1 / float(slope) / DGX.device.memory_bandwidth
    rates = DATA_SHEETS._replace(read=read, start=float(start))
    found["reading as its attention kernel measured"] = rates

    # Other people's H20s, two nodes, few bytes.
    tables = observed_collectives()
    few = next(x["rows"] for x in tables if x["how"] == "NCCL, trees of switches")
    model = [collective_seconds("allreduce", 16, size, DGX) for size, _ in few]
    ratios = [1e-6 * row[1] / seconds for row, seconds in zip(few, model, strict=True)]
    rates = rates._replace(between=float(np.median(ratios)))
    found["all between nodes as on H20s"] = rates

    # The rest of a step on one node, shared by a layer's kernels.
    step = seen["step", 8]
    left = 1e-6 * step["microseconds"] - forecast(rates, step)
    rates = rates._replace(kernel=rates.kernel + left / (LLAMA_405B.layers * KERNELS))
    found["a layer's other kernels, from TP8"] = rates

    # Two nodes: the exchange as printed, and the rest of pass-Q for the send.
    exchange, whole = (1e-6 * seen[kind, 2]["microseconds"] for kind in ("exchange", "pass-q"))
    keys = seen["pass-q", 2]["keys"] // 2
    one_head = Workload(1, heads=LLAMA_405B.heads // 8, kv_heads=1)
    send = whole - exchange - 2 * attend_seconds(one_head, keys, DGX.device, rates)
    found["exchange and sends, from two nodes"] = rates._replace(exchange=exchange, send=send)
    return found
