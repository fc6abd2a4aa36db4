"""Attention whose bits no order, split or mesh can change: two functions for `tree_decode`."""

from labs.exact.attend import exact_attend, exact_state
from labs.exact.state import ExactState, merge_exact

__all__ = ["ExactState", "exact_attend", "exact_state", "merge_exact"]
