"""Training on prefix trees: prefixes that rows share are computed once, gradients included."""

from labs.training.attention import tree_attention, tree_ring_attention
from labs.training.log_probs import log_probs
from labs.training.rows import RowTree, interval_mask, pack_rows

__all__ = [
    "RowTree",
    "interval_mask",
    "log_probs",
    "pack_rows",
    "tree_attention",
    "tree_ring_attention",
]
