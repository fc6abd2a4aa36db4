"""Rooflines: the least time of attending, and of a step that verifies several tokens.

A roofline (Williams, Waterman and Patterson 2009) is the longer of two times: that of reading all
bytes once, at the memory's bandwidth, and that of all operations, at the peak.
"""

from collections.abc import Sequence

import numpy as np

from labs.cost.formulas import Workload
from labs.cost.topology import H100, Device

# (operations per second, bytes per second) by machine. The H100 SXM as its data sheet has it, dense
# bfloat16. The CPU: two cores at 3 GHz with two 8-wide fused multiply-adds a cycle, and a stream of
# 31 GB/s.
MACHINES = {"H100": (H100.flops, H100.memory_bandwidth), "CPU": (192e9, 31e9)}


def attend_seconds(w: Workload, keys: int, queries: int, device: Device) -> float:
    """Roofline (Williams et al. 2009) of `queries` over `keys` on one device, for the whole batch.

    Reads keys and values once, 2 b keys d_kv elements; multiplies and adds each with every query
    head, 4 b queries keys d operations. Of latent values (`Workload`) the keys alone are read.
    """
    read = w.batch * keys * w.kv_width * w.cache_bytes / device.memory_bandwidth
    operations = 2 * w.batch * queries * keys * (w.d + w.d_out)
    return max(read, operations / device.flops)


def step_seconds(
    tokens: int | Sequence[int] | np.ndarray,
    batch: int,
    *,
    parameters: float,
    weight_bytes: float,
    cache_bytes: float,
    peak: float,
    bandwidth: float,
) -> float | np.ndarray:
    """The least seconds of a step that verifies `tokens` of each of `batch` texts.

    tokens:       of each text; n numbers give n times, (n,)
    parameters:   weights, each of which takes a multiplication and an addition for each token
    weight_bytes: of all weights, read once a step
    cache_bytes:  of one text's keys and values, read once a step
    peak:         operations per second
    bandwidth:    bytes per second that are read
    """
    reading = (weight_bytes + batch * cache_bytes) / bandwidth
    multiplying = 2 * parameters * batch * np.asarray(tokens, float) / peak
    return np.maximum(reading, multiplying)
