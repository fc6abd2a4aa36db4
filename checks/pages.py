"""Notebooks and pages as readers get them: text, code and links; and a Python that runs code."""

import doctest
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nbformat

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
SITE = REPOSITORY / "site"
MAIN_ROAD = sorted(REPOSITORY.glob("notebooks/*.ipynb"))
DEEPER = sorted(REPOSITORY.glob("notebooks/deeper/*.ipynb"))
NOTEBOOKS = [*MAIN_ROAD, *DEEPER, *sorted(REPOSITORY.glob("labs/*/*.ipynb"))]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")  # "!" before a picture, words, target


@cache
def cells(path: Path) -> list[nbformat.NotebookNode]:
    return nbformat.read(path, as_version=4).cells


def text(path: Path) -> str:
    """Of a page, or of all Markdown cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    return "\n\n".join(cell.source for cell in cells(path) if cell.cell_type == "markdown")


class Block(NamedTuple):
    section: str  # the heading above it
    code: str
    prints: str  # the block of plain text that follows it; empty if there is none


def blocks(page: Path = README) -> list[Block]:
    """The Python in a text, without the prompts and answers of an interactive session."""
    found = []
    for part in re.split(r"(?m)^#+ ", text(page)):
        for code, prints in re.findall(r"(?s)```python\n(.*?)```(?:\n\n```\n(.*?)```)?", part):
            typed = "".join(x.source for x in doctest.DocTestParser().get_examples(code))
            found.append(Block(part.partition("\n")[0], typed or code, prints))
    return found


def codes(path: Path) -> Iterator[str]:
    """All Python in a module, a notebook or a page."""
    if path.suffix == ".py":
        yield text(path)
        return
    yield from (block.code for block in blocks(path))
    if path.suffix == ".ipynb":
        yield from (cell.source for cell in cells(path) if cell.cell_type == "code")


def run(*command: object, cwd: Path = REPOSITORY) -> str:
    """What a command prints that ends well."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_code(code: str, *python: object, cwd: Path = REPOSITORY) -> str:
    """What a process of its own prints that runs this code, by this Python or another command."""
    return run(*(python or (sys.executable,)), "-c", code, cwd=cwd)
