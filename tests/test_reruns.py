"""Notebooks run as people run them: a cell again, and an earlier one after all that come later.

Nothing may raise, and every cell prints each time what is stored. At the end the solutions run
that a notebook's text has.
"""

import copy
import importlib.util
import re
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PINNED = importlib.util.find_spec("flash_attn_jax")  # not imported: it may lack libcudart
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PINNED, reason="notebooks are run with requirements.txt's releases"),
]

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("notebooks", "notebooks/deeper", "labs/*")
NOTEBOOKS = sorted(path for folder in FOLDERS for path in REPOSITORY.glob(f"{folder}/*.ipynb"))


def text(outputs) -> str:
    """What a cell printed and showed: without its pictures, and what XLA may write to stderr where
    eight simulated devices wait for a busy processor."""
    outputs = [output for output in outputs if output.get("name") != "stderr"]
    shown = [output.get("text") or output.get("data", {}).get("text/plain") for output in outputs]
    return "".join("" if x is None or x.startswith("<Figure") else x for x in shown)


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def solutions(notebook) -> list:
    """The code in the folded answers of a notebook's text, as cells."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    folded = "\n".join(re.findall(r"<details>.*?</details>", text, re.DOTALL))
    blocks = re.findall(r"^ *```python\n(.*?)```", folded, re.DOTALL | re.MULTILINE)
    return [nbformat.v4.new_code_cell(textwrap.dedent(block)) for block in blocks]


def faults(path: Path) -> list[str]:
    """Each cell twice in a row; then all once more, from the last one up: so each of them meets
    the names that later ones have bound."""
    notebook = nbformat.read(path, as_version=4)
    stored = [c for c in enumerate(notebook.cells) if c[1].cell_type == "code" and c[1].source]
    twice = [("at once", *pair) for pair in stored for _ in range(2)]
    order = [*twice, *(("after later ones", *pair) for pair in stored[::-1])]
    answers = solutions(notebook)
    notebook.cells = [*(copy.deepcopy(cell) for _, _, cell in order), *answers]
    kernel = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        allow_errors=True,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    kernel.execute()
    found = []
    for answer in notebook.cells[len(order) :]:
        found += [f"a solution, {x.ename}: {x.evalue}" for x in answer.outputs if "ename" in x]
    for (when, number, cell), ran in zip(order, notebook.cells, strict=False):
        errors = [x for x in ran.outputs if x.output_type == "error"]
        if errors and "raises-exception" not in tags(cell):
            found.append(f"{when}, [{number}] {errors[0].ename}: {errors[0].evalue}")
        elif "nbval-ignore-output" not in tags(cell) and text(ran.outputs) != text(cell.outputs):
            found.append(f"{when}, [{number}] {text(ran.outputs)}\nstored: {text(cell.outputs)}")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_again(path):
    found = faults(path)
    assert not found, "\n".join(found)


def test_a_solution_that_fails_is_found(tmp_path):
    answer = "<details><summary>Solution</summary>\n\n```python\nx / 0\n```\n</details>"
    cells = [nbformat.v4.new_code_cell("x = 1"), nbformat.v4.new_markdown_cell(answer)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    (found,) = faults(tmp_path / "a.ipynb")
    assert found.startswith("a solution, ZeroDivisionError")
