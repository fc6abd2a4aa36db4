"""Merges with a fault each, for the first page's "what breaks it"; page/faults.js has the same.

A merge takes two pairs (out, lse) and returns one, in NumPy's float64, along a tree as along a
chain. The page says of a fault what `check_merge` finds out about it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from treeattn_conformance import CURES, bfloat16, check_merge


def sound(a, b, *, exp=np.exp, log=np.log, guarded=True, selected=True):
    """A right merge, or one with other functions, or without a guard or a selection."""
    m = np.maximum(a[1], b[1])
    pivot = np.where(np.isneginf(m) & guarded, 0, m)
    weights = exp(a[1] - pivot), exp(b[1] - pivot)
    n = 0
    for (out, _), w in zip((a, b), weights, strict=True):
        nothing = (w == 0) & selected
        n = n + np.where(nothing[..., None], 0, out) * w[..., None]
    d = sum(weights)
    d = np.where((d == 0) & guarded, 1, d)
    return n / d[..., None], m + log(d)


def summed_lse(a, b):
    parts = [
        np.where(np.isneginf(lse), 0, lse) for _, lse in (a, b)
    ]  # what has no keys is left out
    total = sum(parts)
    n = sum(
        out * np.where(np.isneginf(lse), 0, np.exp(lse - total))[..., None] for out, lse in (a, b)
    )
    none = np.isneginf(a[1]) & np.isneginf(b[1])
    return n, np.where(none, -np.inf, total)


def stale_pivot(a, b):
    """The sums of `a` stay relative to their old maximum, lse, when `b` has a larger one."""
    m = np.maximum(a[1], b[1])
    pivot = np.where(np.isneginf(m), 0, m)
    x = np.where(np.isneginf(a[1]), 0, 1.0)
    y = np.exp(b[1] - pivot)
    d = x + y
    d = np.where(d == 0, 1, d)
    return (a[0] * x[..., None] + b[0] * y[..., None]) / d[..., None], m + np.log(d)


def without_maximum(a, b):
    """In float32, whose exponentials end at 88.7."""
    x, y = (np.exp(lse).astype(np.float32) for _, lse in (a, b))
    d = x + y
    n = a[0] * x[..., None] + b[0] * y[..., None]
    return n / np.where(d == 0, 1, d)[..., None], np.log(d, dtype=np.float64)


def sums_in_16_bits(a, b):
    _, lse = sound(a, b)
    pivot = np.where(np.isneginf(lse), 0, lse)
    parts = [bfloat16(out * np.exp(l - pivot)[..., None]) for out, l in (a, b)]
    return bfloat16(sum(parts)).astype(np.float64), lse


def cleaned(out, lse):
    """The pair as a sound merge reads it: +∞ is no keys, too, and the out of no keys is 0."""
    return np.where(np.isinf(lse)[..., None], 0, out), np.where(np.isposinf(lse), -np.inf, lse)


def in_bfloat16(out, lse):
    out, lse = cleaned(out, lse)
    return out, bfloat16(lse).astype(np.float64)


def zeroed(out, lse):
    return cleaned(out, lse)[0], np.where(np.isinf(lse), 0, lse)


def lowest(out, lse):
    return out, np.where(np.isinf(lse), np.finfo(np.float32).min, lse)


def as_it_is(out, lse):
    return out, lse


def uncleared(out, lse):
    return out, np.where(np.isposinf(lse), -np.inf, lse)


class Fault(NamedTuple):
    name: str  # in the page's list
    about: str  # what goes wrong, read as masses on a lever
    merge: Callable = sound
    sent: Callable = cleaned  # what becomes of a device's out and lse on the way to the merge
    empty: tuple = (0.0, -np.inf)  # what a device without keys has written


FAULTS = {
    "base": Fault(
        "powers and logarithms of base 2",
        "2ˣ is faster than eˣ, and here it is taken of natural logarithms. Every mass is raised to "
        "the power log 2 ≈ 0.69: the heavy weigh too little, the light too much.",
        functools.partial(sound, exp=np.exp2, log=np.log2),
    ),
    "sum": Fault(
        "lse + block_lse",
        "Masses add, and not their logarithms: adding lse multiplies the masses. The total is far "
        "too heavy, and next to it every shard weighs nearly nothing.",
        summed_lse,
    ),
    "pivot": Fault(
        "a stale pivot",
        "A pair of out and lse is a state with the maximum lse and the sum 1. Where the second "
        "has the larger maximum, the first's sum is not rescaled to it: then both weigh the same, "
        "however much heavier the second is.",
        stale_pivot,
    ),
    "lse16": Fault(
        "lse in bfloat16",
        "Of the 16 bits that are sent, eight are for the digits: near 8, neighbours lie 1/32 or "
        "1/16 apart. An error in an exponent is a factor: a mass may be 3 % off, and nothing looks "
        "wrong.",
        sent=in_bfloat16,
    ),
    "out16": Fault(
        "sums in bfloat16",
        "The masses are right, and each sum of outputs is rounded to eight bits, once a merge: the "
        "more devices, and the longer the chain, the further off.",
        sums_in_16_bits,
    ),
    "zero": Fault(
        "no keys written as lse 0",
        "A device without keys leaves the zeros that its memory began with. But lse 0 is the mass "
        "of one key of score 0, and it hangs at out 0, towards which it pulls.",
        sent=zeroed,
    ),
    "infinite": Fault(
        "no keys written as lse +∞",
        "A device without keys writes +∞, as some kernels do, and the merge takes it for "
        "infinitely many keys.",
        sent=as_it_is,
        empty=(0.0, np.inf),
    ),
    "lowest": Fault(
        "no keys written as the lowest number",
        "A device without keys writes −3.4·10³⁸ for −∞. Beside any keys that weighs nothing, and "
        "nothing moves. Only a query without keys anywhere tells: it gets a finite lse, and the "
        "mean of whatever lies there.",
        sent=lowest,
    ),
    "unguarded": Fault(
        "(−∞) − (−∞)",
        "The pivot is subtracted whatever it is. One device without keys does no harm; when two of "
        "them meet it is NaN. Let 16 devices hold the keys, merged along a tree.",
        functools.partial(sound, guarded=False),
    ),
    "nan": Fault(
        "0 · NaN",
        "The output of a device without keys was never written, and holds NaN. Its mass is 0, but "
        "its place is multiplied in all the same.",
        functools.partial(sound, selected=False),
        sent=uncleared,
        empty=(np.nan, -np.inf),
    ),
    "overflow": Fault(
        "no maximum subtracted",
        "The masses are e to the power of lse, in float32, which ends at lse 88.7. The lse of "
        "these heads is below 10, and nothing moves; other heads and longer texts have more.",
        without_maximum,
    ),
}


@np.errstate(all="ignore")
def merged(fault: Fault, parts) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all the parts, merged along a chain."""
    sent = [
        fault.sent(np.asarray(out, np.float64), np.asarray(lse, np.float64)) for out, lse in parts
    ]
    return functools.reduce(fault.merge, sent)


def found(fault: Fault) -> dict:
    """What `check_merge` says of this fault."""
    report = check_merge(functools.partial(merged, fault))
    names = sorted(report.fingerprints)
    return {
        "asked": len(report.results),
        "failed": len(report.names("failed")),
        "fingerprints": [[name, CURES["merge"][name]] for name in names],
    }


def faults() -> list[dict]:
    """For the page: each fault's name and words, and its report."""
    return [
        {"id": id, "name": fault.name, "about": fault.about, **found(fault)}
        for id, fault in FAULTS.items()
    ]
