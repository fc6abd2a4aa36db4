"""The README is short, each block runs alone and all in order, and what pages name is there."""

import json
import re
import shlex
import sys
from urllib.parse import unquote

import pytest
from pages import LINK, MAIN_ROAD, NOTEBOOKS, README, REPOSITORY, SITE, blocks, run, run_code, text

RESULTS = REPOSITORY / "benchmarks" / "results"
TEXT = text(README)
BETWEEN = "-- the next block --\n"


def test_a_reader_finishes_it():
    assert len(TEXT.split()) <= 1200
    assert len(blocks()) == 5


RUN = [README, *sorted(SITE.glob("howto_*.md")), SITE / "why_not_jax.md"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [block for page in RUN for block in blocks(page)],
    ids=lambda block: block.section,
)
def test_a_block_runs_alone(block):
    assert run_code(block.code) == block.prints != ""


@pytest.mark.slow
def test_all_blocks_run_in_order_in_one_process():
    """But for the first, which has one device: the others simulate eight."""
    later = blocks()[1:]
    printed = run_code(f"\nprint({BETWEEN!r}, end='')\n".join(block.code for block in later))
    assert printed.split(BETWEEN) == [block.prints for block in later]


@pytest.mark.slow
def test_the_command_that_generates_text():
    (command, answer) = re.search(r"\$ \.venv/bin/python (.*)\n(.*)\n", TEXT).groups()
    assert run(sys.executable, *shlex.split(command)).strip() == answer


def test_the_make_targets_are_there():
    makefile = text(REPOSITORY / "Makefile")
    targets = set(re.findall(r"\bmake ([a-z-]+)\b(?= |`|$)", TEXT))
    assert {"run", "test", "lab", "site"} <= targets
    assert {target for target in targets if not re.search(rf"(?m)^{target}:", makefile)} == set()


PAGES = [page for top in (".", "*", "labs/*") for page in REPOSITORY.glob(f"{top}/*.md")]
MADE = {SITE / "ledger.md"}  # by the site's build


def slug(heading: str) -> str:
    """A heading's place in a page, without capitals and signs: viewers differ in these."""
    return re.sub(r"[^-\w ]", "", unquote(heading)).replace(" ", "-").lower()


def places(page) -> set[str]:
    """The headings and anchors of a page or a notebook, as slugs."""
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text(page))
    headings = re.findall(r"(?m)^#+ (.+)$", without_links)
    return {slug(x) for x in [*headings, *re.findall(r'id="([^"]+)"', text(page))]}


@pytest.mark.parametrize("page", sorted({*PAGES, *NOTEBOOKS}), ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for _, _, target in LINK.findall(text(page)):
        path, _, place = target.partition("#")
        to = page.parent / path if path else page
        if re.match(r"\w+:", target) or to in MADE:
            continue
        assert to.exists(), target
        if to.suffix in (".md", ".ipynb") and not re.match(r"(treeattn.*)?$", place):
            assert slug(place) in places(to), f"{page.name}: {target} names no heading"


def test_every_notebook_of_the_main_road_is_listed():
    listed = re.findall(r"(?m)^- \[(\d\d) [^\]]+\]\(notebooks/(\1_[^)]+)\)$", TEXT)
    assert [REPOSITORY / "notebooks" / name for _, name in listed] == MAIN_ROAD


def test_the_numbers_are_those_that_were_measured():
    rows = json.loads(text(RESULTS / "decode.json"))
    tree, ring = (
        next(r for r in rows if (r["name"], r["p"], r["keys"]) == (name, 8, 512 * 1024))
        for name in ("tree, allreduce", "ring")
    )
    ratio, per_ring, per_tree = re.search(
        r"ring takes (\d+) times.*?sends ([\d,]+)\s+bytes instead of ([\d,]+)", TEXT, re.DOTALL
    ).groups()
    assert int(ratio) == round(ring["ms"] / tree["ms"])
    assert (per_ring, per_tree) == (f"{ring['sent']:,}", f"{tree['sent']:,}")
    table = text(RESULTS / "local_attention.md")
    row = next(line for line in table.splitlines() if line.startswith("| 64k, MHA, float32 "))
    theirs = [float(cell.split()[0]) for cell in row.split("|")[5:7]]  # over our time
    said = re.search(
        r"takes ([\d.]+) times as long as PyTorch.*?same\sarrays,\sand\s([\d.]+)\s", TEXT, re.DOTALL
    )
    assert [float(ratio) for ratio in said.groups()] == [round(1 / x, 2) for x in theirs]


def test_the_page_of_benchmarks_has_the_numbers_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import page

    stored = text(page.PAGE)
    assert page.filled(stored) == stored and stored.count("<!-- end -->") == len(page.TABLES)


def test_the_folders_are_those_of_the_map():
    """The keepers' page shows every folder of ours, and each lab."""
    shown = re.findall(r"(?m)^\| `([\w/]+)/`", text(REPOSITORY / "checks" / "README.md"))
    assert [place for place in shown if not (REPOSITORY / place).is_dir()] == []
    ignored = (".*", *text(REPOSITORY / ".gitignore").replace("/", "").split())
    tops = [path for path in REPOSITORY.iterdir() if path.is_dir()]
    there = {path.name for path in tops if not any(map(path.match, ignored))} - {"labs"}
    there |= {f"labs/{path.parent.name}" for path in REPOSITORY.glob("labs/*/README.md")}
    assert there <= set(shown), "the table of checks/README.md has a row for each folder"
