"""The ledger: a row for all that the sources number, each with a place and a test that exist.

Its quotations are looked for in the sources, where those lie beside the checkout, and what several
sources state has to get one verdict.
"""

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "notebooks"
SOURCES_BESIDE = HERE.parent.parent / "shared" / "sources"
COLUMNS = "id source item says quote verdict notebook test note twin".split()
VERDICTS = {
    "proved",
    "checked",
    "checked in part",
    "imprecise",
    "wrong as printed",
    "cannot be tested here",
    "definition",
}
WITHOUT_A_TEST = {"definition", "cannot be tested here"}
NEEDS_A_NOTE = {
    "checked in part",
    "imprecise",
    "wrong as printed",
    "cannot be tested here",
}


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
    "2024": PAPER
    | many(r"eq\.", "E", 39, 2)
    | {"TB1": r"Table I\b.*eq\. 40", "TB2": r"Table II\b.*eq\. 41"},
    "2025": PAPER
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
LETTERED = {"expl", "note", "pack"}  # what they set apart has no number to be named by


def table(name: str) -> list[dict[str, str]]:
    header, *lines = (NOTEBOOKS / name).read_text(encoding="utf-8").splitlines()
    columns = header.split("\t")
    return [dict(zip(columns, line.split("\t"), strict=True)) for line in lines]


@cache
def ledger() -> list[dict[str, str]]:
    rows = table("ledger.tsv")
    assert list(rows[0]) == COLUMNS
    return rows


@cache
def sources() -> dict[str, dict[str, str]]:
    """By the first part of an id."""
    return {source["mark"]: source for source in table("sources.tsv")}


def by_id() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in ledger()}


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
    rows = [row for row in ledger() if row["id"] not in ("2024-E30", "2024-A2")]
    monkeypatch.setitem(globals(), "ledger", lambda: rows)
    with pytest.raises(AssertionError, match="2024-E30"):
        test_all_that_is_numbered_has_a_row("2024")


def test_rows_are_complete():
    """No id twice, no unknown verdict, no field that a table on a page would not show."""
    again = [id for id, times in Counter(row["id"] for row in ledger()).items() if times > 1]
    assert not again
    for row in ledger():
        mark = row["id"].partition("-")[0]
        assert row["source"] == sources()[mark]["source"], row
        assert row["verdict"] in VERDICTS, row
        assert row["item"] and len(row["says"]) > 15, row
        assert row["note"] or row["verdict"] not in NEEDS_A_NOTE, row
        assert all(x == x.strip() and '"' not in x for x in row.values()), row


# --------------------------------------------------------------------------------- the quotations

FILES = {
    "2024": "tree_attention_paper_v1_english.md",
    "2025": "tree_attention_paper_v2_vietnamese.md",
    "expl": "tree_vs_ring_explainer_chinese.md",
    "note": "softmax_reduction_note.md",
    "pack": "prefix_tree_packing_design.md",
}


def words(quote: str) -> float:
    """Between blanks; two Chinese characters count as one."""
    han = re.findall(r"[\u4e00-\u9fff]", quote)
    rest = re.findall(r"[^\s\u4e00-\u9fff]+", quote)
    return len(rest) + len(han) / 2


def test_every_row_quotes_its_source():
    for row in ledger():
        assert row["quote"] and words(row["quote"]) <= 15, row["id"]
        assert row["quote"] == " ".join(row["quote"].split()), row["id"]


def missing_quotes(rows, texts: dict[str, str]) -> list[str]:
    return [row["id"] for row in rows if row["quote"] not in texts[row["id"].partition("-")[0]]]


def test_quotes_are_in_the_sources():
    """Exactly, but for white space: line breaks, tabs and several blanks count as one blank."""
    if not SOURCES_BESIDE.is_dir():
        pytest.skip(f"the sources are not at {SOURCES_BESIDE}")
    texts = {}
    for mark, name in FILES.items():
        texts[mark] = " ".join((SOURCES_BESIDE / name).read_text(encoding="utf-8").split())
    assert missing_quotes(ledger(), texts) == []
    # Neither a word more nor the words of another source pass.
    row = by_id()["2024-C30"]
    assert missing_quotes([row | {"quote": row["quote"].replace("identical", "equal")}], texts)
    assert missing_quotes([row | {"id": "2025-C30"}], texts)


def quoted(id: str) -> str:
    return by_id()[id]["quote"]


