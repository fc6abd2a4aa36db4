"""Bytes, rounds, memory and time of decoding with a sharded cache: counted, and calculated.

Everything public is here, under one name: `from labs.cost import collectives, preset`.

- `program`: the collectives and the memory of a compiled program, as they are
- `work`: operations of a program, and merges along its longest path
- `formulas`: what is attended to (`Workload`), and the papers' formulas (2024 eq. 29-35, 2025 8-14)
- `topology`: devices, links, protocols, and presets with their sources
- `schedules`: collectives as algorithms, round by round; `network`: how long they take, simulated
- `roofline`: reading against multiplying, on one device
- `ridge`: how many tokens of each text a step verifies for the price of one
- `merges`: the ways to merge a sharded cache's states, the papers' and serving systems'
- `strategies`: what rings and merges send, hold and take in a step of decoding
- `prefill`: the same for many new tokens at once
- `models`: the sizes of models; `placement`: where a plan's parts lie on a topology
- `sharding`: whole decode steps of a model by heads, sequence, layers, batch, or several of them
- `advice`: all such plans, the fastest, and how many devices would do
- `papers`: what the papers print, and what their authors' scripts would take
- `whole_steps`: forecasts of whole steps, to be held against measured ones
- `calibration`: collectives measured on the devices at hand, for a file that advice reads
- `priced`: which of a plan's collectives such a file has, and which are only described
- `report`: tables of text; `python -m labs.cost` prints advice
"""

from labs.cost.advice import advise, least_devices, plans
from labs.cost.calibration import (
    all_groups,
    calibrate,
    fastest_seconds,
    measure_collectives,
    measured_seconds,
)
from labs.cost.formulas import (
    DTYPE_BYTES,
    STORED_BYTES,
    Workload,
    mem_ring,
    mem_tree,
    numel_kv,
    numel_state,
    v_allreduce,
    v_ring,
    v_tree,
)
from labs.cost.merges import (
    MERGES,
    SCATTERING,
    Message,
    Traffic,
    merge_in_pieces,
    merge_messages,
    merge_seconds,
    state_bytes,
    traffic,
)
from labs.cost.models import MODELS, Model
from labs.cost.network import (
    TimedRound,
    collective_launches,
    collective_rounds,
    collective_seconds,
    collective_sent_bytes,
    run_rounds,
    simulate,
)
from labs.cost.papers import (
    FIGURE_3_CONTEXT,
    FIGURE_3_DEVICES,
    FIGURE_3_SPEEDUP,
    FIGURE_4_GAP_BYTES,
    H100_8B,
    MI300X_8B,
    RTX4090_1B,
    TABLE_1_H100,
    TABLE_1_MI300X,
    TABLE_2_RTX4090,
    Measured,
    ScriptMachine,
    ScriptSetting,
    TableRow,
    common_seconds,
    fit_machine,
    least_seconds,
    script_seconds,
)
from labs.cost.placement import every_nth
from labs.cost.prefill import prefill_seconds
from treeattn.program import (
    COLLECTIVE_KINDS,
    Collective,
    Memory,
    collectives,
    collectives_table,
    count_collectives,
    memory,
    sent_bytes,
    total_bytes,
)
from labs.cost.report import advice_table, bytes_text
from labs.cost.ridge import VerifyWork, cache_fits, free_tokens, verify_seconds, verify_work
from labs.cost.roofline import MACHINES, attend_seconds, step_seconds
from labs.cost.schedules import SCHEDULES, Round, schedule
from labs.cost.sharding import HEADROOM, Plan, Step, held_bytes, step_cost
from labs.cost.strategies import (
    STRATEGIES,
    Cost,
    decode_cost,
    memory_bytes,
    strategy_messages,
)
from labs.cost.topology import (
    CORNERS,
    DEVICES,
    PRESETS,
    Device,
    Level,
    Protocol,
    Topology,
    corners,
    preset,
)
from labs.cost.whole_steps import (
    MEASURED_STEPS,
    Rates,
    StepForecast,
    advice_over_measured,
    data_sheet,
    fit_attending,
    forecast,
    forecast_step,
)
from labs.cost.work import (
    count_merges,
    count_rounds,
    count_tree,
    flops,
    scalar_states,
    states_left,
)
from treeattn.measured import (
    CollectiveTimes,
    Fit,
    Group,
    fit_ranges,
    read_measured,
    write_measured,
)

__all__ = [
    "COLLECTIVE_KINDS",
    "CORNERS",
    "DEVICES",
    "DTYPE_BYTES",
    "FIGURE_3_CONTEXT",
    "FIGURE_3_DEVICES",
    "FIGURE_3_SPEEDUP",
    "FIGURE_4_GAP_BYTES",
    "H100_8B",
    "HEADROOM",
    "MACHINES",
    "MEASURED_STEPS",
    "MERGES",
    "MI300X_8B",
    "MODELS",
    "PRESETS",
    "RTX4090_1B",
    "SCATTERING",
    "SCHEDULES",
    "STORED_BYTES",
    "STRATEGIES",
    "TABLE_1_H100",
    "TABLE_1_MI300X",
    "TABLE_2_RTX4090",
    "Collective",
    "CollectiveTimes",
    "Cost",
    "Device",
    "Fit",
    "Group",
    "Level",
    "Measured",
    "Memory",
    "Message",
    "Model",
    "Plan",
    "Protocol",
    "Rates",
    "Round",
    "ScriptMachine",
    "ScriptSetting",
    "Step",
    "StepForecast",
    "TableRow",
    "TimedRound",
    "Topology",
    "Traffic",
    "VerifyWork",
    "Workload",
    "advice_over_measured",
    "advice_table",
    "advise",
    "all_groups",
    "attend_seconds",
    "bytes_text",
    "cache_fits",
    "calibrate",
    "collective_launches",
    "collective_rounds",
    "collective_seconds",
    "collective_sent_bytes",
    "collectives",
    "collectives_table",
    "common_seconds",
    "corners",
    "count_collectives",
    "count_merges",
    "count_rounds",
    "count_tree",
    "data_sheet",
    "decode_cost",
    "every_nth",
    "fastest_seconds",
    "fit_attending",
    "fit_machine",
    "fit_ranges",
    "flops",
    "forecast",
    "forecast_step",
    "free_tokens",
    "held_bytes",
    "least_devices",
    "least_seconds",
    "measure_collectives",
    "measured_seconds",
    "mem_ring",
    "mem_tree",
    "memory",
    "memory_bytes",
    "merge_in_pieces",
    "merge_messages",
    "merge_seconds",
    "numel_kv",
    "numel_state",
    "plans",
    "prefill_seconds",
    "preset",
    "read_measured",
    "run_rounds",
    "scalar_states",
    "schedule",
    "script_seconds",
    "sent_bytes",
    "simulate",
    "state_bytes",
    "states_left",
    "step_cost",
    "step_seconds",
    "strategy_messages",
    "total_bytes",
    "traffic",
    "v_allreduce",
    "v_ring",
    "v_tree",
    "verify_seconds",
    "verify_work",
    "write_measured",
]
