"""Tree Attention in JAX.

Attention over a set of keys is a small state; the states of disjoint sets merge. See
`treeattn.idea.state` for that idea, and the notebooks for where it leads.

    idea      attention is the gradient of an energy, and a small state that merges
    kernel    one device: queries and keys in, a state out
    devices   many devices: a cache in shards, and the ways to merge what each has seen
    trees     candidates of tokens, packed for one pass
    llama     a Llama whose attention is a parameter, and text from it
    cost      bytes, rounds, memory and time: counted, and calculated
    figures   every figure

Each stands on those above it only (trees and cost on fewer).
"""

from treeattn.devices.dealing import blocks_by_device, deal_tree
from treeattn.devices.decode import pass_q_decode, ring_decode, tree_decode
from treeattn.devices.merge import merge_across
from treeattn.devices.mesh import initialize, kv_mesh, simulate_devices
from treeattn.devices.prefill import gather_attention, ring_attention, ulysses_attention
from treeattn.idea.energy import (
    attention_from_energy,
    causal_energy,
    cumulant,
    energy,
    log_likelihood,
)
from treeattn.idea.state import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
    skip_bound,
)
from treeattn.kernel.attend import attend, attend_exact, attention, which_implementation
from treeattn.kernel.exact import ExactState
from treeattn.kernel.quantized import dequantize, quantize
from treeattn.trees.beam import PackedBeam, pack, packed_token_indices, prefix_encoding, unpack
from treeattn.trees.draft import beam_search, choice_tree, expand_tree
from treeattn.trees.rows import RowTree, interval_mask, pack_rows
from treeattn.trees.token_tree import (
    TokenTree,
    ancestor_mask,
    beam_from_tree,
    depths,
    pack_tree,
    tree_from_beam,
)

__all__ = [
    "AttentionState",
    "ExactState",
    "Llama",
    "PackedBeam",
    "RowTree",
    "TokenTree",
    "accept_candidate_tokens",
    "ancestor_mask",
    "attend",
    "attend_exact",
    "attention",
    "attention_from_energy",
    "beam_from_tree",
    "beam_search",
    "blocks_by_device",
    "causal_energy",
    "choice_tree",
    "cumulant",
    "deal_tree",
    "depths",
    "dequantize",
    "draft_candidate_tokens",
    "energy",
    "expand_tree",
    "finalize",
    "from_output",
    "gather_attention",
    "generate",
    "initialize",
    "interval_mask",
    "kv_mesh",
    "log_likelihood",
    "log_probs",
    "merge",
    "merge_across",
    "pack",
    "pack_rows",
    "pack_tree",
    "packed_token_indices",
    "pass_q_decode",
    "prefix_encoding",
    "quantize",
    "reduce_chain",
    "reduce_tree",
    "ring_attention",
    "ring_decode",
    "scan_states",
    "simulate_devices",
    "skip_bound",
    "tree_decode",
    "tree_from_beam",
    "ulysses_attention",
    "unpack",
    "which_implementation",
]


LLAMA = ("Llama", "accept_candidate_tokens", "draft_candidate_tokens", "generate", "log_probs")


def __getattr__(name: str):
    """What belongs to `Llama`, when asked for: it needs packages that the rest does without."""
    if name in LLAMA:
        from treeattn import llama

        return getattr(llama, name)
    raise AttributeError(f"module 'treeattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
