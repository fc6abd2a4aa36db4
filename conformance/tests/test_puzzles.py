"""The puzzles: solutions pass, attempts are named, and pictures stand what comes."""

import ast
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

import puzzles
from treeattn_conformance import bfloat16

NOTEBOOK = Path(__file__).parent.parent / "puzzles.ipynb"
MISTAKES = {
    "merge": "lse + block_lse",
    "identity": "no keys as lse 0",
    "scan": "a chain",
    "pack": "one node for two prefixes",
    "mask": "causal mask",
    "acceptance": "residual is the target",
    "wire": "lse in bfloat16",
    "batch": "pivot of other rows",
}
# The names under which the notebook and the solutions have them.
FUNCTIONS = {name: (name,) for name in MISTAKES}
FUNCTIONS |= {"acceptance": ("accept",), "wire": ("encode", "decode"), "batch": ("merge_batch",)}


def attempts() -> dict:
    """The functions that stand in the notebook."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names = {"np": np, "bfloat16": bfloat16}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "def " in source:
            ast.parse(source)
            exec(source, names)
    return names


def solutions() -> dict:
    return vars(importlib.import_module("puzzles.solutions"))


def mark(puzzle: str, functions: dict):
    return getattr(puzzles, puzzle)(*(functions[name] for name in FUNCTIONS[puzzle]))


@pytest.mark.parametrize("puzzle", MISTAKES)
def test_solutions_pass(puzzle):
    marked = mark(puzzle, solutions())
    assert marked.passed, str(marked)
    assert marked.figure.alt.endswith("Verdict: passed. ".strip())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("puzzle", MISTAKES)
def test_the_attempts_are_named(puzzle):
    marked = mark(puzzle, attempts())
    assert not marked.passed
    assert f": {MISTAKES[puzzle]}." in marked.figure.alt
    data, metadata = marked._repr_mimebundle_()
    assert data["text/plain"] == str(marked.report) and metadata["image/png"]["alt"]


@pytest.mark.parametrize("puzzle", MISTAKES)
def test_what_raises_is_said_in_the_picture(puzzle):
    def fails(*_):
        raise ZeroDivisionError("not written yet")

    marked = getattr(puzzles, puzzle)(*[fails] * len(FUNCTIONS[puzzle]))
    assert not marked.passed
    assert "not written yet" in marked.figure.alt
    said = [text.get_text() for ax in marked.figure.axes for text in ax.texts]
    assert any("not written yet" in text for text in said)


def test_a_tree_larger_than_its_prefixes_is_not_packed():
    def side_by_side(rows):
        tokens = [token for row in rows for token in row]
        parents = [
            n - 1 if i else -1 for n, i in enumerate(i for row in rows for i in range(len(row)))
        ]
        paths = np.split(np.arange(len(tokens)), np.cumsum([len(row) for row in rows])[:-1])
        return tokens, parents, paths

    marked = puzzles.pack(side_by_side)
    assert marked.report.names("failed") == ["size"]
    assert "13 nodes, where the rows have 8 distinct prefixes" in marked.figure.alt


def test_a_message_of_32_bits_is_too_long():
    def encode(out, lse):
        return np.concatenate([np.float32(out), lse[..., None], lse[..., None]], axis=-1)

    marked = puzzles.wire(encode, lambda message: (message[..., :-2], message[..., -1]))
    assert "expected 16 bits" in marked.figure.alt
