"""Points for a notebook that a student has worked through."""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from course.verdict import RECORD

FOLDER = Path(__file__).resolve().parents[1]  # of the notebooks, in which their kernels run
TASKS = {  # number of a chapter -> its task, and points
    "00": ("check_merge", 2),
    "02": ("check_derivation", 2),
    "03": ("check_loop", 2),
    "04": ("check_reduction", 2),
    "05": ("check_algorithm_3", 3),
    "07": ("check_prefix_tree", 3),
    "09": ("check_rule", 2),
}


def chapter(path: Path, notebook) -> str | None:
    """The number in the notebook's title; in its file's name if it has lost its title."""
    first = "".join(cell.source for cell in notebook.cells[:1])
    found = re.match(r"# (\d\d) ·", first) or re.match(r"(\d\d)_", path.name)
    return found and found[1]


def verdicts(notebook, seconds: int) -> dict[str, tuple[bool, str]]:
    """The last verdict of each check, when all cells run anew; cells that fail are passed over."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "verdicts")
        record.touch()
        client = NotebookClient(
            notebook,
            timeout=seconds,
            interrupt_on_timeout=True,
            allow_errors=True,
            resources={"metadata": {"path": str(FOLDER)}},
        )
        client.execute(env={**os.environ, RECORD: str(record)})
        lines = record.read_text(encoding="utf-8").splitlines()
    return {name: (right, sentence) for name, right, sentence in map(json.loads, lines)}


def grade(path: Path, seconds: int = 300) -> tuple[int, int, str]:
    """(points, of how many, what the verdict says)"""
    notebook = nbformat.read(path, as_version=4)
    task, points = TASKS.get(chapter(path, notebook), (None, 0))
    if task is None:
        return 0, 0, "no task: its title is not one of a chapter with a check"
    right, sentence = verdicts(notebook, seconds).get(task, (False, f"{task} was never asked"))
    return points * right, points, sentence.partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "grade", help="run notebooks, which is to run their authors' code, and print points"
    )
    command.add_argument("notebooks", type=Path, nargs="+")
    command.add_argument("--seconds", type=int, default=300, help="for a cell; 300 if left out")
    args = parser.parse_args()
    graded = [(path, grade(path, args.seconds)) for path in args.notebooks]
    for path, (points, full, sentence) in graded:
        print(f"{points} of {full}  {path.name}: {sentence}")
    total, full = (sum(found[i] for _, found in graded) for i in (0, 1))
    print(f"{total} of {full}  in all")
