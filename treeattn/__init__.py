"""Tree Attention in JAX.

Attention over a set of keys is a small state; the states of disjoint sets merge. See
`treeattn.state` for that idea, and the notebooks for where it leads.
"""

from treeattn.cluster import kv_mesh, simulate_devices
from treeattn.local import attend, attention
from treeattn.state import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
)
from treeattn.tree import merge_across, tree_decode

__all__ = [
    "AttentionState",
    "attend",
    "attention",
    "finalize",
    "from_output",
    "kv_mesh",
    "merge",
    "merge_across",
    "reduce_chain",
    "reduce_tree",
    "scan_states",
    "simulate_devices",
    "tree_decode",
]
