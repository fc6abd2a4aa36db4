"""The page of the ledger: its rows as tables, each linked to the section that explains it."""

import json
import re
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
NOTEBOOKS = REPOSITORY / "notebooks"
SPECIAL = re.compile(r"`[^`]*`|[*_<$|[\]]")  # but a piece of code is what it is
LANGUAGES = {"English": "en", "Vietnamese": "vi", "Chinese": "zh"}
ID = re.compile(r"(?<![\w-])(?:2024|2025|expl|note|pack)-[A-Z]\w*(?![\w-])")
INTRODUCTION = """# The ledger, row by row

What the sources state, in their own words, with a verdict, the section that explains it and the
tests that hold it. [Notebook 10](notebooks/10_ledger.ipynb) says what the verdicts mean, counts
them and runs some of the checks; the rows are files, `notebooks/ledger`. A row's id is a link
to it.

```{toctree}
:hidden:

notebooks/10_ledger
```
"""


def read(names: str = "ledger/*.tsv") -> list[dict[str, str]]:
    """Tables of the folder notebooks, one after the other, a dictionary for each row."""
    rows = []
    for path in sorted(NOTEBOOKS.glob(names)):
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        rows += [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    return rows


def escaped(text: str) -> str:
    """Text whose characters mean nothing to Markdown, but for pieces of code."""
    return SPECIAL.sub(lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)


@cache
def headings(path: Path) -> dict[str, str]:
    """The headings of a notebook that rows name, by the tags of their cells without `ledger:`."""
    found = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            if tag.startswith("ledger:"):
                (heading,) = re.findall(r"(?m)^##+ (.+)$", "".join(cell["source"]))
                found[tag.removeprefix("ledger:")] = heading
    return found


def link(place: str) -> str:
    """ "01: five-words" as a link to the section whose heading is in the cell that is tagged
    `ledger:five-words`; off the main road a notebook's name stands in place of a number."""
    number, _, tag = place.partition(": ")
    beside = (f"notebooks/deeper/{number}.ipynb", f"labs/*/{number}.ipynb")
    patterns = (f"notebooks/{number}_*.ipynb", *beside)
    (path,) = [path for pattern in patterns for path in REPOSITORY.glob(pattern)]
    heading = headings(path)[tag]
    slug = re.sub(r"[^-\w ]", "", heading).replace(" ", "-").lower()
    told = f"{number.replace('_', ' ')}, {escaped(heading)}"
    return f"[{told}]({path.relative_to(REPOSITORY)}#{slug})"


def literal(text: str) -> str:
    """Text that neither Markdown nor HTML reads anything into, such as a formula's source."""
    return re.sub(r"[^\w\s]|_", lambda found: f"&#{ord(found[0])};", text)


def with_links(text: str, ids: set[str]) -> str:
    """Markdown of a note: the ids of rows in it lead to those rows."""

    def to_row(found: re.Match) -> str:
        id = found[0]
        return f'<a href="#{id}">{id}</a>' if id in ids else id

    return ID.sub(to_row, escaped(text))


def parts(text: str) -> list[str]:
    return [x.strip() for x in text.split(";") if x.strip()]


def short(test: str) -> str:
    """The name of a test, without the folder of most tests."""
    return re.sub("^(tests|checks)/", "", test)


def line(row: dict[str, str], ids: set[str], language: str) -> str:
    """A row of a table, in Markdown."""
    id, verdict = row["id"], row["verdict"]
    facts = f'data-source="{escape(row["source"])}" data-verdict="{escape(verdict)}"'
    tests = [f"`{short(test)}`" for test in parts(row["test"])]
    proofs = [f"proof in {escaped(short(proof))}" for proof in parts(row["proof"])]
    twins = with_links(", ".join(parts(row["twin"])), ids)
    note = " ".join(filter(None, (with_links(row["note"], ids), twins and f"(As {twins}.)")))
    cells = (
        f'<a id="{id}" class="row" href="#{id}" {facts}>{id}</a><br>{escaped(row["item"])}',
        f'{escaped(row["says"])}<br><q lang="{language}">{literal(row["quote"])}</q>',
        f"**{verdict}** {note}".strip(),
        "<br>".join([*map(link, parts(row["notebook"])), *tests, *proofs]),
    )
    return "| " + " | ".join(cells) + " |"


def choice(name: str, label: str, options: list[str]) -> str:
    items = "".join(f"<option>{escape(option)}</option>" for option in options)
    select = f'<select name="{name}"><option value="">all</option>{items}</select>'
    return f"<label>{label} {select}</label>"


def filters(rows: list[dict[str, str]]) -> str:
    """The form that static/ledger.js shows and listens to. Without scripts every row is there."""

    def all_of(values) -> list[str]:
        return list(dict.fromkeys(values))

    notebooks = sorted({place.partition(": ")[0] for r in rows for place in parts(r["notebook"])})
    return "\n".join(
        (
            '<form id="ledger-filters" hidden>',
            '<label>Find whole words <input type="search" name="find" autocomplete="off"></label>',
            choice("source", "Source", all_of(row["source"] for row in rows)),
            choice("verdict", "Verdict", all_of(row["verdict"] for row in rows)),
            choice("notebook", "Notebook", notebooks),
            '<button type="reset">All rows</button> <output aria-live="polite"></output>',
            "</form>",
            '<script src="_static/ledger.js" defer></script>',
        )
    )


def ledger_page() -> str:
    """All rows, a table for each source, below the filters."""
    rows = read()
    ids = {row["id"] for row in rows}
    sources = {source["source"]: source for source in read("sources.tsv")}
    pieces = [INTRODUCTION, filters(rows) + "\n"]
    for name, these in groupby(rows, lambda row: row["source"]):
        source = sources[name]
        language = LANGUAGES[source["language"].partition(",")[0]]
        title = source["name"].removeprefix("the ").capitalize()
        about = escaped(f"{source['what']} Read in: {source['language']}.")
        if source["link"]:
            about += f" [{source['name']}]({source['link']})"
        head = "| row | what it says | verdict | shown and tested in |\n|---|---|---|---|"
        body = "\n".join(line(row, ids, language) for row in these)
        pieces.append(f"## {title}\n\n{about}\n\n{head}\n{body}\n")
    return "\n".join(pieces)
