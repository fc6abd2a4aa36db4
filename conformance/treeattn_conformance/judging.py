"""A case, and the judgement of an answer to it: passed, or which known mistake it looks like."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .report import Report, Result
from .rounding import bfloat16

# What known mistakes are, and their cures.
FINGERPRINTS = {
    "log base 2": "lse is in base 2 on one side and natural on the other: multiply by log 2",
    "lse +inf for no keys": "write −∞ where there were no keys, and read +∞ as −∞",
    "finite lse for no keys": "a lowest number stands for −∞: write −∞, and guard the subtraction",
    "mean(V) for no keys": "a softmax over nothing was uniform: write 0, and lse −∞",
    "NaN for no keys": "(−∞) − (−∞), or 0 / 0: replace infinite pivots before subtracting",
    "stale NaN": "0 · NaN is NaN: select values with where, do not multiply them by 0",
    "lse in bfloat16": "keep lse in float32: its error is one of an exponent",
    "lse in float16": "keep lse in float32: its error is one of an exponent",
    "lse + block_lse": "sums of exponentials add, not their logarithms: use logaddexp",
    "sums in 16 bits": "keep and send partial sums in float32: each addition rounds",
    "sinks once a shard": "a sink is one more key: add it on one device, or after the merge",
    "sinks ignored": "a sink adds exp(sink) to the denominator, also when lse is returned",
    "local positions": "bound striped keys by their position in the text: local · p + rank",
    "axes of lse": "lse is (b, l, h) here, and (b, h, l) in many kernels: transpose, not reshape",
    "stale pivot": "when the maximum rises, rescale what was summed before: times exp(old − new)",
    "no keys as lse 0": "memory that begins as zeros is the mass of one key: write −∞",
    "epsilon in the sum": "a constant in the denominator outweighs small sums: select instead",
    "maximum of other keys": "lse = max + log Σ exp(s − max): the same maximum, of the seen keys",
    "heads regrouped": "a device has other heads than it merged: regroup before, or send them back",
    "exp overflows": "subtract the maximum before the exponential, across the shards too",
}
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 3e-3, "bfloat16": 1.6e-2}


class Case(NamedTuple):
    """One question: f(*arguments, **options) should be (out, lse), here in float64."""

    name: str
    arguments: tuple
    options: dict
    out: np.ndarray
    lse: np.ndarray
    uniform: np.ndarray  # what a softmax over nothing gives
    infinite: str | None = None  # the fingerprint of NaN and ∞ in rows that have keys


@np.errstate(all="ignore")
def check(function, cases: list[Case], mistakes, dtype: str, tolerance) -> Report:
    """Ask the function all cases; mistakes: `wrong_merges` or `wrong_attentions`."""
    of_lse = 1e-10 if dtype == "float64" else 2e-5
    tolerances = (tolerance or TOLERANCES[dtype], of_lse)
    results = []
    for case in cases:
        try:
            answer = function(*case.arguments, **case.options)
            out, lse = [np.asarray(x).astype(np.float64) for x in answer]
        except NotImplementedError as error:
            results.append(Result(case.name, "skipped", (), str(error)))
        except Exception as error:
            results.append(Result(case.name, "failed", (), f"{type(error).__name__}: {error}"))
        else:
            results.append(_judge(case, (out, lse), mistakes, tolerances))
    return Report(tuple(results), FINGERPRINTS)


def _judge(case: Case, answer, mistakes, tolerances) -> Result:
    """Passed, or failed with the mistakes that would have given this answer (out, lse)."""
    expected = (case.out, case.lse)
    if _close(answer, expected, tolerances):
        return Result(case.name, "passed")
    wrong = mistakes(*case.arguments, **case.options)
    found = [
        name
        for name, would_be in wrong
        if _close(answer, would_be, tolerances) and not np.isnan(would_be[0]).any()
    ]
    shapes = [x.shape for x in answer]
    expected_shapes = [x.shape for x in expected]
    if shapes != expected_shapes:
        detail = f"shapes {shapes}, expected {expected_shapes}"
    else:
        found = found or list(_signs(case, *answer, tolerances))
        of_out = _largest_error(answer[0], case.out)
        of_lse = _largest_error(answer[1], case.lse)
        detail = f"off by {of_out:.1e} (out), {of_lse:.1e} (lse)"
    return Result(case.name, "failed", tuple(dict.fromkeys(found)), detail)


def _largest_error(x: np.ndarray, expected: np.ndarray) -> float:
    return np.abs(x - expected)[np.isfinite(expected)].max(initial=0)


def _close(answer, expected, tolerances) -> bool:
    return all(
        x.shape == y.shape and np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        for x, y, tolerance in zip(answer, expected, tolerances, strict=True)
    )


def _signs(case: Case, out, lse, tolerances) -> Iterator[str]:
    """Fingerprints that are seen in the numbers themselves: without keys, then with keys."""
    none = np.isneginf(case.lse)
    uniform = np.broadcast_to(case.uniform, out.shape)
    if np.isposinf(lse[none]).any():
        yield "lse +inf for no keys"
    if np.isfinite(lse[none]).any():
        yield "finite lse for no keys"
    if np.isnan(lse[none]).any() or np.isnan(out[none]).any():
        yield "NaN for no keys"
    elif out[none].any() and np.allclose(out[none], uniform[none], rtol=0.01, atol=0.01):
        yield "mean(V) for no keys"
    out = out[~none]
    lse = lse[~none]
    expected = (case.out[~none], case.lse[~none])
    error = np.abs(lse / expected[1] - 1).max(initial=0)
    finite = np.isfinite(out).all() and np.isfinite(lse).all()
    if lse.size and not (finite and out.any()):
        if case.infinite:
            yield case.infinite
    elif _close((out, lse), expected, tolerances):
        return
    elif error <= 0.1 and np.array_equal(lse, bfloat16(lse)):
        yield "lse in bfloat16"
    elif error <= 0.01 and np.array_equal(lse, lse.astype(np.float16)):
        yield "lse in float16"
    elif _close((out, lse), expected, (0.1, tolerances[1])):
        if np.abs(out - expected[0]).max() > 1e-4:
            yield "sums in 16 bits"
