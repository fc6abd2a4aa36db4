"""What processes that decode together agree on: the first one's. Rounding and clocks differ."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def agreed(x):
    """An int, a bool or an array of integers, of one shape in all processes: the first one's."""
    if jax.process_count() == 1:
        return x
    first = multihost_utils.broadcast_one_to_all(np.asarray(x, np.int32))
    return np.asarray(first) if isinstance(x, np.ndarray) else type(x)(first)


def agreed_beam(beam: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first process's candidates (B, M, C), whose M and C the others do not know."""
    if jax.process_count() == 1:
        return beam, scores
    shape = len(beam), *agreed(np.array(beam.shape[1:])).tolist()
    if beam.shape != shape:  # what is sent must have one shape; this process's is not looked at
        beam = np.zeros(shape, np.int32)
        scores = np.zeros(shape)
    first = multihost_utils.broadcast_one_to_all((beam, scores))
    return np.asarray(first[0]), np.asarray(first[1])