def test_slips_that_the_quotes_show():
    """Slips of words, numbers and letters, which no computation could find: two quotes part."""
    # A is summed over in the display, which is nevertheless "for all A", and up to d, not d_h.
    assert r"\sum_{A=1}^d" in quoted("2024-EU2") and r"\forall A" in quoted("2024-EU2")
    assert r"\{1, \dots, d_h\}" in quoted("2024-EU2") and r"\{1, \dots, d\}" in quoted("2024-TB2")
    assert "A,B ∈ {1,···,d}" in quoted("2025-TBH")
    # The numerator is divided, by eq. 3 and 4, and not v.
    for divided, numerator, mark in (
        ("2024-C55", "2024-E03", "once the values v and"),
        ("2025-EU2", "2025-E02", "các giá trị 𝑣 và"),
    ):
        assert mark in quoted(divided) and "+ " in quoted(numerator)
    # Table I has m without a source; Algorithm 1 reduces r, which is with it.
    assert quoted("2024-TB1").startswith("m Max of $q") and "zeta" not in quoted("2024-TB1")
    assert quoted("2025-TBG") == "| m | Max của q·k^T |"
    # z is called a score, and a line later it is the output.
    assert quoted("2024-C72").endswith("scores z") and quoted("2024-E06").startswith("z = ")
    assert quoted("2025-C99").endswith("z") and quoted("2025-E16").startswith("z = ")
    assert r"\tilde{\zeta}" in quoted("2024-E38S")
    assert not any("ilde" in row["quote"] for row in ledger() if row["id"] != "2024-E38S")
    # Sections that do not exist; the older listing's line, in the newer text.
    assert "6.6.3" in quoted("2024-C63")
    assert not any("§6.6" in row["item"] for row in ledger() if row["source"] == "2024 text")
    assert "sẽ được sử dụng" in quoted("2025-C89")
    assert "dòng 5" in quoted("2025-A2L") and quoted("2025-A2").startswith("6: ")
    # A throughput is announced, and times in seconds ("giây") are printed.
    assert "throughput" in quoted("2025-C90") and "giây" in quoted("2025-TB1")
    # The final tokens of the document's own example are red, when and red.
    rows = [row.split() for row in re.split("(?=Mars)", quoted("pack-M2")) if row]
    assert [row[-1] for row in rows] == ["red", "when", "red"]
    assert quoted("pack-M6").endswith("red, from, and dark.")


def test_texts_that_the_quotes_contradict():
    """One sentence of a source against another of the same."""
    assert "previously unnoted" in quoted("2024-C33")
    assert "also made similar observations as we do" in quoted("2024-C10")
    assert "chưa được chú ý trước đây" in quoted("2025-C52")
    assert "tương tự như chúng tôi" in quoted("2025-C73")
    assert "NVLINK" in quoted("2025-C23") and "all-to-all" in quoted("2025-X5")
    for lookup, tied in (("2024-C70", "2024-C06"), ("2025-C97", "2025-C72")):
        assert "hetero-associative" in quoted(lookup) and "(K " in quoted(tied)


def test_no_verdict_hangs_on_a_translators_words():
    """What the translation alone says, and says wrongly in words, is imprecise at most."""
    rows = by_id()
    for row in ledger():
        if row["source"] == "2025 text" and row["verdict"] == "wrong as printed":
            originals = [id for id in places(row["twin"]) if id.startswith("2024-")]
            code = row["id"] == "2025-L1"
            assert code or any(rows[id]["verdict"] == row["verdict"] for id in originals), row
    marked = {row["id"] for row in ledger() if row["note"].startswith("Translation:")}
    assert {"2025-OBM", "2025-A2L", "2025-C16"} <= marked
    assert all(rows[id]["verdict"] == "imprecise" for id in marked)


# -------------------------------------------------------------------------------------- the twins


def numbers(note: str) -> set[str]:
    """Those of a note that are results: without ids, equations, sections, tables and years."""
    note = re.sub(r"\b(2024|2025|expl|note|pack)-\w+", "", note)
    note = re.sub(r"\b20\d\d\b|arXiv:[\d.]+|https?://\S+", "", note)
    note = re.sub(r"(eq\.|§|Tables?|[Aa]ppendix|Algorithm|Figure|notebook) ?\d[\d.]*", "", note)
    return set(re.findall(r"\d[\d,.]*\d|\d", note))


def disagreements(rows: dict[str, dict[str, str]]) -> list[str]:
    wrong = []
    for id, row in rows.items():
        for other in places(row["twin"]):
            if other not in rows or id not in places(rows[other]["twin"]):
                wrong.append(f"{id}: {other} does not point back")
                continue
            if row["verdict"] != rows[other]["verdict"]:
                wrong.append(f"{id}, {other}: verdicts")
            found = numbers(row["note"]), numbers(rows[other]["note"])
            if all(found) and found[0] != found[1]:
                wrong.append(f"{id}, {other}: {found[0] ^ found[1]}")
    return wrong


def test_twins_agree():
    """What several sources state has one verdict, and the same numbers wherever there are some."""
    assert disagreements(by_id()) == []
    assert sum(bool(row["twin"]) for row in ledger()) > 200
    row = by_id()["2025-C30"]
    for change in (
        {"verdict": "imprecise"},
        {"note": row["note"].replace("14,560", "8,320")},
        {"twin": ""},
    ):
        assert disagreements(by_id() | {"2025-C30": row | change})


