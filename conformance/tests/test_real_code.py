"""real_code.py: merges and kernels of other projects stay green with the failures they document."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from treeattn_conformance import check_merge

FOLDER = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def real_code():
    sys.path.insert(0, str(FOLDER))
    try:
        import real_code
    finally:
        sys.path.remove(str(FOLDER))
    return real_code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_row_of_the_page_is_what_is_found(real_code):
    page = (FOLDER / "real_code.md").read_text(encoding="utf-8")
    assert real_code.HEAD in page
    assert len(real_code.ROWS) == len(re.findall(r"(?m)^\| \[", page)) == 8
    for row in filter(real_code.there_are, real_code.ROWS):
        with np.errstate(all="ignore"):
            report = row.ask(row.function, expect=row.expect)
        assert report, f"{row.what}\n{report}"
        assert real_code.line(row, report) in page


@pytest.mark.filterwarnings("ignore")
def test_a_failure_that_no_reason_excuses_makes_it_red(real_code, monkeypatch, capsys):
    sglang = real_code.ROWS[1]
    for expect, red in ((sglang.expect, False), ({"stale NaN": "zeroed"}, True)):
        row = sglang._replace(ask=check_merge, expect=expect)
        monkeypatch.setattr(real_code, "ROWS", (row,))
        assert real_code.main(["--print"]) == red
        assert ("NaN for no keys" in capsys.readouterr().err) == red
