"""The tables of what we rely on that nobody promises: each place and each test is there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PAGES = [REPOSITORY / "site" / "relied_on.md", *sorted(REPOSITORY.glob("labs/*/README.md"))]
TABLE = re.compile(r"^\| what \| where \|.*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
ROWS = [
    (page, *row.strip("|").split(" | "))
    for page in PAGES
    for table in TABLE.findall(page.read_text(encoding="utf-8"))
    for row in table.strip().splitlines()[2:]
]


def test_there_is_a_table():
    assert sum(page.parent.name == "site" for page, *_ in ROWS) > 10


TESTS = "\n".join(
    file.read_text(encoding="utf-8")
    for folder in ("tests", "llama/tests", "conformance/tests", "labs/*/tests")
    for file in REPOSITORY.glob(f"{folder}/test_*.py")
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].strip())
def test_the_place_and_the_tests_are_there(row):
    _, _, where, _, notices = row
    file, word = re.findall(r"`(\S+?)`", where)
    assert word in (REPOSITORY / file).read_text(encoding="utf-8")
    named = re.findall(r"`(\S+?)`", notices)
    assert named or "`make " in notices
    for name in named:
        if name.startswith("test_"):
            assert f"def {name}(" in TESTS, name
        elif "/" in name:
            assert (REPOSITORY / name).is_file(), name
