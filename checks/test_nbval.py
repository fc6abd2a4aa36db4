"""Notebooks against their stored outputs, by the commands that users of nbval type."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DEEPER, MAIN_ROAD, NOTEBOOKS, REPOSITORY, cells, run
from test_notebooks import test_each_prediction_has_a_folded_output as predictions_are_folded
from test_notebooks import test_what_is_stored as stored_as_it_should_be
from test_reruns import shown

PYTEST = Path(sys.executable).with_name("pytest")
LEDGER = MAIN_ROAD[10]


def typed(command: str) -> str:
    """What `pytest …` prints from this folder, without what this process was told."""
    told = re.compile("PYTEST_|COV_|JAX_|XLA_")
    own = {name: value for name, value in os.environ.items() if not told.match(name)}
    words = [PYTEST, *command.split()]
    done = subprocess.run(
        words, cwd=REPOSITORY, env=own, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def code_cells(*paths: Path) -> int:
    return sum(cell.cell_type == "code" for path in paths for cell in cells(path))


def test_every_cell_is_found():
    found = typed("--nbval notebooks labs --collect-only -q")
    assert len(re.findall(r"(?m)\.ipynb::Cell \d+$", found)) == code_cells(*NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--nbval", "--nbval-lax", "--nbval --nbval-current-env", "--nbval -n 2"]
)
def test_cells_pass(options):
    """With two processes as well: cells of one notebook share a kernel, so they stay together."""
    notebooks = (LEDGER, DEEPER[0]) if "-n" in options else (LEDGER,)
    names = " ".join(str(path.relative_to(REPOSITORY)) for path in notebooks)
    assert f"{code_cells(*notebooks)} passed" in typed(f"{options} {names}")


@pytest.mark.slow
def test_a_notebook_that_nbconvert_has_run_passes_its_tests(tmp_path):
    path = MAIN_ROAD[1]
    options = f"--log-level=ERROR --execute --to notebook --output-dir {tmp_path}".split()
    run(PYTEST.with_name("jupyter"), "nbconvert", *options, path)
    executed = tmp_path / path.name
    stored_as_it_should_be(executed)
    predictions_are_folded(executed)
    for was, now in zip(cells(path), cells(executed), strict=True):
        same = shown(was.get("outputs", ())) == shown(now.get("outputs", ()))
        assert same or "nbval-ignore-output" in was.metadata.get("tags", ()), now.source
