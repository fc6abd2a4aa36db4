"""Tree Attention in JAX.

Attention over any set of keys can be kept as a small state, and the states of two disjoint sets can
be merged into that of both. The files, in the order of reading:

    state       (m, d, n): merge, finalize; chains, trees and scans of states
    inputs      the arguments of one attention, gathered and checked (checks has the general checks)
    gradient    attention is the gradient of a log-sum-exp, the energy
    plain       attention on one device, with all scores in memory at once
    local       choice of implementation: plain, or a faster one (blocks, products, flash)
    devices     simulated and real; meshes
    key_shards  how a cache is sharded over a mesh, in stripes or not
    slots       which slot of it holds which key
    across      merge_across: all devices' states become the state of all keys
    ring        every shard visits every device
    mesh        attention over a mesh: tree_decode, ring_decode, and for prompts ring and Ulysses
    beam        candidate continuations of a text, packed as a prefix tree and unpacked
    token_tree  trees of any shape: masks and depths
    program     what a compiled program sends and holds (reads hlo)

References such as (2024 §5.1) are to two texts of the Tree Attention paper (arXiv 2408.04093): 2024
is that of August 2024, and 2025 is the fourth version.
"""

from treeattn.across import METHODS, merge_across
from treeattn.beam import PackedBeam, pack, packed_token_indices, prefix_encoding, unpack
from treeattn.devices import initialize, kv_mesh, simulate_devices
from treeattn.gradient import (
    attention_from_energy,
    causal_energy,
    cumulant,
    energy,
    log_likelihood,
)
from treeattn.local import attend, attention
from treeattn.mesh import ring_attention, ring_decode, tree_decode, ulysses_attention
from treeattn.program import collectives, collectives_table, memory
from treeattn.ring import visit_shards
from treeattn.slots import shard_lengths, striped_position, striped_slot
from treeattn.state import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
)
from treeattn.token_tree import ancestor_mask, depths

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "AttentionState",
    "PackedBeam",
    "ancestor_mask",
    "attend",
    "attention",
    "attention_from_energy",
    "causal_energy",
    "collectives",
    "collectives_table",
    "cumulant",
    "depths",
    "energy",
    "finalize",
    "from_output",
    "initialize",
    "kv_mesh",
    "log_likelihood",
    "memory",
    "merge",
    "merge_across",
    "pack",
    "packed_token_indices",
    "prefix_encoding",
    "reduce_chain",
    "reduce_tree",
    "ring_attention",
    "ring_decode",
    "scan_states",
    "shard_lengths",
    "simulate_devices",
    "striped_position",
    "striped_slot",
    "tree_decode",
    "ulysses_attention",
    "unpack",
    "visit_shards",
]
