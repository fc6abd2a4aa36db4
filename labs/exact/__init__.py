"""Attention whose bits no order, split or mesh can change: two functions for `tree_decode`.

`check_invariance` tests on which axes the bits of any function depend.
"""

from labs.exact.attend import exact_attend, exact_state
from labs.exact.invariance import check_invariance
from labs.exact.state import ExactState, merge_exact

__all__ = ["ExactState", "check_invariance", "exact_attend", "exact_state", "merge_exact"]
