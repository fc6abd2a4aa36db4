"""The grader runs a student's notebook, and gives points for its last verdict."""

import nbformat
import pytest
from pages import MAIN_ROAD, REPOSITORY, run, text

from course.grade import TASKS, grade

RIGHT = "def mine(states, op):\n    return reduce_tree(states, op)\n"
WRONG = "def mine(states, op):\n    return states[0]\n"


def written(folder, *codes, title="# 04 · The associative merge"):
    """A student's notebook."""
    cells = [nbformat.v4.new_markdown_cell(title)] if title else []
    first = "from course import check_reduction\nfrom course.solutions import reduce_tree"
    cells += [nbformat.v4.new_code_cell(code) for code in (first, *codes)]
    path = folder / "04_mine.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    ("codes", "found"),
    [
        ((WRONG, "check_reduction(mine)", RIGHT, "check_reduction(mine)"), (2, 2, "right")),
        ((WRONG, "check_reduction(mine)"), (0, 2, "a state is left out, for ab")),
        ((RIGHT, "1 / 0", "check_reduction(mine)"), (2, 2, "right")),  # a cell before it fails
        ((RIGHT,), (0, 2, "check_reduction was never asked")),
        (("def mine(:", "check_reduction(mine)"), (0, 2, "check_reduction was never asked")),
        ((RIGHT, "while True:\n    pass", "check_reduction(mine)"), (2, 2, "right")),
    ],
)
def test_points(tmp_path, codes, found):
    assert grade(written(tmp_path, *codes), seconds=20) == found


def test_a_notebook_without_its_title_or_without_a_task(tmp_path):
    assert grade(written(tmp_path, RIGHT, "check_reduction(mine)", title=""))[0] == 2
    points, full, sentence = grade(written(tmp_path, RIGHT, title="# 01 · The energy function"))
    assert (points, full) == (0, 0) and sentence.startswith("no task")


@pytest.mark.slow
def test_a_chapter_as_it_is_earns_nothing_and_with_a_solution_its_points(tmp_path):
    """By the command, from the folder above the notebooks."""
    (chapter,) = (path for path in MAIN_ROAD if path.name.startswith("00"))
    solved = nbformat.read(chapter, as_version=4)
    (task,) = (i for i, cell in enumerate(solved.cells) if "check(mine)" in cell.source)
    solution = "from course.solutions import merge as mine"
    solved.cells[task].source = f"{solution}\n\nverdict = check(mine)\nverdict"
    nbformat.write(solved, tmp_path / "solved.ipynb")
    command = ".venv/bin/python", "notebooks/course", "grade", chapter, tmp_path / "solved.ipynb"
    first, second, total = run(*command).splitlines()
    assert first == f"0 of 2  {chapter.name}: d is not brought to the larger m"
    assert second == "2 of 2  solved.ipynb: right" and total == "2 of 4  in all"


def test_every_task_is_asked_in_its_chapter_and_named_in_the_seminar():
    seminar = text(REPOSITORY / "site" / "seminar.md")
    for number, (check, points) in TASKS.items():
        (path,) = (path for path in MAIN_ROAD if path.name.startswith(number))
        assert check in path.read_text(encoding="utf-8"), number
        assert f"| {number} | `{check}` | {points} |" in seminar
