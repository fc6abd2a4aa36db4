"""The README is short, each block runs alone and all in order, and what it names is there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from readme_blocks import BETWEEN, README, blocks, run

REPOSITORY = README.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
TEXT = README.read_text(encoding="utf-8")


def test_a_reader_finishes_it():
    assert len(TEXT.split()) <= 1200
    assert len(blocks()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.section)
def test_a_block_runs_alone(block):
    assert run(block.code) == block.prints != ""


@pytest.mark.slow
def test_all_blocks_run_in_order_in_one_process():
    between = f"\nprint({BETWEEN!r})\n"
    printed = run(between.join(block.code for block in blocks()))
    assert printed.split(f"{BETWEEN}\n") == [block.prints for block in blocks()]


@pytest.mark.slow
def test_the_command_that_generates_text():
    (command, answer) = re.search(r"\$ \.venv/bin/python (.*)\n(.*)\n", TEXT).groups()
    words = [sys.executable, *shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == answer


def test_the_make_targets_are_there():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)\b(?= |`|$)", TEXT))
    assert {"run", "test", "lab", "site"} <= targets
    assert {target for target in targets if not re.search(rf"(?m)^{target}:", makefile)} == set()


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT):
        path, _, place = target.partition("#")
        if not re.match(r"https?:", target):
            assert (REPOSITORY / path).exists(), target
        if place and not path:
            headings = re.findall(r"(?m)^## (.+)$", TEXT)
            assert place in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_every_notebook_of_the_main_road_is_listed():
    listed = re.findall(r"(?m)^- \[\d\d [^\]]+\]\(([^)]+)\): ", TEXT)
    there = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
    assert listed == [str(path.relative_to(REPOSITORY)) for path in there]


def test_the_numbers_are_those_that_were_measured():
    rows = json.loads((RESULTS / "decode.json").read_text(encoding="utf-8"))
    tree, ring = (
        next(r for r in rows if (r["name"], r["p"], r["keys"]) == (name, 8, 512 * 1024))
        for name in ("tree, allreduce", "ring")
    )
    ratio, per_ring, per_tree = re.search(
        r"ring takes (\d+) times.*?sends ([\d,]+)\s+bytes instead of ([\d,]+)", TEXT, re.DOTALL
    ).groups()
    assert int(ratio) == round(ring["ms"] / tree["ms"])
    assert (per_ring, per_tree) == (f"{ring['sent']:,}", f"{tree['sent']:,}")
    table = (RESULTS / "local_attention.md").read_text(encoding="utf-8")
    row = next(line for line in table.splitlines() if line.startswith("| 64k, MHA, float32 "))
    ours, _, theirs = (float(cell) for cell in row.split("|")[2:5])
    assert float(re.search(r"takes (0\.\d+) of the time", TEXT)[1]) == round(ours / theirs, 2)


def test_the_page_of_benchmarks_has_the_numbers_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import page

    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text and text.count("<!-- end -->") == len(page.TABLES)


def test_the_folders_are_those_of_the_map():
    """CONTRIBUTING.md shows every folder of ours."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?m)^\| `([\w/]+)/`", text))
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").replace("/", "").split()
    there = {
        path.name
        for path in REPOSITORY.iterdir()
        if path.is_dir() and not any(map(path.match, (".*", *ignored)))
    }
    there |= {f"labs/{path.parent.name}" for path in (REPOSITORY / "labs").glob("*/README.md")}
    shown_now = {place for place in shown if place.count("/") == place.startswith("labs/")}
    assert there - {"labs"} == shown_now, "the table of CONTRIBUTING.md has a row for each folder"
    for place in shown:
        assert Path(REPOSITORY / place).is_dir()
