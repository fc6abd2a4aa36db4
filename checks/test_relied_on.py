"""The tables of what we rely on that no library promises: each place and each test is there."""

import re

import pytest
from pages import REPOSITORY, SITE, text

pytestmark = pytest.mark.house

PAGES = [SITE / "relied_on.md", *sorted(REPOSITORY.glob("labs/*/README.md"))]
TABLE = re.compile(r"(?ms)^\| what \| where \|.*?(?:\n\n|\Z)")
ROWS = [
    row.strip("|").split(" | ")
    for page in PAGES
    for table in TABLE.findall(text(page))
    for row in table.strip().splitlines()[2:]
]
TESTS = "\n".join(
    text(file)
    for folder in ("tests", "checks", "llama/tests", "conformance/tests", "labs/*/tests")
    for file in REPOSITORY.glob(f"{folder}/test_*.py")
)


def test_there_is_a_table():
    assert len(ROWS) > 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip())
def test_the_place_and_the_tests_are_there(row):
    _, where, _, notices = row
    file, word = re.findall(r"`(\S+?)`", where)
    assert word in text(REPOSITORY / file)
    named = re.findall(r"`(\S+?)`", notices)
    assert named or "`make " in notices
    for name in named:
        if name.startswith("test_"):
            assert f"def {name}(" in TESTS, name
        elif "/" in name:
            assert (REPOSITORY / name).is_file(), name
