"""The ledger: a row for all that the sources number, each with a place and a test that exist.

Its quotations are looked for in the sources, where those lie beside the checkout, and what several
sources state has to get one verdict.
"""

import ast
import re
from collections import Counter
from functools import cache

import pytest
from pages import MAIN_ROAD, NOTEBOOKS, REPOSITORY, cells, text

import ledger

pytestmark = pytest.mark.house

SOURCES_BESIDE = REPOSITORY.parent / "shared" / "sources"
COLUMNS = "id source item says quote verdict notebook test proof note twin".split()
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


def marks(letters: str, last: int, width: int = 1) -> list[str]:
    """The ends of rows' ids, for numbers from 1."""
    return [f"{letters}{n:0{width}}" for n in range(1, last + 1)]


# What each source numbers, or sets apart: its rows' ids, which letters may follow. The explainer
# labels its equations and tables, without numbers; the note has displays and a widget; the packing
# document boxes of text and a list.
PAPER = [*marks("A", 3), "T1", *marks("F", 4), "L1", *marks("E", 38, 2), "TB1", "TB2"]
NUMBERED = {
    "2024": [*PAPER, "E39"],
    "2025": [*PAPER, "OB1", "TBG"],
    "expl": [*marks("E", 5), *marks("TB", 4), *marks("D", 3)],
    "note": [*marks("E", 7), "S1", "V1"],
    "pack": [*"M2 M9 M10 M11 M12 D2 D3 P1 P2 P3 U1 U2 U4 U5 U6".split(), *marks("I", 16)],
}


ROWS = ledger.read()
BY_ID = {row["id"]: row for row in ROWS}
SOURCES = {source["mark"]: source for source in ledger.read("sources.tsv")}
places = ledger.parts


@pytest.mark.parametrize("source", NUMBERED)
def test_all_that_is_numbered_has_a_row(source):
    there = "\n".join(BY_ID)
    wanted = [f"{source}-{mark}" for mark in NUMBERED[source]]
    assert [id for id in wanted if not re.search(rf"(?m)^{id}[A-Za-z]*$", there)] == []


def words(quote: str) -> float:
    """Between blanks; two Chinese characters count as one."""
    han = re.findall(r"[\u4e00-\u9fff]", quote)
    rest = re.findall(r"[^\s\u4e00-\u9fff]+", quote)
    return len(rest) + len(han) / 2


def test_rows_are_complete():
    """No id twice, no unknown verdict, no field that a table on a page would not show."""
    assert list(ROWS[0]) == COLUMNS
    assert [id for id, times in Counter(row["id"] for row in ROWS).items() if times > 1] == []
    for row in ROWS:
        mark = row["id"].partition("-")[0]
        assert row["source"] == SOURCES[mark]["source"], row
        assert row["verdict"] in VERDICTS, row
        assert row["item"] and len(row["says"]) > 15, row
        assert row["note"] or row["verdict"] not in NEEDS_A_NOTE, row
        assert row["quote"] and words(row["quote"]) <= 15, row
        assert all(x == " ".join(x.split()) and '"' not in x for x in row.values()), row


# --------------------------------------------------------------------------------- the quotations

FILES = {
    "2024": "tree_attention_paper_v1_english.md",
    "2025": "tree_attention_paper_v2_vietnamese.md",
    "expl": "tree_vs_ring_explainer_chinese.md",
    "note": "softmax_reduction_note.md",
    "pack": "prefix_tree_packing_design.md",
}


def test_quotes_are_in_the_sources():
    """Exactly, but for white space: line breaks, tabs and several blanks count as one blank."""
    if not SOURCES_BESIDE.is_dir():
        pytest.skip(f"the sources are not at {SOURCES_BESIDE}")
    sources = {mark: " ".join(text(SOURCES_BESIDE / name).split()) for mark, name in FILES.items()}
    missing = [row["id"] for row in ROWS if row["quote"] not in sources[row["id"].split("-")[0]]]
    assert missing == []


