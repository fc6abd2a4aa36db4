"""Sums over the collectives of a program, loops included."""


def count_collectives(collectives) -> int:
    """How many collectives each device runs."""
    return sum(c.count for c in collectives)


def total_bytes(collectives) -> int:
    """Bytes of each device's operands."""
    return sum(c.total_bytes for c in collectives)
