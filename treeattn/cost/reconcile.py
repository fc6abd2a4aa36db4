"""What the papers' measurements imply, taken together with the model.

The model gives lower bounds. `table_steps` says what a table's ring moved that its tree did not,
so that the tables' gaps give a bandwidth and a fixed cost per step (`fit_step`); and
`common_seconds` says what both methods must have spent besides, for the model's ratio to become
the measured one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treeattn.cost.formulas import Number, Workload, numel_kv
from treeattn.cost.printed import TOKENS, Row
from treeattn.cost.strategies import decode_cost
from treeattn.cost.topology import Topology


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
