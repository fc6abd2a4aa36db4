"""What the papers' printed times can be compared with: bounds and a model, from data sheets.

For Figure 3 the sources give a caption and one value in the text. github.com/Zyphra/tree_attention
has two JAX scripts of the figure's shape, and the PyTorch script with which Tables 1 and 2 were
probably measured: `benchmark_generation.py`, with `llama_flash_sp.py`. It runs a prefill by ring
attention for both methods, whose chunks are in order, so the last rank attends to all keys.
"""

from typing import NamedTuple

from labs.cost.merges import merge_seconds
from labs.cost.models import MODELS, Model
from labs.cost.network import collective_seconds
from labs.cost.steps import DATA_SHEETS, attend_seconds
from labs.cost.topology import DEVICES, Device, Topology
from labs.cost.workload import Number, Workload


class ScriptSetting(NamedTuple):
    """A table's machine: its model, its device, how many of them."""

    model: Model
    device: Device
    devices: int


H100_8B = ScriptSetting(MODELS["llama-3.1-8b"], DEVICES["H100"], 8)
MI300X_8B = ScriptSetting(MODELS["llama-3.1-8b"], DEVICES["MI300X"], 4)
RTX4090_1B = ScriptSetting(MODELS["llama-3.2-1b"], DEVICES["RTX4090"], 2)


def least_seconds(setting: ScriptSetting, context: int) -> float:
    """A bound: the prefill's operations on the last rank, at the data sheet's peak."""
    model, device, p = setting
    keys = context / p
    pairs = keys * keys * (p - 0.5)
    attending = 4 * model.layers * pairs * model.heads * model.head_dim
    return (attending + 2 * model.weights * keys) / device.flops


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
