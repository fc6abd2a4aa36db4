"""Each part of the suite can be read alone: it imports only its own files and the common ones."""

import re
from pathlib import Path

import pytest

import treeattn_conformance

PACKAGE = Path(treeattn_conformance.__file__).parent
COMMON = {"judge", "report", "reference"}
PARTS = {
    "merge, attention": {"forward", "pairs", "signs", "merge_mistakes", "kernel_mistakes"},
    "gradients": {"gradients", "pairs"},
    "tree": {"trees"},
    "verifier": {"verifying", "outcomes", "steps"},
}


def imported(file: str) -> set[str]:
    """The files of the package that this one imports."""
    text = (PACKAGE / f"{file}.py").read_text(encoding="utf-8")
    return set(re.findall(r"^from \.(\w+) import", text, re.M))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_stands_alone(part):
    known = PARTS[part] | COMMON
    for file in PARTS[part]:
        assert imported(file) <= known, file


def test_every_file_is_of_a_part():
    files = {path.stem: path for path in PACKAGE.glob("*.py")}
    assert set(files) == COMMON.union(*PARTS.values()) | {"__init__", "__main__"}
    for name in set(files) - {"__init__", "__main__"}:
        assert re.search(rf"\b{name}\b", treeattn_conformance.__doc__), name


def test_what_is_public_fits_in_a_hand():
    assert len(treeattn_conformance.__all__) == 14
    assert all(getattr(treeattn_conformance, name).__doc__ for name in treeattn_conformance.__all__)
