"""Prefixes of a list by merges: all there, in their order, each key once, in few rounds."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .answers import Arrays, Question, ask
from .report import Report

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
    line for each n.
    """

    def asked(n: int) -> Arrays:
        found = scan(join, [Joined((i,)) for i in range(n)])
        return _as_texts(found, n)

    return ask(asked, scan_questions(), wrong_scans, SCAN_FINGERPRINTS)


def _as_texts(prefixes, n: int) -> Arrays:
    """(what each prefix has, in words, whether they took few rounds)."""
    texts = np.array([" ".join(map(str, x.keys)) for x in prefixes])
    return texts, np.array(max(x.rounds for x in prefixes) <= math.ceil(math.log2(n)))


def scan_questions() -> list[Question]:
    """The questions to `check_scan`: (n,) each."""
    sizes = (1, 2, 3, 4, 5, 8, 13)
    return [Question(f"n = {n}", (n,), _of_keys(_prefixes(n))) for n in sizes]


def _prefixes(n: int) -> list[list[int]]:
    return [list(range(i + 1)) for i in range(n)]


def _of_keys(lists, in_few_rounds: bool = True) -> Arrays:
    return np.array([" ".join(map(str, x)) for x in lists]), np.array(in_few_rounds)


def wrong_scans(n: int) -> Iterator[tuple[str, Arrays]]:
    """What known mistakes give: (fingerprint, (texts, whether in few rounds)) of each."""
    right = _prefixes(n)
    yield "a chain", _of_keys(right, n - 1 <= math.ceil(math.log2(n)))
    for few in (True, n - 1 <= math.ceil(math.log2(n))):
        yield "itself left out", _of_keys([x[:-1] for x in right], few)
        yield "merged backwards", _of_keys([x[::-1] for x in right], few)
        yield "suffixes", _of_keys([list(range(i, n)) for i in range(n)], few)
        yield "the whole for all", _of_keys([right[-1]] * n, few)
    yield "one round only", _of_keys([x[-2:] for x in right])
    for backwards in (False, True):
        at_once = [Joined((i,)) for i in range(n)]
        distance = 1
        while distance < n:
            for i in range(distance, n):  # of which some were written in this round already
                pair = (at_once[i - distance], at_once[i])
                at_once[i] = join(*(pair[::-1] if backwards else pair))
            distance *= 2
        yield "a key counted twice", _as_texts(at_once, n)
