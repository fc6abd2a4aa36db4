"""Notebooks run as people run them: once through, and an earlier cell again after later ones.

Nothing may raise, and every cell shows each time what is stored: for `make test-all` these are the
notebooks' only runs. At the end the solutions run that a notebook's text has.
"""

import copy
import importlib.util
import re
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbval.plugin import coalesce_streams
from pages import NOTEBOOKS, text

PINNED = importlib.util.find_spec("flash_attn_jax")  # not imported: it may lack libcudart
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PINNED, reason="notebooks are run with requirements.txt's releases"),
]


def shown(outputs) -> list[str]:
    """What a reader sees, but for pictures, and for XLA's log, to which eight simulated devices
    write when they wait for a busy processor."""
    found = []
    for output in coalesce_streams(copy.deepcopy(outputs)):  # however a text was cut
        printed = output.get("text") or output.get("evalue", "")
        log = output.get("name") == "stderr" and re.search(r"(?m)^[IWEF]\d{4} ", printed)
        data = output.get("data") or ({} if log else {"text": printed})
        found += [data[kind] for kind in sorted(data) if not kind.startswith("image/")]
    return found


def solutions(path: Path) -> list:
    """The code in the folded answers of a notebook's text, as cells."""
    folded = "\n".join(re.findall(r"(?s)<details>.*?</details>", text(path)))
    blocks = re.findall(r"(?sm)^ *```python\n(.*?)```", folded)
    return [nbformat.v4.new_code_cell(textwrap.dedent(block)) for block in blocks]


def faults(path: Path) -> list[str]:
    """All cells in their order, then all once more from the last one up. So each cell runs again
    while the cells before it have not, and meets the names that later cells have bound."""
    notebook = nbformat.read(path, as_version=4)
    stored = [c for c in enumerate(notebook.cells) if c[1].cell_type == "code" and c[1].source]
    order = stored + stored[::-1]
    notebook.cells = [*(copy.deepcopy(cell) for _, cell in order), *solutions(path)]
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
    for turn, ((number, cell), ran) in enumerate(zip(order, notebook.cells, strict=False)):
        when = "again" if turn >= len(stored) else "first"
        tags = cell.metadata.get("tags", ())
        errors = [x for x in ran.outputs if x.output_type == "error"]
        if errors and "raises-exception" not in tags:
            found.append(f"{when}, [{number}] {errors[0].ename}: {errors[0].evalue}")
        elif "nbval-ignore-output" not in tags and shown(ran.outputs) != shown(cell.outputs):
            found.append(f"{when}, [{number}] {shown(ran.outputs)}\nstored: {shown(cell.outputs)}")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_again(path):
    found = faults(path)
    assert not found, "\n".join(found)
