"""Prefixes of a list by merges: all there, in their order, each key once, in few rounds."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from treeattn_conformance import Report, Result

SIZES = (1, 2, 3, 4, 5, 8, 13)  # of the lists that are asked about

SCAN_FINGERPRINTS = {
    "a chain": "prefix i + 1 need not wait for prefix i: merge over distances 1, 2, 4, …",
    "itself left out": "prefix i has element i, too",
    "a key counted twice": "read all of a round's inputs before you write: else they overlap",
    "one round only": "go on over distances 2, 4, … until every prefix begins at the first element",
    "merged backwards": "merge(earlier, later): merging is associative, and need not commute",
    "suffixes": "prefix i is of the elements up to i",
    "the whole for all": "a reduction gives the last prefix only",
}


class Joined(NamedTuple):
    """A merged state that says of which elements it is, in order, and after how many rounds."""

    keys: tuple[int, ...]
    rounds: int = 0


def join(a: Joined, b: Joined) -> Joined:
    """Associative, and not commutative: whatever holds for it holds for every merge."""
    return Joined(a.keys + b.keys, max(a.rounds, b.rounds) + 1)


def check_scan(scan: Callable) -> Report:
    """Ask scan(merge, states) -> all prefixes: element i is the merge of states[0], …, states[i].

    merge: associative, of two states; merge(a, b) is of a's keys, then b's. It does not commute.
    states: a list of 1 to 13 states

    Prefixes are to come in ⌈log₂ n⌉ rounds: no merge waits for more merges before it than that. A
    line for each n; a mistake is named where it explains every answer.
    """
    results = []
    explaining: set[str] | None = None  # the mistakes that would have given all answers so far
    for n in SIZES:
        states = [Joined((i,)) for i in range(n)]
        result = Result(f"n = {n}", "passed")
        try:
            answer = _said(scan(join, states), n)
        except Exception as error:
            result = result._replace(status="failed", detail=f"{type(error).__name__}: {error}")
        else:
            likely = {name for name, wrong in wrong_scans(n) if wrong == answer}
            explaining = likely if explaining is None else explaining & likely
            fault = _fault(answer, n)
            result = result._replace(status="failed", detail=fault) if fault else result
        results.append(result)
    names = tuple(sorted(explaining or ()))
    results = [x._replace(fingerprints=names if x.status == "failed" else ()) for x in results]
    return Report(tuple(results), SCAN_FINGERPRINTS)


Said = tuple[list[list[int]], bool]  # the keys of each prefix, and whether they took few rounds


def _said(prefixes, n: int) -> Said:
    return [list(x.keys) for x in prefixes], max(x.rounds for x in prefixes) <= _few(n)


def _few(n: int) -> int:
    return math.ceil(math.log2(n))


def _prefixes(n: int) -> list[list[int]]:
    return [list(range(i + 1)) for i in range(n)]


def _fault(answer: Said, n: int) -> str:
    prefixes, in_few_rounds = answer
    if len(prefixes) != n:
        return f"{len(prefixes)} prefixes, expected {n}"
    for i, (prefix, expected) in enumerate(zip(prefixes, _prefixes(n), strict=True)):
        if prefix != expected:
            return f"prefix {i} has the elements {prefix}"
    return "" if in_few_rounds else f"more than {_few(n)} rounds"


def wrong_scans(n: int) -> Iterator[tuple[str, Said]]:
    """What known mistakes give: (fingerprint, (prefixes, whether in few rounds)) of each."""
    right = _prefixes(n)
    yield "a chain", (right, n - 1 <= _few(n))
    for few in (True, n - 1 <= _few(n)):
        yield "itself left out", ([x[:-1] for x in right], few)
        yield "merged backwards", ([x[::-1] for x in right], few)
        yield "suffixes", ([list(range(i, n)) for i in range(n)], few)
        yield "the whole for all", ([right[-1]] * n, few)
    yield "one round only", ([x[-2:] for x in right], True)
    for backwards in (False, True):
        at_once = [Joined((i,)) for i in range(n)]
        distance = 1
        while distance < n:
            for i in range(distance, n):  # of which some were written in this round already
                pair = (at_once[i - distance], at_once[i])
                at_once[i] = join(*(pair[::-1] if backwards else pair))
            distance *= 2
        yield "a key counted twice", _said(at_once, n)
