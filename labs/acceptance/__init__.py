"""Which rules of acceptance are lossless, and how many drafted tokens each keeps: in fractions.

- `chance`: every way that random numbers can fall, with its probability (`law`)
- `rules`: five lossless rules for drafted chains and trees; `beams`: one that is not
- `optimum`: what no lossless rule can pass, by a linear program and a proof in fractions
- `models`: the small models and shapes that they are tried on; `drawing`: the figures
"""

from labs.acceptance.beams import beam_candidates, longest_of_tosses
from labs.acceptance.chance import law
from labs.acceptance.models import DRAFT, SHAPES, TARGET, TextModel, in_floats, rules_for
from labs.acceptance.optimum import (
    best_rule_program,
    best_single_node,
    drafted_trees,
    most_tokens,
    proved_bound,
)
from labs.acceptance.rules import (
    ACCEPTANCE_RULES,
    DrawnTree,
    draw_tree,
    largest_fault,
    mean_length,
    step_law,
)

__all__ = [
    "ACCEPTANCE_RULES",
    "DRAFT",
    "SHAPES",
    "TARGET",
    "DrawnTree",
    "TextModel",
    "beam_candidates",
    "best_rule_program",
    "best_single_node",
    "drafted_trees",
    "draw_tree",
    "in_floats",
    "largest_fault",
    "law",
    "longest_of_tosses",
    "mean_length",
    "most_tokens",
    "proved_bound",
    "rules_for",
    "step_law",
]
