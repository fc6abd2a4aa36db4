"""Bytes, rounds, memory and time of decoding with a sharded cache: counted, and calculated.

- `program`: the collectives and the memory of a compiled program, as they are
- `formulas`: what is attended to (`Workload`), and the papers' formulas (v1 eq. 29-35, v2 8-14)
- `topology`: devices, links, and presets with their sources
- `schedules`: collectives as algorithms, round by round; `network`: how long they take, simulated
- `strategies`: what rings, trees and butterflies send, hold and take on a topology
- `papers`: what the papers print of their measurements, and what that implies
- `work`: operations, and merges along the longest path, of a program
- `report`: the strategies side by side, as text; `python -m treeattn.cost` prints it
"""

from treeattn.cost.formulas import (
    DTYPE_BYTES,
    Workload,
    mem_ring,
    mem_tree,
    numel_kv,
    numel_state,
    v_allreduce,
    v_ring,
    v_tree,
)
from treeattn.cost.network import (
    Simulated,
    collective_rounds,
    collective_seconds,
    collective_sent_bytes,
    simulate,
)
from treeattn.cost.program import Collective, Memory, collectives, memory
from treeattn.cost.report import cost_table
from treeattn.cost.schedules import SCHEDULES, Round, schedule
from treeattn.cost.strategies import STRATEGIES, Cost, attend_seconds, compare, decode_cost
from treeattn.cost.topology import PRESETS, Device, Level, Topology, preset

__all__ = [
    "DTYPE_BYTES",
    "PRESETS",
    "SCHEDULES",
    "STRATEGIES",
    "Collective",
    "Cost",
    "Device",
    "Level",
    "Memory",
    "Round",
    "Simulated",
    "Topology",
    "Workload",
    "attend_seconds",
    "collective_rounds",
    "collective_seconds",
    "collective_sent_bytes",
    "collectives",
    "compare",
    "cost_table",
    "decode_cost",
    "mem_ring",
    "mem_tree",
    "memory",
    "numel_kv",
    "numel_state",
    "preset",
    "schedule",
    "simulate",
    "v_allreduce",
    "v_ring",
    "v_tree",
]
