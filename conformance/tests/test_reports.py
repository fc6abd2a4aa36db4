"""What a user's own tests rely on: copies of arguments, a report's truth, and how it prints."""

import io
import subprocess
import sys

import numpy as np
import pytest

from treeattn_conformance import attend, check_attention, check_merge, merge
from treeattn_conformance.__main__ import main


def in_place(parts):
    out, lse = merge(parts)
    parts[0][0][...] = out
    return out, lse


def shifted_in_place(parts):
    for _, lse in parts:
        lse -= 1
    out, lse = merge(parts)
    return out, lse + 1


def masks_in_place(q, k, v, *, mask=None):
    if mask is None:
        return attend(q, k, v)
    np.logical_not(mask, out=mask)
    return attend(q, k, v, mask=~mask)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("check", "wrong", "right", "named"),
    [
        (check_merge, in_place, merge, "parts"),
        (check_merge, shifted_in_place, merge, "parts"),
        (check_attention, masks_in_place, attend, "mask"),
    ],
)
def test_a_function_that_writes_into_its_arguments_spoils_no_later_check(
    check, wrong, right, named
):
    report = check(wrong)
    assert report.names("failed") == ["arguments"], str(report)
    assert f"it writes into {named}" in str(report)
    assert not check(right).names("failed"), str(check(right))


def test_a_report_is_true_where_something_passed_and_nothing_failed():
    def unfinished(parts):
        raise NotImplementedError("not for a CPU")

    assert check_merge(merge)
    assert not check_merge(lambda parts: (2 * merge(parts)[0], merge(parts)[1]))
    report = check_merge(unfinished)
    assert not report and not report.names("passed") and not report.names("failed")


def test_a_skipped_line_is_one_line():
    def dispatcher(parts):
        raise NotImplementedError("\n".join(["Could not run 'op' on this backend.", *"abc" * 20]))

    report = check_merge(dispatcher)
    lines = str(report).splitlines()
    assert len(lines) == len(report.results), str(report)
    assert all("Could not run 'op' on this backend." in line for line in lines)


def test_a_failed_line_is_one_line():
    def refuses(parts):
        raise ValueError("first line\n" * 30)

    lines = str(check_merge(refuses)).splitlines()
    assert len(lines) == len(check_merge(refuses).results)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_report_prints_on_any_terminal(encoding, monkeypatch):
    def finite(parts):
        out, lse = merge(parts)
        if len(parts) == 2:
            raise ValueError("−∞, and ☃")
        return out, np.where(np.isneginf(lse), -1e30, lse)

    with np.errstate(all="ignore"):
        report = check_merge(finite)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print(report)
    terminal.flush()
    said = terminal.buffer.getvalue().decode(encoding)
    infinite = "−∞" if encoding == "utf-8" else "-inf"
    assert f"ValueError: {infinite}, and" in said and f"write {infinite}" in said


def test_from_a_shell_all_skipped_is_no_success(tmp_path, monkeypatch, capsys):
    (tmp_path / "asked_in_vain.py").write_text(
        "def skips(parts):\n    raise NotImplementedError('−∞')\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["merge", "asked_in_vain:skips"]) == 1
    assert "skipped" in capsys.readouterr().out


def test_from_a_shell_in_ascii(tmp_path):
    (tmp_path / "asked_in_ascii.py").write_text(
        "from treeattn_conformance import merge\n"
        "def wrong(parts):\n"
        "    out, lse = merge(parts)\n"
        "    return out, lse.clip(-1e30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "treeattn_conformance", "merge", "asked_in_ascii:wrong"],
        cwd=tmp_path,
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=60,
    )
    assert done.returncode == 1 and b"finite lse for no keys" in done.stdout, done.stderr
