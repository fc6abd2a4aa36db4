"""The tasks of the notebooks: a check for each, which names and draws a mistake, and a solution.

The notebooks import it from their own folder. `python -m course grade NOTEBOOK.ipynb` there gives
points for a notebook that a student has worked through.
"""

from course.algorithm_3 import check_algorithm_3
from course.loop import check_loop
from course.merge import check_merge
from course.prefix_tree import check_prefix_tree
from course.reduction import check_reduction
from course.rule import check_rule
from course.verdict import Verdict

__all__ = [
    "Verdict",
    "check_algorithm_3",
    "check_loop",
    "check_merge",
    "check_prefix_tree",
    "check_reduction",
    "check_rule",
]
