"""Mistakes that are seen in the numbers themselves, whatever program made them.

A sign says where an answer's out, and where its lse, may be explained by its mistake.
"""

import functools

import numpy as np

from .judging import Case, Mistake, Pair
from .rounding import bfloat16

NO_KEYS = {
    "lse +inf for no keys": "write −∞ where there were no keys, and read +∞ as −∞",
    "finite lse for no keys": "a lowest number stands for −∞: write −∞, and guard the subtraction",
    "no keys as lse 0": "memory that begins as zeros is the mass of one key: write −∞",
    "NaN for no keys": "(−∞) − (−∞), or 0 / 0: replace infinite pivots before subtracting",
    "mean(V) for no keys": "a softmax over nothing was uniform: write 0, and lse −∞",
    "stale NaN": "0 · NaN is NaN: select values with where, do not multiply them by 0",
    "NaN lost": "a NaN of seen keys says that something is wrong: select where lse is −∞, do not "
    "replace every NaN",
}
SIXTEEN_BITS = {
    "out in 16 bits": "the result was rounded to 16 bits, though float32 was asked for: return "
    'it in float32, or ask with dtype="bfloat16"',
    "sums in 16 bits": "keep and send partial sums in float32: each addition rounds",
    "lse in bfloat16": "keep lse in float32: its error is one of an exponent",
    "lse in float16": "keep lse in float32: its error is one of an exponent",
}


def nowhere(case: Case) -> np.ndarray:
    return np.zeros(case.lse.shape, bool)


def infinite_lse(case: Case, answer: Pair):
    """+∞ for −∞."""
    return nowhere(case), np.isneginf(case.lse) & np.isposinf(answer[1])


def finite_lse(case: Case, answer: Pair):
    """A very negative number for −∞."""
    none = np.isneginf(case.lse)
    return nowhere(case), none & np.isfinite(answer[1]) & (answer[1] < -80)


def lse_of_zero(case: Case, answer: Pair):
    return nowhere(case), np.isneginf(case.lse) & (answer[1] == 0)


def nan_of_no_keys(case: Case, answer: Pair):
    none = np.isneginf(case.lse)
    return none & np.isnan(answer[0]).any(axis=-1), none & np.isnan(answer[1])


def uniform_mean(case: Case, answer: Pair):
    """The mean of all values, or of all shards' outs, at once or in turn, for 0."""
    if "parts" in case.arguments:  # a merge
        outs = [np.asarray(out, np.float64) for out, _ in case.arguments["parts"]]
        means = [np.mean(outs, axis=0), functools.reduce(lambda a, b: (a + b) / 2, outs)]
    else:
        mean = np.mean(np.asarray(case.arguments["v"], np.float64), axis=1, keepdims=True)
        means = [np.repeat(mean, case.out.shape[2] // mean.shape[2], axis=2)]
    alike = [np.isclose(answer[0], mean, rtol=0.01, atol=0.01).all(axis=-1) for mean in means]
    return np.isneginf(case.lse) & np.any(alike, axis=0), nowhere(case)


def stale(case: Case, answer: Pair):
    """NaN in a row of the batch whose keys or values hold one where nobody may look."""
    if "parts" in case.arguments:
        return nowhere(case), nowhere(case)
    held = np.zeros(case.lse.shape[0], bool)
    for name in "kv":
        held |= np.isnan(case.arguments[name]).any(axis=(1, 2, 3))
    held = np.broadcast_to(held[:, None, None], case.lse.shape)
    return held & np.isnan(answer[0]).any(axis=-1), held & np.isnan(answer[1])


def lost_nan(case: Case, answer: Pair):
    """A number where keys are seen whose values are NaN."""
    seen = np.isnan(case.out).any(axis=-1)
    return seen & np.isfinite(answer[0]).all(axis=-1), seen & ~np.isnan(answer[1])


def _in_16_bits(x: np.ndarray) -> bool:
    """Whether all numbers are of one of the two 16-bit dtypes."""
    x = x[np.isfinite(x)]
    return np.array_equal(x, bfloat16(x)) or np.array_equal(x, x.astype(np.float16))


def rounded_out(case: Case, answer: Pair):
    """One rounding: an error of the last of eight bits."""
    if not _in_16_bits(answer[0]):
        return nowhere(case), nowhere(case)
    near = np.abs(answer[0] - case.out) <= np.abs(case.out) / 2**8 + 1e-7
    return near.all(axis=-1), nowhere(case)


def rounded_sums(case: Case, answer: Pair):
    """More than one: an error that grows with the number of terms."""
    if not _in_16_bits(answer[0]):
        return nowhere(case), nowhere(case)
    terms = len(case.arguments.get("parts", range(8)))
    largest = np.abs(case.out[np.isfinite(case.out)]).max(initial=0)
    allowed = min(terms * 2**-8, 0.25) * largest
    return (np.abs(answer[0] - case.out) <= allowed).all(axis=-1), nowhere(case)


def lse_in(dtype: str):
    """One rounding of lse, and nothing else."""

    def sign(case: Case, answer: Pair):
        narrow = bfloat16(case.lse) if dtype == "bfloat16" else case.lse.astype(np.float16)
        finite = np.isfinite(case.lse)
        bits = 8 if dtype == "bfloat16" else 11
        near = np.abs(answer[1] - narrow) <= np.abs(case.lse) / 2**bits
        held = bfloat16(answer[1]) if dtype == "bfloat16" else answer[1].astype(np.float16)
        if not np.array_equal(held[finite], answer[1][finite]):
            return nowhere(case), nowhere(case)
        return nowhere(case), finite & near

    return sign


SIGNS = (
    Mistake("lse +inf for no keys", sign=infinite_lse),
    Mistake("finite lse for no keys", sign=finite_lse),
    Mistake("no keys as lse 0", sign=lse_of_zero),
    Mistake("NaN for no keys", sign=nan_of_no_keys),
    Mistake("mean(V) for no keys", sign=uniform_mean),
    Mistake("stale NaN", sign=stale),
    Mistake("NaN lost", sign=lost_nan),
    Mistake("out in 16 bits", sign=rounded_out),
    Mistake("sums in 16 bits", sign=rounded_sums),
    Mistake("lse in bfloat16", sign=lse_in("bfloat16")),
    Mistake("lse in float16", sign=lse_in("float16")),
)
