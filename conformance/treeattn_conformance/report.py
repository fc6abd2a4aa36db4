"""What came of the questions: a result each, and the report that prints them."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PLAIN = {"∞": "inf", "−": "-", "·": "*", "√": "sqrt ", "Σ": "sum ", "≤": "<=", "…": "..."}


class Difference(NamedTuple):
    """How the bits of a function's answers differ from one another, along one axis."""

    compared: int  # pairs of answers that should have the same bits
    differing: int  # pairs that have not
    share: float  # of the elements that differ, in the pair with the most
    largest: float  # absolute difference of any pair; NaN where one is no number, or the other
    first: str  # the first pair that differs, and its first element that does


class Result(NamedTuple):
    case: str
    status: str  # "passed", "failed" or "skipped"
    fingerprints: tuple[str, ...] = ()
    detail: str = ""
    difference: Difference | None = None


def asked(case: str, ask: Callable[[], Any]) -> tuple[Result, Any]:
    """(the result so far, the answer to be judged): None where there is no answer."""
    try:
        return Result(case, "passed"), ask()
    except NotImplementedError as error:
        return Result(case, "skipped", (), first_line(error)), None
    except Exception as error:
        return Result(case, "failed", (), f"{type(error).__name__}: {first_line(error)}"), None


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def unwritten(written: set[str]) -> Result:
    """A line of its own for a function that did not leave its arguments as they were."""
    return Result("arguments", "failed", (), f"it writes into {', '.join(sorted(written))}")


def printable(text: str) -> str:
    """The text, in plainer signs where the terminal has no others."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        pass
    plain = text.translate(str.maketrans(PLAIN))
    return plain.encode(encoding, "backslashreplace").decode(encoding)


class Report(NamedTuple):
    """A line for each question. True if something passed and nothing failed."""

    results: tuple[Result, ...]
    cures: Mapping[str, str]  # of fingerprints, or of cases whose bits differ

    def __bool__(self) -> bool:
        return bool(self.names("passed")) and not self.names("failed")

    def names(self, status: str) -> list[str]:
        """The cases that "passed", "failed" or were "skipped"."""
        return [result.case for result in self.results if result.status == status]

    @property
    def fingerprints(self) -> set[str]:
        return {name for result in self.results for name in result.fingerprints}

    def __str__(self) -> str:
        lines = [
            f"{x.case:24} {x.status:8} {', '.join(x.fingerprints) or x.detail}".rstrip()
            for x in self.results
        ]
        known = self.fingerprints | {x.case for x in self.results if x.difference}
        cures = [f"{name}: {self.cures[name]}" for name in sorted(known)]
        return printable("\n".join([*lines, *cures]))
