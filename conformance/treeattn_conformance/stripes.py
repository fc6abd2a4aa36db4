"""How many of a text's keys has a device? A cache dealt in stripes, and a bound for each query."""

from collections.abc import Callable, Iterator

import numpy as np

from .answers import Question, ask
from .report import Report

STRIPE_FINGERPRINTS = {
    "contiguous shards": "keys are dealt in turn, a stripe to each device, not cut into parts",
    "stripes of one key": "deal `interleave` keys at a time: key t is on device (t // I) mod D",
    "only full rounds": "add the device's part of the last round: L mod (D·I) − r·I, within 0 … I",
    "the last round for all": "a device has its stripe of the last round, not more: subtract r·I",
    "the last round shared evenly": "the last round fills the first devices' stripes, one by one",
    "the last round not bounded": "a device's part of the last round lies between 0 and I",
    "ranks from 1": "the first device is number 0",
    "all keys": "a device has its stripes of the text, not the whole",
    "one bound for all queries": "a step's query j sees one key more than query j − 1: bound each",
    "one row's length for all": "every row of a batch has a length of its own",
    "a query does not see itself": "a query's own key counts: its bound is its position + 1",
}


def local_lengths(lengths, devices: int, rank: int, interleave: int) -> np.ndarray:
    """How many of the first `lengths` keys (any shape) device `rank` of `devices` has.

    Keys are dealt in stripes of `interleave`, key t to device (t // interleave) mod devices:

        ⌊L / (D·I)⌋ · I + clamp(L mod (D·I) − r·I, 0, I)
    """
    lengths = np.asarray(lengths)
    full, rest = np.divmod(lengths, devices * interleave)
    return full * interleave + np.clip(rest - rank * interleave, 0, interleave)


def stripe_questions() -> list[Question]:
    """The questions to `check_local_lengths`: (lengths (b, l), devices, rank, interleave) each."""
    rng = np.random.default_rng(4)

    def step(prefixes, queries):
        """Bounds of a step's queries behind these prefixes: query j sees L + j + 1 keys."""
        return np.asarray(prefixes)[:, None] + 1 + np.arange(queries)

    asked = {
        "one device": (step([0, 5, 40], 1), 1, (0,), 4),
        "stripes of one": (step([9, 17], 1), 4, range(4), 1),
        "stripes of sixteen": (step([100, 31, 64], 1), 2, range(2), 16),
        "several queries": (step([13, 29], 7), 3, range(3), 4),
        "ragged": (step([0, 1, 63, 64, 65, 1000], 5), 4, range(4), 16),
        "no keys": (np.zeros((2, 3), int), 4, range(4), 8),
    }
    for number in range(8):
        devices, interleave = (int(x) for x in rng.integers(2, 9, 2))
        prefixes = rng.integers(0, 6 * devices * interleave, 4)
        bounds = step(prefixes, int(rng.integers(1, 9)))
        asked[f"random {number}"] = (bounds, devices, range(devices), interleave)
    questions = []
    for name, (bounds, devices, ranks, interleave) in asked.items():
        for rank in ranks:
            arguments = (bounds.copy(), devices, rank, interleave)
            questions.append(Question(name, arguments, (local_lengths(*arguments),)))
    return questions


def wrong_local_lengths(lengths, devices: int, rank: int, interleave: int) -> Iterator:
    """What known mistakes give: (fingerprint, (array,)) of each."""
    right = local_lengths(lengths, devices, rank, interleave)
    stripes = devices * interleave
    full, rest = np.divmod(lengths, stripes)
    part = -(-lengths // devices)
    evenly = -(-rest // devices)
    before = rank * interleave
    found = {
        "contiguous shards": [np.clip(lengths - rank * part, 0, part)],
        "stripes of one key": [local_lengths(lengths, devices, rank, 1)],
        "only full rounds": [full * interleave],
        "the last round for all": [full * interleave + np.minimum(rest, interleave)],
        "the last round shared evenly": [full * interleave + evenly, lengths // devices, part],
        "the last round not bounded": [
            full * interleave + rest - before,
            full * interleave + np.maximum(rest - before, 0),
            full * interleave + np.minimum(rest - before, interleave),
        ],
        "ranks from 1": [local_lengths(lengths, devices, rank + 1, interleave)],
        "all keys": [lengths],
        "one bound for all queries": [
            np.broadcast_to(right[:, -1:], right.shape),
            np.broadcast_to(right[:, :1], right.shape),
        ],
        "one row's length for all": [
            np.broadcast_to(right[:1], right.shape),
            np.broadcast_to(right.max(axis=0), right.shape),
        ],
        "a query does not see itself": [
            local_lengths(np.maximum(lengths - 1, 0), devices, rank, interleave)
        ],
    }
    for name, arrays in found.items():
        for array in arrays:
            yield name, (np.asarray(array),)


def check_local_lengths(f: Callable) -> Report:
    """Ask f(lengths, devices, rank, interleave) how many keys each query finds on a device.

    lengths (b, l) int: so many keys of its text each query of a step may see, its own among them
    devices, rank, interleave: keys are dealt in stripes of `interleave` to `devices` devices, key t
    to device (t // interleave) mod devices; the answer (b, l) is that of device `rank`, from 0

    `local_lengths` is the formula. A line for each text and device. A function that has no stripes
    of several keys, or one query, raises NotImplementedError there and is not asked.
    """
    return ask(f, stripe_questions(), wrong_local_lengths, STRIPE_FINGERPRINTS)
