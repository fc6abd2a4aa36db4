"""Which rules of acceptance are lossless, and how many drafted tokens each keeps: in fractions.

Every way that random numbers can fall is counted, by `law` of `treeattn_conformance`.

- `rules`: five lossless rules for drafted chains and trees; `beams`: one that is not
- `optimum`: what no lossless rule can pass, by a linear program and a proof in fractions
- `models`: the small models and shapes that they are tried on; `drawing`: the figures
"""

from labs.acceptance.models import SHAPES, TextModel, in_floats
from labs.acceptance.optimum import (
    best_rule_program,
    best_single_node,
    drafted_trees,
    most_tokens,
)
from labs.acceptance.rules import (
    ACCEPTANCE_RULES,
    DrawnTree,
    largest_fault,
    mean_length,
    step_law,
)

__all__ = [
    "ACCEPTANCE_RULES",
    "SHAPES",
    "DrawnTree",
    "TextModel",
    "best_rule_program",
    "best_single_node",
    "drafted_trees",
    "in_floats",
    "largest_fault",
    "mean_length",
    "most_tokens",
    "step_law",
]
