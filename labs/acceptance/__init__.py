"""Which rules of acceptance are lossless, and how many drafted tokens each keeps: in fractions.

`law` of `treeattn_conformance` counts every possible outcome of the random numbers.

- `rules`: five lossless rules for drafted chains and trees; `beams`: a rule that is not lossless
- `optimum`: a bound for all lossless rules, by a linear program and a proof in fractions
- `models`: the small models and shapes of the experiments; `drawing`: the figures
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
