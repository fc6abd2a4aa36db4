"""Tree Attention in JAX.

Attention over a set of keys is a small state; the states of disjoint sets merge. See
`treeattn.state` for that idea, and the notebooks for where it leads.
"""

from treeattn.cluster import initialize, kv_mesh, simulate_devices
from treeattn.draft_tree import beam_search, choice_tree, expand_tree
from treeattn.energy import (
    attention_from_energy,
    causal_energy,
    cumulant,
    energy,
    log_likelihood,
)
from treeattn.llama import Llama
from treeattn.local import attend, attention
from treeattn.prefill import ring_attention, ulysses_attention
from treeattn.prefix_tree import PackedBeam, pack, prefix_encoding, unpack
from treeattn.ring import pass_q_decode, ring_decode
from treeattn.state import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
)
from treeattn.token_tree import (
    TokenTree,
    ancestor_mask,
    beam_from_tree,
    depths,
    pack_tree,
    tree_from_beam,
)
from treeattn.tree import merge_across, tree_decode

__all__ = [
    "AttentionState",
    "Llama",
    "PackedBeam",
    "TokenTree",
    "ancestor_mask",
    "attend",
    "attention",
    "attention_from_energy",
    "beam_from_tree",
    "beam_search",
    "causal_energy",
    "choice_tree",
    "cumulant",
    "depths",
    "energy",
    "expand_tree",
    "finalize",
    "from_output",
    "initialize",
    "kv_mesh",
    "log_likelihood",
    "merge",
    "merge_across",
    "pack",
    "pack_tree",
    "pass_q_decode",
    "prefix_encoding",
    "reduce_chain",
    "reduce_tree",
    "ring_attention",
    "ring_decode",
    "scan_states",
    "simulate_devices",
    "tree_decode",
    "tree_from_beam",
    "ulysses_attention",
    "unpack",
]
