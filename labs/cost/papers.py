"""The papers' printed times, and those that their authors' scripts would take.

For Figure 3 the sources give a caption and one value in the text. github.com/Zyphra/tree_attention
has two JAX scripts of the figure's shape, and the PyTorch script with which Tables 1 and 2 were
probably measured.

`script_seconds` goes through `benchmark_generation.py` and `llama_flash_sp.py` and adds up what a
run of either method computes, reads and sends:

- a prefill by ring attention for both methods. Its chunks are in order, so the last rank attends
  to all keys, p − ½ chunks, and sends while it attends;
- `generate(10)` takes its first token from the prefill, then makes nine passes. In each layer
  rotary embedding is applied to the whole cached chunk, and `repeat_kv` copies it, a key head for
  every query head. The query is rotated at every position of the chunk, by broadcasting, and all
  but the last are thrown away. The last rank appends to its cache and does not keep the result;
- the tree attends to its chunk, and makes three small Allreduces;
- the ring agrees on the longest chunk by an Allreduce and `.item()`, for which the CPU waits. It
  copies keys and values (`contiguous`). All ranks but the last pad their chunks by one key of
  float32 zeros from the CPU, which turns the chunks into float32 and back. The chunks are sent
  p − 1 times, with a key head for every query head. Rank r attends to r + 1 chunks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from figures.printed import TableRow
from labs.cost.merges import merge_seconds
from labs.cost.models import MODELS, Model
from labs.cost.network import collective_seconds
from labs.cost.steps import DATA_SHEETS, attend_seconds
from labs.cost.topology import DEVICES, Device, Topology
from labs.cost.workload import Number, Workload

# 2024 §6.1, Figure 3: "close ×8 speedups when we use 128 GPUs on a sequence length of 5.12M".
FIGURE_3_DEVICES = 128
FIGURE_3_CONTEXT = 5_120_000
FIGURE_3_SPEEDUP = 8

PASSES = 9  # after the prefill


class ScriptSetting(NamedTuple):
    """A table's machine: its model, its device, how many of them."""

    model: Model
    device: Device
    devices: int


H100_8B = ScriptSetting(MODELS["llama-3.1-8b"], DEVICES["H100"], 8)
MI300X_8B = ScriptSetting(MODELS["llama-3.1-8b"], DEVICES["MI300X"], 4)
RTX4090_1B = ScriptSetting(MODELS["llama-3.2-1b"], DEVICES["RTX4090"], 2)


class ScriptMachine(NamedTuple):
    """The constants of a run's time that no data sheet has.

    bandwidth:   bytes per second that a device sends in a ring
    utilisation: part of the peak arithmetic and memory bandwidth that is reached
    overhead:    seconds of a layer in a pass, at any length, by either method
    ring_step:   additional seconds of a layer in a pass of the ring
    """

    bandwidth: float
    utilisation: float
    overhead: float
    ring_step: float = 0.0


def script_seconds(
    setting: ScriptSetting, context: int, machine: ScriptMachine
) -> tuple[float, float]:
    """Seconds of a run of the authors' script, (tree, ring): a prefill and `PASSES` passes."""
    model, device, p = setting
    keys = context / p
    queries = keys * model.heads * model.head_dim * 2  # bytes of a chunk, a head for every query
    cached = queries * model.kv_heads / model.heads  # … a head for every key head
    memory = machine.utilisation * device.memory_bandwidth
    prefill = _prefill_seconds(setting, keys, queries, machine)

    # Bytes read and written by rotary (5 chunks of queries, 10 of keys), by repeat_kv (keys and
    # values), by the last rank's append, and by attending (keys and values).
    layer = 5 * queries + 10 * cached + 2 * (cached + queries) + 8 * cached + 2 * queries
    # contiguous() of both; padding of both, by way of float32 (2 + 4 bytes, then 4 + 2 an element).
    more = 4 * queries + 12 * queries
    tree = model.layers * layer / memory + 2 * model.weights / memory
    visit = max(2 * queries / machine.bandwidth, 2 * queries / memory)  # of another rank's chunk
    ring = tree + model.layers * (more / memory + (p - 1) * visit + machine.ring_step)
    fixed = prefill + (1 + PASSES) * model.layers * machine.overhead
    return fixed + PASSES * tree, fixed + PASSES * ring


