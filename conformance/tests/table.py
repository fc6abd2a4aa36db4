"""The README's table of faults: python conformance/tests/table.py, from the repository's root.

It checks every fault again, which takes some minutes. The right names are those that the tests
expect. For mutants they are in named_mutants.tsv, whose lines were read one by one; --mutants
prints this file again.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import mutants
import numpy as np
import public_bugs
import test_planted
import test_verifier
from test_bed import ALIVE, CHECKS, RIGHT

from treeattn_conformance import check_verifier

NAMED_MUTANTS = Path(__file__).parent / "named_mutants.tsv"


class Fault(NamedTuple):
    ask: Callable
    function: Callable
    names: set[str]  # the right names; empty if the suite has no name for it


def met_in_public() -> Iterator[Fault]:
    for kind, bugs in public_bugs.BUGS.items():
        for bug in bugs:
            yield Fault(CHECKS[kind], bug.function, set(bug.names))


def planted() -> Iterator[Fault]:
    for ask, _, function, names in test_planted.PLANTED:
        yield Fault(ask, function, names)
    for fault, names in test_verifier.PLANTED.items():
        yield Fault(check_verifier, test_verifier.chain(fault), names)


def names_of_mutants() -> dict[str, set[str]]:
    lines = NAMED_MUTANTS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t") for line in lines)
    return {mutant: set(names.split(", ")) for mutant, names in pairs}


def all_mutants() -> Iterator[tuple[str, Callable, Callable]]:
    """(which mutant, its check, its function), also for mutants that change nothing."""
    for kind, right, wrap in RIGHT:
        for i, (what, mutant) in enumerate(mutants.mutants(right)):
            yield f"{right.__name__} {i}: {what}", CHECKS[kind], wrap(mutant)


def dead_mutants() -> Iterator[Fault]:
    names = names_of_mutants()
    for which, ask, mutant in all_mutants():
        yield Fault(ask, mutant, names.get(which, set()))


def counted(faults: Iterable[Fault]) -> dict[str, int]:
    """How many faults were seen, and how many of those got the right names, none, or others."""
    counts = dict.fromkeys(("all", "seen", "rightly", "none", "wrongly"), 0)
    for fault in faults:
        report = fault.ask(fault.function)
        found = report.fingerprints
        counts["all"] += 1
        counts["seen"] += bool(report.names("failed"))
        counts["rightly"] += bool(found) and found == fault.names
        counts["none"] += bool(report.names("failed")) and not found
        counts["wrongly"] += bool(found) and found != fault.names
    return counts


def print_names_of_mutants() -> None:
    for which, ask, mutant in all_mutants():
        found = ask(mutant).fingerprints
        if found:
            print(which, ", ".join(sorted(found)), sep="\t", flush=True)


def main() -> None:
    alive = sum(ALIVE.values())
    for title, faults, changing_nothing in (
        ("faults that were met in public", met_in_public(), 0),
        ("planted by three readers", planted(), 0),
        (f"mutants (and {alive} that change no answer)", dead_mutants(), alive),
    ):
        counts = counted(faults)
        counts["all"] -= changing_nothing
        print("|", title, "|", " | ".join(map(str, counts.values())), "|", flush=True)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        print_names_of_mutants() if "--mutants" in sys.argv else main()