# Slips of words, numbers and letters, which no computation could find, and sentences that another
# one of the same source contradicts: what the quotes of such rows have to show.
SLIPS = {
    # A is summed over in the display, which is nevertheless "for all A", and up to d, not d_h.
    "2024-EU2": (r"\sum_{A=1}^d", r"\forall A", r"\{1, \dots, d_h\}"),
    "2024-TB2": (r"\{1, \dots, d\}",),
    "2025-TBH": ("A,B ∈ {1,···,d}",),
    # The numerator is divided, by eq. 3 and 4, and not v.
    "2024-C55": ("once the values v and",),
    "2024-E03": ("+ ",),
    "2025-EU2": ("các giá trị 𝑣 và",),
    "2025-E02": ("+ ",),
    # Table I has m without a source; Algorithm 1 reduces r, which is with it.
    "2024-TB1": ("m Max of $q",),
    "2025-TBG": ("| m | Max của q·k^T |",),
    # z is called a score, and a line later it is the output.
    "2024-C72": ("scores z",),
    "2024-E06": ("z = ",),
    "2025-C99": (" z",),
    "2025-E16": ("z = ",),
    "2024-E38S": (r"\tilde{\zeta}",),
    # Sections that do not exist; the older listing's line, in the newer text.
    "2024-C63": ("6.6.3",),
    "2025-C89": ("sẽ được sử dụng",),
    "2025-A2L": ("dòng 5",),
    "2025-A2": ("6: ",),
    # A throughput is announced, and times in seconds ("giây") are printed.
    "2025-C90": ("throughput",),
    "2025-TB1": ("giây",),
    # The final tokens of the document's own example are red, when and red.
    "pack-M2": ("red Mars", "when Mars", "dark red"),
    "pack-M6": ("red, from, and dark.",),
    # Not noted before, and similar observations by others.
    "2024-C33": ("previously unnoted",),
    "2024-C10": ("also made similar observations as we do",),
    "2025-C52": ("chưa được chú ý trước đây",),
    "2025-C73": ("tương tự như chúng tôi",),
    "2025-C23": ("NVLINK",),
    "2025-X5": ("all-to-all",),
    "2024-C70": ("hetero-associative",),
    "2024-C06": ("(K ",),
    "2025-C97": ("hetero-associative",),
    "2025-C72": ("(K ",),
}


def test_slips_that_the_quotes_show():
    for id, pieces in SLIPS.items():
        assert all(piece in BY_ID[id]["quote"] for piece in pieces), BY_ID[id]
    assert "zeta" not in BY_ID["2024-TB1"]["quote"]
    assert [row["id"] for row in ROWS if "ilde" in row["quote"]] == ["2024-E38S"]
    assert not any("§6.6" in row["item"] for row in ROWS if row["source"] == "2024 text")


def test_no_verdict_hangs_on_a_translators_words():
    """What the translation alone says, and says wrongly in words, is imprecise at most."""
    for row in ROWS:
        if row["source"] == "2025 text" and row["verdict"] == "wrong as printed":
            originals = [id for id in places(row["twin"]) if id.startswith("2024-")]
            code = row["id"] == "2025-L1"
            assert code or any(BY_ID[id]["verdict"] == row["verdict"] for id in originals), row
    marked = {row["id"]: row["verdict"] for row in ROWS if row["note"].startswith("Translation:")}
    assert {"2025-OBM", "2025-A2L", "2025-C16"} <= set(marked)
    assert set(marked.values()) == {"imprecise"}


def numbers(note: str) -> set[str]:
    """Those of a note that are results: without ids, equations, sections, tables and years."""
    note = re.sub(r"\b(2024|2025|expl|note|pack)-\w+", "", note)
    note = re.sub(r"\b20\d\d\b|arXiv:[\d.]+|https?://\S+", "", note)
    note = re.sub(r"(eq\.|§|Tables?|[Aa]ppendix|Algorithm|Figure|notebook) ?\d[\d.]*", "", note)
    return set(re.findall(r"\d[\d,.]*\d|\d", note))


def test_twins_agree():
    """What several sources state has one verdict, and the same numbers wherever there are some."""
    wrong = []
    for row in ROWS:
        for other in places(row["twin"]):
            twin = BY_ID[other]
            found = numbers(row["note"]), numbers(twin["note"])
            back = row["id"] in places(twin["twin"])
            differ = all(found) and found[0] != found[1]
            if not back or row["verdict"] != twin["verdict"] or differ:
                wrong.append((row["id"], other))
    assert wrong == []
    assert sum(bool(row["twin"]) for row in ROWS) > 200


# ------------------------------------------------------------------------------ names and links

