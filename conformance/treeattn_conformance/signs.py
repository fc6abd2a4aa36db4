"""Mistakes that show in the numbers themselves, for any implementation.

A sign is a function of a question, out and lse. It returns a mask for out and a mask for lse.
"""

import functools
from collections.abc import Callable

import numpy as np

from .judge import Asked, Mistake, Question
from .reference import attend, rounded


class Sign(Mistake):
    def explains(self, asked: Asked, same: Callable) -> np.ndarray:
        out, lse = asked.answer
        lse = asked.question.right[1] if lse is None else lse
        if (out.shape, lse.shape) != tuple(x.shape for x in asked.question.right):
            return asked.right
        return np.stack(np.broadcast_arrays(*self.wrong(asked.question, out, lse))) | asked.right


def without_keys(question: Question) -> np.ndarray:
    return np.isneginf(question.right[1])


def lse_of_no_keys(shows: Callable) -> Callable:
    return lambda question, out, lse: (False, without_keys(question) & shows(lse))


def nan_of_no_keys(question, out, lse):
    none = without_keys(question)
    return none & np.isnan(out).any(axis=-1), none & np.isnan(lse)


def uniform_mean(question, out, lse):
    """The mean of all values, or of all shards' outs, at once or in turn, where out should be 0."""
    if "parts" in question.arguments:
        outs = [np.asarray(x, np.float64) for x, _ in question.arguments["parts"]]
        means = [np.mean(outs, axis=0), functools.reduce(lambda a, b: (a + b) / 2, outs)]
    else:
        q, k, v = question.arguments.values()
        means = [attend(0 * q, np.zeros_like(k), v)[0]]
    alike = [np.isclose(out, mean, rtol=0.01, atol=0.01).all(axis=-1) for mean in means]
    return without_keys(question) & np.any(alike, axis=0), False


def lost_low(question, out, lse):
    """Nothing where there are keys whose lse is low, and no overflow where it is high."""
    total = question.right[1]
    low = (total < -100) & ~without_keys(question) & np.isfinite(out).all()
    return low & (out == 0).all(axis=-1), low & np.isneginf(lse)


def stale(question, out, lse):
    """NaN in a row of the batch whose keys or values hold NaN where no query may look."""
    arrays = [x for name, x in question.arguments.items() if name in ("k", "v")]
    held = sum(np.isnan(x).any(axis=(1, 2, 3))[:, None, None] for x in arrays) > 0
    return held & np.isnan(out).any(axis=-1), held & np.isnan(lse)


def lost_nan(question, out, lse):
    """A number where keys are seen whose values are NaN."""
    seen = np.isnan(question.right[0]).any(axis=-1)
    return seen & np.isfinite(out).all(axis=-1), seen & ~np.isnan(lse)


def _in_16_bits(x: np.ndarray) -> bool:
    """Whether all finite numbers are exact in bfloat16, or all in float16."""
    x = x[np.isfinite(x)]
    return any(np.array_equal(x, rounded(x, dtype)) for dtype in ("bfloat16", "float16"))


def rounded_sums(question, out, lse):
    """More than one rounding: an error that grows with the number of terms."""
    right = question.right[0]
    terms = len(question.arguments.get("parts", range(8)))
    largest = np.abs(right[np.isfinite(right)]).max(initial=0)
    near = np.abs(out - right) <= min(terms * 2**-8, 0.25) * largest
    return near.all(axis=-1) & _in_16_bits(out), False


def rounded_lse(question, out, lse, *, dtype, bits):
    """One rounding of lse, and nothing else."""
    right = question.right[1]
    finite = np.isfinite(right)
    near = np.abs(lse - rounded(right, dtype)) <= np.abs(right) / 2**bits
    held = np.array_equal(rounded(lse, dtype)[finite], lse[finite])
    return False, finite & near & held


# {name: (cure, sign)}
OF_NUMBERS: dict[str, tuple[str, Callable]] = {
    "lse +inf for no keys": (
        "write −∞ where there were no keys, and read +∞ as −∞",
        lse_of_no_keys(np.isposinf),
    ),
    "finite lse for no keys": (
        "a lowest number stands for −∞: write −∞, and guard the subtraction",
        lse_of_no_keys(lambda lse: np.isfinite(lse) & (lse < -80)),
    ),
    "no keys as lse 0": (
        "memory that begins as zeros is the mass of one key: write −∞",
        lse_of_no_keys(lambda lse: lse == 0),
    ),
    "NaN for no keys": (
        "(−∞) − (−∞), or 0 / 0: replace infinite pivots before subtracting",
        nan_of_no_keys,
    ),
    "mean(V) for no keys": (
        "a softmax over nothing was uniform: write 0, and lse −∞",
        uniform_mean,
    ),
    "−∞ is a number that scores reach": (
        "scores and lse may be below -10,000: no keys, and a first maximum, are −∞",
        lost_low,
    ),
    "stale NaN": (
        "0 · NaN is NaN: select values with where, do not multiply them by 0",
        stale,
    ),
    "NaN lost": (
        "a NaN of seen keys says that something is wrong: select where lse is −∞, do not "
        "replace every NaN",
        lost_nan,
    ),
    "rounded to 16 bits": (
        "return out, and keep partial sums, in float32, because each addition rounds; or ask with "
        'dtype="bfloat16"',
        rounded_sums,
    ),
    "lse in bfloat16": (
        "keep lse in float32: its error is one of an exponent",
        functools.partial(rounded_lse, dtype="bfloat16", bits=8),
    ),
    "lse in float16": (
        "keep lse in float32: its error is one of an exponent",
        functools.partial(rounded_lse, dtype="float16", bits=11),
    ),
}
SIGNS = [Sign(name, sign) for name, (_, sign) in OF_NUMBERS.items()]
SIGN_CURES = {name: cure for name, (cure, _) in OF_NUMBERS.items()}
