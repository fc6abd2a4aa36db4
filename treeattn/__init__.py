"""Tree Attention in JAX.

Attention over a set of keys is a small state; the states of disjoint sets merge. See
`treeattn.state` for that idea, and the notebooks for where it leads.
"""

from treeattn.cluster import kv_mesh, simulate_devices
from treeattn.state import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
)

__all__ = [
    "AttentionState",
    "finalize",
    "from_output",
    "kv_mesh",
    "merge",
    "reduce_chain",
    "reduce_tree",
    "scan_states",
    "simulate_devices",
]
