"""What the papers print of their measurements, and what that implies together with the model.

The numbers are only what stands in the papers' text and tables. Of Figures 2, 3 and 4 the sources
give captions and a few values in the text, and nothing can be read off the plots: those few values
are all there is.

The model gives lower bounds. `table_steps` says what a table's ring moved that its tree did not,
so that the tables' gaps give a bandwidth and a fixed cost per step (`fit_step`); and
`common_seconds` says what both methods must have spent besides, for the model's ratio to become
the measured one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treeattn.cost.formulas import Number, Workload, numel_kv
from treeattn.cost.strategies import decode_cost
from treeattn.cost.topology import Topology

# v1 §6.1, Figure 3: "close ×8 speedups when we use 128 GPUs on a sequence length of 5.12M".
FIGURE_3_DEVICES, FIGURE_3_CONTEXT, FIGURE_3_SPEEDUP = 128, 5_120_000, 8

# v1 §6.2, Figure 4, two RTX 4090s: the gap between the methods' peaks, by hidden size, in bytes.
FIGURE_4_GAP_BYTES = {2048: 524e6, 4096: 1040e6}


class Measured(NamedTuple):
    """A time in seconds, its mean over ten runs and its standard error."""

    mean: float
    error: float


class Row(NamedTuple):
    """A line of Table 1 or 2: decoding ten tokens, prefill included, by either attention."""

    context: int
    tree: Measured
    ring: Measured
    speedup: int  # as printed

    @property
    def gap(self) -> Measured:
        """Ring's time less tree's: what the two do alike, prefill and all, cancels."""
        error = (self.tree.error**2 + self.ring.error**2) ** 0.5
        return Measured(self.ring.mean - self.tree.mean, error)


def _row(context, tree, tree_error, ring, ring_error, speedup) -> Row:
    return Row(context, Measured(tree, tree_error), Measured(ring, ring_error), speedup)


TOKENS = 10  # decoded in each run of the tables

# v2 Table 1: Llama 3.1 8B. "32k" is taken as 32,000.
TABLE_1_H100 = (  # 8 × H100
    _row(32_000, 0.60, 0.15, 2.57, 0.35, 4),
    _row(64_000, 1.08, 0.10, 4.42, 0.38, 4),
    _row(128_000, 2.68, 0.28, 6.38, 0.58, 2),
    _row(256_000, 2.89, 0.62, 8.19, 1.07, 3),
)
TABLE_1_MI300X = (  # 4 × MI300X
    _row(32_000, 1.05, 0.01, 3.57, 0.25, 3),
    _row(64_000, 2.36, 0.01, 7.33, 0.25, 3),
    _row(128_000, 6.43, 0.25, 16.40, 0.40, 3),
    _row(256_000, 15.30, 4.93, 35.12, 5.02, 2),
)
# v2 Table 2: Llama 3.2 1B on two RTX 4090s.
TABLE_2_RTX4090 = (
    _row(8_000, 0.34, 0.05, 1.38, 0.07, 4),
    _row(16_000, 0.58, 0.07, 2.77, 0.04, 5),
    _row(20_000, 0.74, 0.01, 3.47, 0.04, 5),
    _row(32_000, 1.01, 0.02, 5.45, 0.03, 5),
)


class Setting(NamedTuple):
    """A table's model and devices: query heads, key heads, head dimension, layers, devices."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    devices: int

    def workload(self, context: int, *, repeated: bool) -> Workload:
        """A decode step; `repeated` when key heads are copied for each query head."""
        return Workload(
            context,
            heads=self.heads,
            kv_heads=self.heads if repeated else self.kv_heads,
            head_dim=self.head_dim,
            layers=self.layers,
        )


# Llama 3.1 8B and Llama 3.2 1B (their published configurations).
H100_8B = Setting(32, 8, 128, 32, 8)
MI300X_8B = Setting(32, 8, 128, 32, 4)
RTX4090_1B = Setting(32, 8, 64, 16, 2)


class Steps(NamedTuple):
    """What a ring moves in a run of a table: steps, and bytes in each."""

    steps: int
    step_bytes: int


def table_steps(setting: Setting, context: int, *, repeated: bool = True) -> Steps:
    """The ring's steps for `TOKENS` tokens, (p − 1) a layer and token, and the bytes of each.

    repeated: whether key heads are copied for every query head before they are sent, as the
              authors' scripts do.
    """
    w = setting.workload(context, repeated=repeated)
    steps = (setting.devices - 1) * setting.layers * TOKENS
    return Steps(steps, numel_kv(w, setting.devices) * w.dtype_bytes)


class Fit(NamedTuple):
    """seconds = bytes / bandwidth + steps × step_seconds, fitted to measured gaps."""

    bandwidth: float
    step_seconds: float

    def seconds(self, steps: Steps) -> float:
        """What the fit says for these steps."""
        return steps.steps * (steps.step_bytes / self.bandwidth + self.step_seconds)


def fit_step(rows: Sequence[Row], setting: Setting, *, fixed: bool, repeated: bool = True) -> Fit:
    """The bandwidth, and with `fixed` the fixed cost of a step, that fit the gaps of the rows best.

    By least squares, each gap weighted with its standard error. Raises ValueError with fewer
    rows than numbers to fit.
    """
    if len(rows) < 1 + fixed:
        raise ValueError(f"rows: expected at least {1 + fixed} to fit, got {len(rows)}")
    moved = [table_steps(setting, row.context, repeated=repeated) for row in rows]
    columns = np.array([[m.steps * m.step_bytes, m.steps * fixed] for m in moved], float)
    weights = 1 / np.array([row.gap.error for row in rows])
    gaps = np.array([row.gap.mean for row in rows])
    scale = columns.max(axis=0) + (columns.max(axis=0) == 0)
    found = np.linalg.lstsq(columns / scale * weights[:, None], gaps * weights, rcond=None)[0]
    per_byte, per_step = found / scale
    return Fit(float(1 / per_byte), float(per_step))


def common_seconds(
    w: Workload, p: int, topology: Topology, speedup: Number, tree: str = "tree-allreduce"
) -> float:
    """Seconds c for which (ring + c) / (tree + c) is the measured speedup."""
    ring, tree = (decode_cost(s, w, p, topology).seconds for s in ("ring", tree))
    return (ring - speedup * tree) / (speedup - 1)
