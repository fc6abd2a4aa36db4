"""What nbval does not notice: cells never executed, stored errors, notebooks too large to show."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param, json.loads(request.param.read_text(encoding="utf-8"))


def code_cells(content) -> list[dict]:
    return [
        c for c in content["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()
    ]


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_every_cell_was_executed_in_order(notebook):
    """nbval lets a cell pass that has neither an output nor an execution count."""
    _, content = notebook
    counts = [cell["execution_count"] for cell in code_cells(content)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_stored_errors_or_warnings(notebook):
    _, content = notebook
    for cell in code_cells(content):
        for output in cell["outputs"]:
            assert output.get("name") != "stderr", "".join(output["text"])
            if output["output_type"] == "error":
                assert "raises-exception" in cell["metadata"].get("tags", ())


def test_no_stored_text_that_changes_between_runs(notebook):
    _, content = notebook
    for cell in code_cells(content):
        if "nbval-ignore-output" in cell["metadata"].get("tags", ()):
            continue
        for output in cell["outputs"]:
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            found = re.search(r"\bat 0x[0-9a-f]+|/home/|/tmp/|/work/", "".join(text))
            assert not found, found


def test_it_is_pleasant_to_read(notebook):
    path, content = notebook
    assert path.stat().st_size < 500_000
    lines = [
        sum(bool(line.strip()) for line in "".join(cell["source"]).splitlines())
        for cell in code_cells(content)
    ]
    assert max(lines) <= 25 and median(lines) < 8
    assert content["cells"][0]["cell_type"] == "markdown"
    assert "Exercises" in "".join("".join(c["source"]) for c in content["cells"][-3:])
