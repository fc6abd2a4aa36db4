"""Does that merge, or that kernel, do what it should? Questions to anybody's.

    print(check_merge(merge))          merge([(out, lse), …]) -> (out, lse) of all their keys
    print(check_attention(kernel))     kernel(q, k, v, **options) -> (out, lse)
    print(check_scan(scan))            scan(merge, states) -> all prefixes, in few rounds
    print(check_tree(build))           a token tree's mask, positions and links; what is kept of it
    print(check_packed_loss(f))        f(parameters, rows, weights) -> (loss, gradients) of rows
                                       that share prefixes, each of which is computed once
    print(check_verifier(step))        step(target, draft, rng) -> tokens of a speculative step
    print(check_invariance(kernel))    on what do its bits depend, on which they should not?

In any framework: they get NumPy arrays, and what they return goes through `np.asarray`. q is
(b, l, h, d), k and v (b, n, h_kv, d), out (b, l, h, d), and lse (b, l, h), a natural logarithm. No
keys are out 0 and lse −∞. This folder needs NumPy alone and can be copied, under any name.

What is right stands in `reference`, what is common to all in `calling`, `report` and `rounding`.
Each part can be read, or left out, by itself:

    pairs (out, lse)   judging, signs: which are wrong, where, and what gives just these
    merge              merging: the questions; merge_mistakes, merge_forms
    attention          attention: the questions; kernel_mistakes, key_mistakes
    scan               scans
    tree               trees: the questions; token_trees
    packed loss        packed_loss: the questions; packing, packing_mistakes, tiny_model
    verifier           verifying: the questions; outcomes, steps, wrong_steps
    invariance         invariance: the questions; axes, bits
"""

from .attention import check_attention
from .axes import AXES
from .invariance import check_invariance
from .kernel_mistakes import KERNEL_CURES
from .merge_mistakes import MERGE_CURES
from .merging import check_merge
from .outcomes import law
from .packed_loss import check_packed_loss, separate_rows
from .packing_mistakes import PACKING_FINGERPRINTS
from .reference import attend, merge
from .report import Report
from .rounding import bfloat16
from .scans import SCAN_FINGERPRINTS, check_scan
from .steps import run_step
from .trees import TREE_FINGERPRINTS, check_tree
from .verifying import check_verifier
from .wrong_steps import VERIFIER_FINGERPRINTS

__version__ = "0.1.0"

# Every mistake that a check names, with its cure: {check: {name: cure}}.
CURES = {
    "merge": MERGE_CURES,
    "attention": KERNEL_CURES,
    "scan": SCAN_FINGERPRINTS,
    "tree": TREE_FINGERPRINTS,
    "packed_loss": PACKING_FINGERPRINTS,
    "verifier": VERIFIER_FINGERPRINTS,
    "invariance": AXES,
}

__all__ = [
    "CURES",
    "Report",
    "attend",
    "bfloat16",
    "check_attention",
    "check_invariance",
    "check_merge",
    "check_packed_loss",
    "check_scan",
    "check_tree",
    "check_verifier",
    "law",
    "merge",
    "run_step",
    "separate_rows",
]
