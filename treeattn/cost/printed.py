"""What the papers print of their measurements, as numbers.

Only what stands in their text and tables. Of Figures 2, 3 and 4 the sources give captions and a
few values in the text, and nothing can be read off the plots: those few values are all there is.
"""

from typing import NamedTuple

# §6.3 of both: 640,000 keys on 8 GPUs, hidden size 2048, bfloat16. Orders of magnitude.
SECTION_6_3_ATTEND_SECONDS = 1e-5  # "O(10⁻⁵) seconds to perform the Flash Attention computation"
SECTION_6_3_MOVE_SECONDS = 1e-3  # "as per Fig. 2 is roughly O(10⁻³) seconds"

# v1 §6.1, Figure 3: "close ×8 speedups when we use 128 GPUs on a sequence length of 5.12M".
FIGURE_3_DEVICES, FIGURE_3_CONTEXT, FIGURE_3_SPEEDUP = 128, 5_120_000, 8

# v1 §6.2, Figure 4, two RTX 4090s: the gap between the methods' peaks, by hidden size, in bytes.
FIGURE_4_GAP_BYTES = {2048: 524e6, 4096: 1040e6}


class Measured(NamedTuple):
    """A time in seconds, its mean over ten runs and its standard error."""

    mean: float
    error: float


class Row(NamedTuple):
    """A line of Table 1 or 2: decoding ten tokens, prefill included, by either attention."""

    context: int
    tree: Measured
    ring: Measured
    speedup: int  # as printed

    @property
    def gap(self) -> Measured:
        """Ring's time less tree's: what the two do alike, prefill and all, cancels."""
        error = (self.tree.error**2 + self.ring.error**2) ** 0.5
        return Measured(self.ring.mean - self.tree.mean, error)


def _row(context, tree, tree_error, ring, ring_error, speedup) -> Row:
    return Row(context, Measured(tree, tree_error), Measured(ring, ring_error), speedup)


TOKENS = 10  # decoded in each run of the tables

# v2 Table 1: Llama 3.1 8B. "32k" is taken as 32,000.
TABLE_1_H100 = (  # 8 × H100
    _row(32_000, 0.60, 0.15, 2.57, 0.35, 4),
    _row(64_000, 1.08, 0.10, 4.42, 0.38, 4),
    _row(128_000, 2.68, 0.28, 6.38, 0.58, 2),
    _row(256_000, 2.89, 0.62, 8.19, 1.07, 3),
)
TABLE_1_MI300X = (  # 4 × MI300X
    _row(32_000, 1.05, 0.01, 3.57, 0.25, 3),
    _row(64_000, 2.36, 0.01, 7.33, 0.25, 3),
    _row(128_000, 6.43, 0.25, 16.40, 0.40, 3),
    _row(256_000, 15.30, 4.93, 35.12, 5.02, 2),
)
# v2 Table 2: Llama 3.2 1B on two RTX 4090s.
TABLE_2_RTX4090 = (
    _row(8_000, 0.34, 0.05, 1.38, 0.07, 4),
    _row(16_000, 0.58, 0.07, 2.77, 0.04, 5),
    _row(20_000, 0.74, 0.01, 3.47, 0.04, 5),
    _row(32_000, 1.01, 0.02, 5.45, 0.03, 5),
)
