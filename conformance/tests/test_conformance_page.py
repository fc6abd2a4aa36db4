"""conformance/README.md is short, and its programs run as they stand."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import table

PAGE = Path(__file__).parent.parent / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = re.findall(r"(?s)\n(\w+):\n\n```python\n(.*?)```", TEXT)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("framework", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_a_program_of_the_page_runs_as_it_stands(framework, program):
    if framework == "PyTorch":
        pytest.importorskip("torch")
    with contextlib.redirect_stdout(io.StringIO()) as said, np.errstate(all="ignore"):
        exec(program, {})
    lines = said.getvalue().splitlines()
    expected = {
        "PyTorch": {"one query, d = 256       passed", "lengths                  skipped"},
        "JAX": set(re.search(r"The last one prints\n\n```\n(.*?)```", TEXT, re.S)[1].splitlines()),
    }[framework]
    for line in expected - {"…"}:
        assert any(x.startswith(line) for x in lines), said.getvalue()


def test_the_table_of_faults_counts_what_is_there():
    """`table.py` writes these rows, and finds whether each fault is seen and has its name."""
    alive = sum(table.ALIVE.values())
    public = list(table.met_in_public())
    planted = list(table.planted())
    mutants = list(table.dead_mutants())
    for faults, same, wrongly in ((public, 0, 0), (planted, 0, 0), (mutants, alive, 2)):
        every = len(faults) - same
        named = sum(bool(fault.names) for fault in faults)
        row = f"| {every} | {every} | {named} | {every - named - wrongly} | {wrongly} |"
        assert row in TEXT, row


def test_there_are_two_programs():
    assert [name for name, _ in PROGRAMS] == ["PyTorch", "JAX"]


def test_the_page_is_short():
    assert len(TEXT.split()) <= 900
