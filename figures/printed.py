"""Tables 1 and 2 of the 2025 text, as they are printed."""

from typing import NamedTuple


class Measured(NamedTuple):
    """A time in seconds, and what is printed after its ±.

    The text calls it a standard error; the script prints numpy's standard deviation of ten runs,
    of which the mean's standard error is a third.
    """

    mean: float
    error: float


class TableRow(NamedTuple):
    """A line of Table 1 or 2: a prefill and ten tokens, by either attention."""

    context: int
    tree: Measured
    ring: Measured
    speedup: int  # as printed

    @property
    def ratio(self) -> Measured:
        """Ring's time over tree's."""
        ratio = self.ring.mean / self.tree.mean
        errors = (x.error / x.mean for x in (self.tree, self.ring))
        return Measured(ratio, ratio * sum(x * x for x in errors) ** 0.5)


def _row(context, tree, tree_error, ring, ring_error, speedup) -> TableRow:
    return TableRow(context, Measured(tree, tree_error), Measured(ring, ring_error), speedup)


# Table 1: Llama 3.1 8B. "32k" is taken as 32,000, the script's own lengths being such.
TABLE_1_H100 = (  # 8 × H100
    _row(32_000, 0.60, 0.15, 2.57, 0.35, 4),
    _row(64_000, 1.08, 0.10, 4.42, 0.38, 4),
    _row(128_000, 2.68, 0.28, 6.38, 0.58, 2),
    _row(256_000, 2.89, 0.62, 8.19, 1.07, 3),
)
TABLE_1_MI300X = (  # 4 × MI300X (2025 §6 says 8; its §6.4 and the table's head, 4)
    _row(32_000, 1.05, 0.01, 3.57, 0.25, 3),
    _row(64_000, 2.36, 0.01, 7.33, 0.25, 3),
    _row(128_000, 6.43, 0.25, 16.40, 0.40, 3),
    _row(256_000, 15.30, 4.93, 35.12, 5.02, 2),
)
# Table 2: Llama 3.2 1B on two RTX 4090s.
TABLE_2_RTX4090 = (
    _row(8_000, 0.34, 0.05, 1.38, 0.07, 4),
    _row(16_000, 0.58, 0.07, 2.77, 0.04, 5),
    _row(20_000, 0.74, 0.01, 3.47, 0.04, 5),
    _row(32_000, 1.01, 0.02, 5.45, 0.03, 5),
)
