"""A result for each question, and the report that prints the results."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Result(NamedTuple):
    case: str
    status: str  # "passed", "failed", "expected" (a failure that is known) or "skipped"
    fingerprints: tuple[str, ...] = ()  # names of the mistakes that the answer shows
    detail: str = ""


class Report(NamedTuple):
    """A line for each question. True if at least one question passed and none failed."""

    results: tuple[Result, ...]
    cures: Mapping[str, str]  # of all mistakes that have a name

    def __bool__(self) -> bool:
        return bool(self.names("passed")) and not self.names("failed")

    def names(self, status: str) -> list[str]:
        """The questions that "passed", "failed", are "expected" to fail, or were "skipped"."""
        return [result.case for result in self.results if result.status == status]

    @property
    def fingerprints(self) -> set[str]:
        """The names of all mistakes that were found, expected ones included."""
        return {name for result in self.results for name in result.fingerprints}

    def raise_for_failures(self) -> None:
        """Raise AssertionError with the whole report unless the report is true."""
        if not self:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        lines = []
        for x in self.results:
            names = ", ".join(x.fingerprints)
            said = names if x.status == "failed" and names else x.detail
            lines.append(f"{x.case:24} {x.status:8} {said}".rstrip())
        if not self and not self.names("failed"):
            lines.append("no success: every question was skipped, or is expected to fail")
        lines += [f"{name}: {self.cures[name]}" for name in sorted(self.fingerprints)]
        return printable("\n".join(lines))

    __repr__ = __str__


def expected(
    results: Sequence[Result], expect: Mapping[str, str] | Iterable[str], cures: Mapping[str, str]
) -> tuple[Result, ...]:
    """The results, in which failures that `expect` names are "expected".

    Raises ValueError if a name in `expect` is neither a question's nor a mistake's.
    """
    expect = {expect: ""} if isinstance(expect, str) else expect
    reasons = dict(expect) if isinstance(expect, Mapping) else dict.fromkeys(expect, "")
    unknown = set(reasons) - {x.case for x in results} - set(cures)
    if unknown:
        raise ValueError(f"expect has {sorted(unknown)}, expected questions or mistakes")
    changed = []
    for x in results:
        reason = reasons.get(x.case)
        if reason is None and x.fingerprints and set(x.fingerprints) <= set(reasons):
            reason = "; ".join(filter(None, (reasons[name] for name in x.fingerprints)))
        if x.status == "failed" and reason is not None:
            what = ", ".join(x.fingerprints) or x.detail
            x = x._replace(status="expected", detail=f"{reason}: {what}" if reason else what)
        elif x.status == "passed" and x.case in reasons:
            x = x._replace(detail="expected to fail: take it out of expect")
        changed.append(x)
    return tuple(changed)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def printable(text: str) -> str:
    """The text, in which signs that the terminal cannot print are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
