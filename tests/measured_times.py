"""Invented times of collectives, for the tests of what is chosen by them."""

import math

import jax

from treeattn.measured import KINDS, CollectiveTimes, Fit, Group

FAST = (1e-6, 1e-12)


def times_of(lines: dict, groups=((2, 1), (2, 4), (4, 1), (4, 2), (8, 1))) -> CollectiveTimes:
    """Of each kind (latency, seconds per byte) for groups of eight devices; the others are slow."""
    slow = (1.0, 0.0)
    fits = {
        (kind, Group(*group)): [Fit(math.inf, *lines.get(kind, slow))]
        for kind in KINDS
        for group in groups
    }
    return CollectiveTimes("cpu", 8, "2026-01-01", {"jax": jax.__version__}, fits)