ID = re.compile(
    r"(?<![\w./-])((?:2024|2025|expl|note|pack)-(?:[A-Z]{1,2}\d\w*|TB\w+|OB\w+))(?![\w-])"
)
# As "v1 eq. 21" or "v2-C30", which would be another document's.
PLACE = r"(?:eq\.|equation|§|Algorithm|Theorem|Figure|Table|[Aa]ppendix|App\.|section|Listing)"
ARXIVS = re.compile(rf"(?<![\w./-])v[12](?:'s|,)?\s+{PLACE}|(?<![\w.])v[12]-[A-Z]+\d")
PAPER_LINK = re.compile(r"(?:\[([^\]]+)\]\()?(https?://arxiv\.org/\w+/2408\.04093(?:v\d)?)")
TABLES = "*/*.tsv", "notebooks/ledger/*.tsv"
READ = ("*.md", "site/*.md", "site/*.py", "treeattn/*.py", "labs/*/*.py", "labs/*/*.md", *TABLES)


def test_ids_are_rows_and_the_paper_is_linked_where_it_says_what_is_cited():
    """Never arXiv's second version, which has neither Llama nor MI300X; texts by their names."""
    links = {mark: source["link"] for mark, source in SOURCES.items() if source["link"]}
    paths = [path for pattern in READ for path in REPOSITORY.glob(pattern)]
    for path in [*paths, *NOTEBOOKS]:
        code = [cell.source for cell in cells(path)] if path in NOTEBOOKS else []
        read = "\n".join([*code, text(path)])
        assert set(ID.findall(read)) <= set(BY_ID), path
        assert ARXIVS.search(read) is None, path
        for words, link in PAPER_LINK.findall(read):
            year = re.search("2024|2025", words)
            wanted = {links[year[0]]} if year else {"https://arxiv.org/abs/2408.04093"}
            wanted = set(links.values()) if path.name == "sources.tsv" else wanted
            assert link in wanted, (path, words, link)


# ------------------------------------------------------------------------ the tests and the places


@cache
def collected(file: str) -> set[str]:
    """The tests of a file that pytest collects, and that no decorator skips on every machine."""
    path = REPOSITORY / file
    if not (path.is_file() and path.name.startswith("test_")):
        return set()
    never = re.compile(r"pytest\.mark\.(skip|xfail)\b")
    functions = [x for x in ast.parse(text(path)).body if isinstance(x, ast.FunctionDef)]
    return {
        x.name for x in functions if not any(map(never.match, map(ast.unparse, x.decorator_list)))
    }


@cache
def sections(path) -> dict[str, str]:
    """What the cells below each heading print, by the tag of the heading's cell or the heading."""
    found, at = {}, ""
    named = {heading: tag for tag, heading in ledger.headings(path).items()}
    for cell in cells(path):
        for heading in re.findall(r"(?m)^##+ (.+)$", cell.source * (cell.cell_type == "markdown")):
            at = named.get(heading, heading)
            found[at] = ""
        outputs = cell.get("outputs", ())
        printed = [x.get("text") or x.get("data", {}).get("text/html", "") for x in outputs]
        found[at] = found.get(at, "") + "".join(printed)
    return found


# By the numbers of the main road, and by the others' names.
BY_NAME = {
    path.stem.partition("_")[0] if path in MAIN_ROAD else path.stem: path for path in NOTEBOOKS
}


def is_held(row: dict[str, str], test: str) -> bool:
    """A test is there. Or a notebook prints the row, or has it in a section that prints something;
    nbval and checks/test_reruns.py hold what it prints."""
    file, _, name = test.partition("::")
    if not file.endswith(".ipynb"):
        return name in collected(file)
    places_there = [place.partition(": ") for place in places(row["notebook"])]
    here = [tag for name, _, tag in places_there if REPOSITORY / file == BY_NAME[name]]
    found = sections(REPOSITORY / file)
    named = re.search(rf"(?m)^{row['id']} .*: True$", "".join(found.values()))
    return bool(named) or any(found.get(tag) for tag in here)


def test_every_test_exists():
    """But of what others did, which no test of this project can hold."""
    wrong = []
    for row in ROWS:
        others = row["verdict"] == "imprecise" and "arXiv:" in row["note"]
        if not row["test"] and row["verdict"] not in WITHOUT_A_TEST and not others:
            wrong.append(f"{row['id']}: no test")
        wrong += [f"{row['id']}: {x}" for x in places(row["test"]) if not is_held(row, x)]
    assert not wrong, f"no such test, or no section of the row that prints anything, for {wrong}"