def _prefill_seconds(
    setting: ScriptSetting, keys: float, queries: float, machine: ScriptMachine
) -> float:
    """Seconds of the script's prefill, on the last of p ranks, with `keys` tokens each.

    queries: bytes of a chunk's queries, or of its keys with a head for every query head
    """
    model, device, p = setting
    flops = machine.utilisation * device.flops
    chunk = 4 * keys * keys * model.heads * model.head_dim / flops  # all queries, all keys
    send = 2 * queries / machine.bandwidth
    attending = chunk / 2 + (p - 1) * max(chunk, send)
    return model.layers * attending + 2 * model.weights * keys / flops


def least_seconds(setting: ScriptSetting, context: int) -> float:
    """A bound: the prefill's operations on the last rank, at the data sheet's peak."""
    model, device, p = setting
    keys = context / p
    pairs = keys * keys * (p - 0.5)
    attending = 4 * model.layers * pairs * model.heads * model.head_dim
    return (attending + 2 * model.weights * keys) / device.flops


def over_printed(
    rows: Sequence[TableRow], setting: ScriptSetting, machine: ScriptMachine
) -> np.ndarray:
    """(rows, 2): predicted over printed, for the tree's column and the ring's."""
    found = [script_seconds(setting, row.context, machine) for row in rows]
    return np.array(found) / [[row.tree.mean, row.ring.mean] for row in rows]


def fit_machine(
    rows: Sequence[TableRow], setting: ScriptSetting, *, ring_step: bool = False
) -> ScriptMachine:
    """The machine that predicts both columns of the rows best, by relative error.

    Utilisation is between 0.1 and 1, and overheads are not negative. The search begins at several
    bandwidths, because it ends in a local minimum.
    """

    def machine(x) -> ScriptMachine:  # GB/s, a share, milliseconds
        return ScriptMachine(1e9 * np.exp(x[0]), x[1], *(1e-3 * x[2:]))

    n = 3 + ring_step
    lower, upper = (np.log(2), 0.1, 0, 0)[:n], (np.log(600), 1, 100, 100)[:n]
    fits = [
        least_squares(
            lambda x: over_printed(rows, setting, machine(x)).ravel() - 1,
            (np.log(bandwidth), 0.5, 1, 1)[:n],
            bounds=(lower, upper),
        )
        for bandwidth in (4, 20, 100)
    ]
    return machine(min(fits, key=lambda fit: fit.cost).x)


# ------------------------------------------------------------------------------- Figure 3


def block_seconds(
    how: str, w: Workload, p: int, topology: Topology, overlap: bool = False
) -> float:
    """One block's decode step by "ring" or by one of `MERGES`, from data sheets alone.

    overlap: whether a ring sends its next chunk while it attends to this one. A merge cannot
             overlap, because its states exist only after attending.
    """
    attend = attend_seconds(w, w.keys_on(p), topology.device, DATA_SHEETS)
    if how != "ring":
        return attend + merge_seconds(how, w, p, topology)
    send = collective_seconds("ring", p, w.cache_bytes(p), topology)
    if not overlap or p == 1:
        return p * attend + send
    return attend + (p - 1) * max(attend, send / (p - 1))


def common_seconds(w: Workload, p: int, topology: Topology, speedup: Number) -> float:
    """Seconds c that both methods pay if (ring + c) / (tree + c) is the measured speedup."""
    ring, tree = (block_seconds(how, w, p, topology) for how in ("ring", "tree"))
    return (ring - speedup * tree) / (speedup - 1)
