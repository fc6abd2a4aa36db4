"""Does that merge, or that kernel, do what it should? Test vectors and a checker for anybody's.

    print(check_merge(merge))          merge([(out, lse), …]) -> (out, lse) of all their keys
    print(check_attention(kernel))     kernel(q, k, v, **options) -> (out, lse)
    print(check_invariance(kernel))    on what do its bits depend, on which they should not?
    print(check_packed_loss(f))        f(parameters, rows, weights) -> (loss, gradients) of rows
                                       that share prefixes, each of which is computed once
    print(check_tree(build))           a token tree's mask, positions and links; what is kept of it
    print(check_verifier(step))        step(target, draft, rng) -> tokens of a speculative step
    print(check_local_lengths(f))      f(lengths, devices, rank, interleave) -> keys on that device
    print(check_scan(scan))            scan(merge, states) -> all prefixes, in few rounds
    print(check_top_k(f))              f(shards, k) -> the k best (scores, positions) of all shards

In any framework: they get NumPy arrays, and what they return goes through `np.asarray`. q is
(b, l, h, d), k and v (b, n, h_kv, d), out (b, l, h, d), and lse (b, l, h), a natural logarithm. No
keys are out 0 and lse −∞. A wrong answer is compared with what known mistakes would have given,
their *fingerprints*. Steps that draw random numbers are run once for each way that these can fall
(`outcomes`), so that probabilities are exact. This folder needs NumPy alone and can be copied,
under any name.
"""

from .acceptance import (
    ACCEPTANCE_RULES,
    DrawnTree,
    beam_candidates,
    draw_tree,
    longest_of_tosses,
    mean_length,
    step_law,
)
from .attention import attend, attention_cases, check_attention, wrong_attentions
from .axes import AXES
from .candidates import TOP_K_FINGERPRINTS, check_top_k, top_k, top_k_questions
from .chance import OwnChance, Source, law, outcomes
from .exporting import export, vectors
from .invariance import check_invariance
from .judging import FINGERPRINTS, TOLERANCES, Case
from .merging import check_merge, merge, merge_cases, wrong_merges
from .optimum import best_rule_program, best_single_node, drafted_trees, proved_bound
from .packed_loss import RowCase, check_packed_loss, row_cases, separate_rows
from .packing import PACKING_FINGERPRINTS
from .report import Difference, Report, Result
from .rounding import bfloat16, rounded
from .scans import SCAN_FINGERPRINTS, check_scan
from .steps import run_step
from .stripes import STRIPE_FINGERPRINTS, check_local_lengths, local_lengths, stripe_questions
from .token_trees import TreeCase, tree_cases
from .trees import TREE_FINGERPRINTS, check_tree
from .verifying import VerifierCase, check_verifier, verifier_cases
from .wrong_steps import VERIFIER_FINGERPRINTS

__all__ = [
    "ACCEPTANCE_RULES",
    "AXES",
    "FINGERPRINTS",
    "PACKING_FINGERPRINTS",
    "SCAN_FINGERPRINTS",
    "STRIPE_FINGERPRINTS",
    "TOLERANCES",
    "TOP_K_FINGERPRINTS",
    "TREE_FINGERPRINTS",
    "VERIFIER_FINGERPRINTS",
    "Case",
    "Difference",
    "DrawnTree",
    "OwnChance",
    "Report",
    "Result",
    "RowCase",
    "Source",
    "TreeCase",
    "VerifierCase",
    "attend",
    "attention_cases",
    "beam_candidates",
    "best_rule_program",
    "best_single_node",
    "bfloat16",
    "check_attention",
    "check_invariance",
    "check_local_lengths",
    "check_merge",
    "check_packed_loss",
    "check_scan",
    "check_top_k",
    "check_tree",
    "check_verifier",
    "drafted_trees",
    "draw_tree",
    "export",
    "law",
    "local_lengths",
    "longest_of_tosses",
    "mean_length",
    "merge",
    "merge_cases",
    "outcomes",
    "proved_bound",
    "rounded",
    "row_cases",
    "run_step",
    "separate_rows",
    "step_law",
    "stripe_questions",
    "top_k",
    "top_k_questions",
    "tree_cases",
    "vectors",
    "verifier_cases",
    "wrong_attentions",
    "wrong_merges",
]