def test_every_place_exists():
    """As "01: five-words": a notebook's number or name, and the tag of a heading's cell there."""
    wrong = []
    for row in ROWS:
        quotes = "test_ledger.py" in row["test"]  # nothing to explain but the words
        if not row["notebook"] and row["verdict"] not in WITHOUT_A_TEST and not quotes:
            wrong.append(f"{row['id']}: no place")
        for place in places(row["notebook"]):
            name, _, tag = place.partition(": ")
            if name not in BY_NAME or tag not in ledger.headings(BY_NAME[name]):
                wrong.append(f"{row['id']}: {place}")
    assert not wrong, f"no heading's cell has the tag ledger:…, or name another, for {wrong}"


def test_every_tag_is_named():
    """By a row; and no other cell of the notebook has it."""
    named = {place for row in ROWS for place in places(row["notebook"])}
    for name, path in BY_NAME.items():
        tags = [x for cell in cells(path) for x in cell.metadata.get("tags", ()) if "ledger:" in x]
        assert sorted(tags) == sorted(f"ledger:{tag}" for tag in ledger.headings(path)), path
        assert {f"{name}: {tag}" for tag in ledger.headings(path)} <= named, path


def read_and_printed(path, without: str = "") -> str:
    """A notebook's text and what its cells print, but for the cells that hold `without`."""
    found = []
    for cell in cells(path):
        data = [output.get("data", {}) for output in cell.get("outputs", ())]
        shown = [output.get("text", "") for output in cell.get("outputs", ())]
        shown += [x for one in data for x in (one.get("text/plain"), one.get("text/html")) if x]
        told = cell.source if cell.cell_type == "markdown" else ""
        here = " ".join("\n".join([told, *shown]).split())
        found.append("" if without and without in here else here)
    return "\n".join(found)


COQ = text(REPOSITORY / "notebooks" / "proofs" / "merge.v")


def proves(proof: str, coq: str = COQ, deleted: bool = False) -> bool:
    """Whether a proof is where the ledger says.

    As "merge.v: associative", a theorem; as a test; or as "02: z* = ∂F/∂ζ: True", with what the
    cell prints that computes the proof, or a sentence that says that it proves.
    """
    place, _, told = proof.partition(": ")
    if place == "merge.v":
        ends = rf"(?s)\b(?:Theorem|Lemma) {told} :.+?\bQed\."
        return bool(re.search(ends, coq)) and not re.search(r"\b(admit|Admitted|Axiom)\b", coq)
    if "::" in proof:
        file, _, name = proof.partition("::")
        return name in collected(file)
    told = " ".join(told.split())
    return told in read_and_printed(BY_NAME[place], told if deleted else "")


PROOFS = sorted({proof for row in ROWS for proof in places(row["proof"])})


def test_what_is_proved_names_a_proof():
    """Nothing else does; a numerical test alone proves nothing."""
    assert [row["id"] for row in ROWS if bool(row["proof"]) != (row["verdict"] == "proved")] == []
    gone = [proof for proof in PROOFS if not proves(proof)]
    rows = {row["id"]: x for row in ROWS for x in places(row["proof"]) if x in gone}
    assert not rows, f"no such proof: name another in notebooks/ledger for {rows}"


def test_a_deleted_proof_is_noticed():
    in_notebooks = [x for x in PROOFS if "::" not in x and not x.startswith("merge.v")]
    assert len(in_notebooks) > 10
    assert [proof for proof in in_notebooks if proves(proof, deleted=True)] == []
    assert not proves("merge.v: associative", COQ.replace("Theorem associative", "Theorem other"))
    assert not proves("merge.v: mass_adds", COQ.replace("Qed.", "Admitted."))
    assert not proves("checks/test_theory.py::test_that_is_not_there")


def test_what_notebook_10_runs_is_in_the_ledger():
    code = "\n".join(cell.source for cell in cells(MAIN_ROAD[10]))
    asked = [id for ids in re.findall(r'\blive\(\s*"([^"]+)"', code) for id in ids.split()]
    printed = "".join(sections(MAIN_ROAD[10]).values())
    assert len(asked) > 20 and set(asked) <= set(BY_ID)
    assert [id for id in asked if not re.search(rf"(?m)^{id} .*: True$", printed)] == []
