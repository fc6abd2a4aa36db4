"""The ledger: a row for all that the sources number, each with a place and a test that exist."""

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "notebooks"
COLUMNS = ["id", "source", "item", "says", "verdict", "notebook", "test", "note"]
VERDICTS = {
    "proved",
    "proved for a special case",
    "checked",
    "measured here",
    "agrees within",
    "imprecise",
    "wrong as printed",
    "cannot be tested here",
    "definition",
}
WITHOUT_A_TEST = {"definition", "cannot be tested here"}
NEEDS_A_NOTE = {"imprecise", "wrong as printed", "cannot be tested here", "agrees within"}


def many(kind: str, mark: str, last: int, width: int = 1) -> dict[str, str]:
    """The end of a row's id -> a pattern of its item, for numbers from 1."""
    return {f"{mark}{n:0{width}}": rf"{kind} {n}(?!\d)" for n in range(1, last + 1)}


# What each source numbers, or sets apart: the ids of the rows, which letters may follow, and how
# an item has to name them. The explainer labels its equations and tables, without numbers; the
# note has displays and a widget; the packing document boxes of text and a list.
PAPER = {
    **many("Algorithm", "A", 3),
    **many("Theorem", "T", 1),
    **many("Figure", "F", 4),
    "L1": "Listing",
}
NUMBERED = {
    "v1": PAPER
    | many(r"eq\.", "E", 39, 2)
    | {"TB1": r"Table I\b.*eq\. 40", "TB2": r"Table II\b.*eq\. 41"},
    "v2": PAPER
    | many(r"eq\.", "E", 38, 2)
    | many("Table", "TB", 2)
    | many("Observation", "OB", 1)
    | {"TBG": r"Tables? I\b"},
    "expl": many("", "E", 5) | many("", "TB", 4) | many("", "D", 3),
    "note": many("", "E", 7) | {"S1": "", "V1": ""},
    "pack": {
        mark: ""
        for mark in "M2 M9 M10 M11 M12 D2 D3 P1 P2 P3 U1 U2 U4 U5 U6".split()
        + [f"I{n}" for n in range(1, 17)]
    },
}
SOURCES = {"v1": "v1", "v2": "v2", "expl": "explainer", "note": "note", "pack": "packing"}
LETTERED = {"expl", "note", "pack"}  # what they set apart has no number to be named by


@cache
def ledger() -> list[dict[str, str]]:
    header, *lines = (NOTEBOOKS / "ledger.tsv").read_text(encoding="utf-8").splitlines()
    assert header.split("\t") == COLUMNS
    return [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]


def places(text: str) -> list[str]:
    return [x.strip() for x in text.split(";") if x.strip()]


# ------------------------------------------------------------------------------------ the rows


@pytest.mark.parametrize("source", NUMBERED)
def test_all_that_is_numbered_has_a_row(source):
    items = {row["id"]: row["item"] for row in ledger()}
    missing = []
    for mark, pattern in NUMBERED[source].items():
        named = re.compile(rf"{source}-{mark}[A-Za-z]*")
        found = [item for id, item in items.items() if named.fullmatch(id)]
        wanted = "" if source in LETTERED else pattern
        if not any(re.search(wanted, item, re.IGNORECASE) for item in found):
            missing.append(f"{source}-{mark} {wanted}")
    assert not missing


def test_a_missing_number_is_noticed(monkeypatch):
    rows = [row for row in ledger() if row["id"] not in ("v1-E30", "v1-A2")]
    monkeypatch.setitem(globals(), "ledger", lambda: rows)
    with pytest.raises(AssertionError, match="v1-E30"):
        test_all_that_is_numbered_has_a_row("v1")


def test_rows_are_complete():
    """No id twice, no unknown verdict, no field that a table on a page would not show."""
    again = [id for id, times in Counter(row["id"] for row in ledger()).items() if times > 1]
    assert not again
    for row in ledger():
        mark = row["id"].partition("-")[0]
        assert row["source"] == SOURCES[mark], row
        assert row["verdict"] in VERDICTS, row
        assert row["item"] and len(row["says"]) > 15, row
        assert row["note"] or row["verdict"] not in NEEDS_A_NOTE, row
        assert all(x == x.strip() and '"' not in x for x in row.values()), row
        assert row["verdict"] != "agrees within" or "%" in row["note"] or "order" in row["note"]


# ------------------------------------------------------------------------------------ the tests


def unconditional_skip(mark: ast.expr) -> bool:
    return ast.unparse(mark).startswith(("pytest.mark.skip(", "pytest.mark.xfail")) or (
        ast.unparse(mark) == "pytest.mark.skip"
    )


@cache
def collected(file: str) -> set[str]:
    """The tests of a file that pytest collects, and that nothing skips whatever the machine."""
    path = HERE.parent / file
    if not (path.is_file() and path.name.startswith("test_")):
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        x.name
        for x in tree.body
        if isinstance(x, ast.FunctionDef)
        and x.name.startswith("test_")
        and not any(map(unconditional_skip, x.decorator_list))
    }


def test_every_test_exists():
    wrong = []
    for row in ledger():
        if not row["test"] and row["verdict"] not in WITHOUT_A_TEST:
            wrong.append(f"{row['id']}: no test")
        for test in places(row["test"]):
            file, _, name = test.partition("::")
            if name not in collected(file):
                wrong.append(f"{row['id']}: {test}")
    assert not wrong


def test_what_pytest_would_not_run_is_no_test(tmp_path, monkeypatch):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n@pytest.mark.skip('later')\ndef test_a(): 0\n"
        "@pytest.mark.skipif(True, reason='')\ndef test_b(): 0\ndef c(): 0\n"
    )
    monkeypatch.setitem(globals(), "HERE", tmp_path / "tests")
    assert collected("test_x.py") == {"test_b"}
    assert collected("nothing.py") == set()


# ------------------------------------------------------------------------------------ the places


@cache
def headings() -> dict[str, set[str]]:
    """A notebook's number -> its headings below the title."""
    found = {}
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        found[path.stem.partition("_")[0]] = set(re.findall(r"^##+ (.+)$", text, re.MULTILINE))
    return found


def test_every_place_exists():
    """As "01: 4. The moments": a notebook's number, and a heading as it stands there."""
    wrong = []
    for row in ledger():
        if not row["notebook"] and row["verdict"] not in WITHOUT_A_TEST:
            wrong.append(f"{row['id']}: no place")
        for place in places(row["notebook"]):
            number, _, heading = place.partition(": ")
            if heading not in headings().get(number, ()):
                wrong.append(f"{row['id']}: {place}")
    assert not wrong


def test_what_notebook_10_runs_is_in_the_ledger():
    cells = json.loads((NOTEBOOKS / "10_ledger.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    run = [id for ids in re.findall(r'\blive\(\s*"([^"]+)"', code) for id in ids.split()]
    assert len(run) > 20 and set(run) <= {row["id"] for row in ledger()}
    printed = "".join(
        "".join(output.get("text", "")) for c in cells for output in c.get("outputs", ())
    )
    for id in run:
        assert re.search(rf"^{id} .*: True$", printed, re.MULTILINE), id