# ------------------------------------------------------------------------------ names and links

REPOSITORY = HERE.parent
ID = re.compile(
    r"(?<![\w./-])((?:2024|2025|expl|note|pack)-(?:[A-Z]{1,2}\d\w*|TB\w+|OB\w+))(?![\w-])"
)


@cache
def texts() -> dict[str, str]:
    """What readers of the repository read, without outputs: path -> text."""
    found = {}
    for pattern in (
        "*.md",
        "site/*.md",
        "site/*.py",
        "treeattn/*.py",
        "labs/*/*.py",
        "labs/*/*.md",
    ):
        for path in sorted(REPOSITORY.glob(pattern)):
            found[str(path.relative_to(REPOSITORY))] = path.read_text(encoding="utf-8")
    for name, path in notebooks().items():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found[name] = "\n".join("".join(cell["source"]) for cell in cells)
    for path in (NOTEBOOKS / "ledger.tsv", NOTEBOOKS / "sources.tsv"):
        found[path.name] = path.read_text(encoding="utf-8")
    return found


def test_every_id_is_a_rows():
    for name, text in texts().items():
        assert set(ID.findall(text)) <= set(by_id()), name


def test_the_paper_is_linked_where_it_says_what_is_cited():
    """Never arXiv's second version, which has neither Llama nor MI300X; texts by their names."""
    links = {mark: source["link"] for mark, source in sources().items() if source["link"]}
    for name, text in texts().items():
        found = re.findall(
            r"(?:\[([^\]]+)\]\()?(https?://arxiv\.org/\w+/2408\.04093(?:v\d)?)", text
        )
        for words, link in found:
            year = re.search("2024|2025", words)
            wanted = {links[year[0]]} if year else {"https://arxiv.org/abs/2408.04093"}
            if name == "sources.tsv":
                wanted = set(links.values())
            assert link in wanted, (name, words, link)


def test_nobody_calls_the_texts_by_arxivs_numbers():
    """As "v1 eq. 21" or "v2-C30", which would be another document's."""
    place = r"(?:eq\.|equation|§|Algorithm|Theorem|Figure|Table|[Aa]ppendix|App\.|section|Listing)"
    old = re.compile(rf"(?<![\w./-])v[12](?:'s|,)?\s+{place}|(?<![\w.])v[12]-[A-Z]+\d")
    for name, text in texts().items():
        assert old.search(text) is None, (name, old.search(text)[0])
    assert old.search("as in v1 eq. 21") and old.search("v2-C30") and not old.search("arXiv v4")


# ------------------------------------------------------------------------------------ the tests


def unconditional_skip(mark: ast.expr) -> bool:
    return ast.unparse(mark).startswith(("pytest.mark.skip(", "pytest.mark.xfail")) or (
        ast.unparse(mark) == "pytest.mark.skip"
    )


@cache
def collected(file: str) -> set[str]:
    """The tests of a file that pytest collects, and that no decorator skips on every machine."""
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


def by_the_literature(row) -> bool:
    """A statement about what others did, which no test of this project can hold."""
    return row["verdict"] == "imprecise" and "arXiv:" in row["note"]


def test_every_test_exists():
    wrong = []
    for row in ledger():
        free = row["verdict"] in WITHOUT_A_TEST or by_the_literature(row)
        if not row["test"] and not free:
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
def notebooks() -> dict[str, Path]:
    """Those of the main road by their numbers, the others by their names."""
    found = {path.stem.partition("_")[0]: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    off = [*NOTEBOOKS.glob("deeper/*.ipynb"), *REPOSITORY.glob("labs/*/*.ipynb")]
    return found | {path.stem: path for path in sorted(off)}


@cache
def headings() -> dict[str, set[str]]:
    """A notebook's number, or its name off the main road -> its headings below the title."""
    found = {}
    for name, path in notebooks().items():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        found[name] = set(re.findall(r"^##+ (.+)$", text, re.MULTILINE))
    return found


def test_every_place_exists():
    """As "01: 4. The moments": a notebook's number or name, and a heading as it stands there."""
    wrong = []
    for row in ledger():
        quotes = "test_ledger.py" in row["test"]  # nothing to explain but the words
        if not row["notebook"] and row["verdict"] not in WITHOUT_A_TEST and not quotes:
            wrong.append(f"{row['id']}: no place")
        for place in places(row["notebook"]):
            number, _, heading = place.partition(": ")
            if heading not in headings().get(number, ()):
                wrong.append(f"{row['id']}: {place}")
    assert not wrong, f"no such section: name another in notebooks/ledger.tsv for {wrong}"


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
