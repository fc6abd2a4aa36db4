"""The page of the ledger: its rows as tables, each linked to the section that explains it."""

import re
from itertools import groupby
from pathlib import Path

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SPECIAL = str.maketrans({character: f"\\{character}" for character in "*_<$|[]"})
NAMES = {
    "v1": "Version 1 of the paper",
    "v2": "Version 2 of the paper",
    "explainer": "The explainer",
    "note": "The softmax note",
    "packing": "The packing document",
}
INTRODUCTION = """# The ledger, row by row

What the sources state, with a verdict, the section that explains it and the tests that hold it.
[Notebook 10](notebooks/10_ledger.ipynb) says what the verdicts mean, counts them and runs some of
the checks; the rows are a file, `notebooks/ledger.tsv`. A row is linked as `ledger.html#v1-e30`.
"""


def read() -> list[dict[str, str]]:
    header, *lines = (NOTEBOOKS / "ledger.tsv").read_text(encoding="utf-8").splitlines()
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


def link(place: str) -> str:
    """ "01: 4. The moments" as a link to that section."""
    number, _, heading = place.partition(": ")
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    slug = re.sub(r"[^-\w ]", "", heading).replace(" ", "-").lower()
    return f"[{number}, {heading.translate(SPECIAL)}](notebooks/{path.name}#{slug})"


def line(row: dict[str, str]) -> str:
    tests = [x.strip().removeprefix("tests/") for x in row["test"].split(";") if x.strip()]
    places = [x.strip() for x in row["notebook"].split(";") if x.strip()]
    cells = (
        f'<a id="{row["id"].lower()}"></a>{row["item"].translate(SPECIAL)}',
        row["says"].translate(SPECIAL),
        f"**{row['verdict']}** {row['note'].translate(SPECIAL)}".strip(),
        "<br>".join([*map(link, places), *(f"`{test}`" for test in tests)]),
    )
    return "| " + " | ".join(cells) + " |"


def ledger_page() -> str:
    """All rows, a table for each source."""
    parts = [INTRODUCTION]
    for source, rows in groupby(read(), lambda row: row["source"]):
        head = "| where | what it says | verdict | shown and tested in |\n|---|---|---|---|"
        parts.append(f"## {NAMES[source]}\n\n{head}\n" + "\n".join(map(line, rows)) + "\n")
    return "\n".join(parts)
