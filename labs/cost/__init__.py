"""What a cluster would do: how to shard a model's cache, and the grounds of the advice.

`python -m labs.cost --model llama-3.1-8b --nodes 2 --context 1M` prints advice. Each module
builds on those before it:

- `workload`: the sizes of one layer's attention
- `topology`: devices and links, with presets and their sources
- `schedules`: collectives as algorithms, round by round
- `network`: how long collectives take, simulated
- `merges`: the ways to merge a sharded cache's states, the papers' and serving systems'
- `models`: the sizes of models
- `steps`: a whole decode step by a plan
- `advice`: all plans
- `observed`: published times, and the constants that they repair
- `papers`: what the papers' printed times can be compared with
- `drawing`: the notebook's figures
"""

from labs.cost.advice import advice_table, advise, least_devices
from labs.cost.merges import MERGES, merge_messages, merge_seconds, sent_bytes
from labs.cost.models import MODELS, find_model
from labs.cost.steps import CORNERS, DATA_SHEETS, Plan, step_cost
from labs.cost.topology import preset
from labs.cost.workload import Workload

__all__ = [
    "CORNERS",
    "DATA_SHEETS",
    "MERGES",
    "MODELS",
    "Plan",
    "Workload",
    "advice_table",
    "advise",
    "find_model",
    "least_devices",
    "merge_messages",
    "merge_seconds",
    "preset",
    "sent_bytes",
    "step_cost",
]
