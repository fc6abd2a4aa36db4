"""Is your merge, kernel, backward pass, token tree or speculative step right? Five checks.

    assert check_merge(merge)          merge([(out, lse), …]) -> (out, lse) of all their keys
    assert check_attention(kernel)     kernel(q, k, v, **options) -> (out, lse), or out
    assert check_gradients(f)          f(q, k, v, dout) -> (dq, dk, dv)
    assert check_tree(build)           a tree's mask, positions, links and accepted path
    assert check_verifier(step)        step(target, draft, rng) -> tokens of a speculative step

Any framework will do: your function receives copies as NumPy arrays, and `np.asarray` reads the
arrays that it returns. q is (b, l, h, d), k and v are (b, n, h_kv, d), out is (b, l, h, d), and lse
(b, l, h) is a natural logarithm. A query without keys has out 0 and lse −∞. This folder needs only
NumPy and can be copied, under any name.

For all checks, `judge` asks, compares and names mistakes, and `report` holds the results.

    right answers      reference
    merge, attention   forward (the questions), pairs (comparing (out, lse)),
                       signs (mistakes that a number shows), merge_mistakes, kernel_mistakes
    gradients          gradients
    tree               trees
    verifier           verifying (the questions), outcomes, steps (the right step, and faults)
"""

from .forward import check_attention, check_merge, folded
from .gradients import GRADIENT_CURES, check_gradients
from .kernel_mistakes import KERNEL_CURES
from .merge_mistakes import MERGE_CURES
from .outcomes import law
from .reference import attend, bfloat16, merge
from .report import Report, Result
from .steps import VERIFIER_CURES, run_step
from .trees import TREE_CURES, check_tree
from .verifying import check_verifier

__version__ = "0.2.0"

# Every mistake that a check names, with its cure: {check: {name: cure}}.
CURES = {
    "merge": MERGE_CURES,
    "attention": KERNEL_CURES,
    "gradients": GRADIENT_CURES,
    "tree": TREE_CURES,
    "verifier": VERIFIER_CURES,
}

__all__ = [
    "CURES",
    "Report",
    "Result",
    "attend",
    "bfloat16",
    "check_attention",
    "check_gradients",
    "check_merge",
    "check_tree",
    "check_verifier",
    "folded",
    "law",
    "merge",
    "run_step",
]
