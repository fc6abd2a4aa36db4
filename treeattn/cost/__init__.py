"""Bytes, rounds, memory and time of decoding with a sharded cache: counted, and calculated.

- `program`: the collectives and the memory of a compiled program, as they are
- `formulas`: what is attended to (`Workload`), and the papers' formulas (v1 eq. 29-35, v2 8-14)
- `topology`: devices, links, protocols, and presets with their sources
- `schedules`: collectives as algorithms, round by round; `network`: how long they take, simulated
- `merges`: the ways to merge a sharded cache's states, the papers' and serving systems'
- `strategies`: what rings and merges send, hold and take on a topology; prefill and overlap
- `sharding`: whole decode steps of a model by heads, sequence, both or the batch
- `work`: operations, and merges along the longest path, of a program
- `report`: tables of text; `python -m treeattn.cost` prints advice
"""

from treeattn.cost.formulas import Workload
from treeattn.cost.merges import MERGES, merge_seconds
from treeattn.cost.network import collective_seconds
from treeattn.cost.program import Collective, Memory, collectives, memory
from treeattn.cost.report import advice_table
from treeattn.cost.sharding import MODELS, Model, Plan, advise, step_cost
from treeattn.cost.strategies import STRATEGIES, Cost, decode_cost
from treeattn.cost.topology import CORNERS, PRESETS, Device, Level, Topology, preset

__all__ = [
    "CORNERS", "MERGES", "MODELS", "PRESETS", "STRATEGIES", "Collective", "Cost", "Device",
    "Level", "Memory", "Model", "Plan", "Topology", "Workload", "advice_table", "advise",
    "collective_seconds", "collectives", "decode_cost", "memory",
    "merge_seconds", "preset", "step_cost",
]  # fmt: skip
