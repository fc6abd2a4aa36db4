"""What a type checker knows of the package: mypy, asked about every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import treeattn

pytest.importorskip("mypy")

ROOT = Path(treeattn.__file__).parent.parent
# An array of any dtype, and a function of any arguments: of these alone nothing more is known.
UNKNOWN = ("numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]", "(def (*Any, **Any) -> Any)")

MISTAKES = """
import jax.numpy as jnp
import treeattn

x = jnp.ones((1, 2, 2, 4))
treeattn.attention(x, x, x, kv_lengths=None)
treeattn.attention(x, x, x, masks=None)  # wrong
treeattn.tree_decode(x, x, x, sharding="kv")  # wrong
treeattn.merge(x, x)  # wrong
treeattn.memory("no program")  # wrong
treeattn.pack(x).packed_beam
treeattn.pack(x).packed  # wrong
treeattn.kv_mesh(heads="two")  # wrong
treeattn.tree_decod  # wrong
"""


NAMES = [*treeattn.__all__, "AttentionState.identity"]
QUESTIONS = "\n".join(["import treeattn", *(f"reveal_type(treeattn.{name})" for name in NAMES)])


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What mypy says of the questions, and of the mistakes."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "questions.py").write_text(QUESTIONS, encoding="utf-8")
    (folder / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--follow-imports", "silent", "--no-error-summary"]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / "build" / "mypy"), "questions.py", "mistakes.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_no_public_name_returns_anything(lines):
    found = [re.search(r'^questions.*Revealed type is "(.*)"$', line) for line in lines]
    found = [line[1] for line in found if line]
    for name, known in zip(NAMES, found, strict=True):
        for unknown in UNKNOWN:
            known = known.replace(unknown, "")
        returned = known.partition(") -> ")[2]  # nothing where it returns None
        assert "Any" not in returned, f"{name}: {known}"


@pytest.mark.slow
def test_a_checker_sees_mistakes(lines):
    found = {int(line.split(":")[1]) for line in lines if re.match(r"mistakes.* error: ", line)}
    assert found == {n for n, line in enumerate(MISTAKES.splitlines(), 1) if "  # wrong" in line}


def test_the_package_says_that_it_has_types():
    assert (ROOT / "treeattn" / "py.typed").exists()
