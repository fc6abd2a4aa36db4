"""What a type checker knows of the package: mypy, asked about every public name."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_docs import FUNCTIONS, examples

import treeattn

pytest.importorskip("mypy")

ROOT = Path(treeattn.__file__).parent.parent
# An array of any dtype, and a function of any arguments: of these alone nothing more is known.
UNKNOWN = (
    "numpy.integer[Any]",
    "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]",
    "(def (*Any, **Any) -> object)",
)

MISTAKES = """
import jax.numpy as jnp
import treeattn

x = jnp.ones((1, 2, 2, 4))
treeattn.attention(x, x, x, kv_lengths=None)
treeattn.attention(x, x, x, masks=None)  # wrong
treeattn.tree_decode(x, x, x, sharding="kv")  # wrong
treeattn.ring_attention(x, x, x, return_lses=True)  # wrong
treeattn.merge(x, x)  # wrong
treeattn.pack(x).packed_beam
treeattn.pack(x).packed  # wrong
treeattn.kv_mesh(heads="two")  # wrong
treeattn.tree_decod  # wrong
"""


# With return_lse they return two arrays instead of one. `Array | Any` fits both: an array as it is,
# two as `out, lse = …`.
ONE_OR_TWO = {"tree_decode", "ring_decode", "ring_attention", "ulysses_attention"}
NAMES = [*FUNCTIONS, "AttentionState.identity"]
QUESTIONS = "\n".join(["import treeattn", *(f"reveal_type(treeattn.{name})" for name in NAMES)])


def example(name: str) -> str:
    """What a docstring shows, as the body of a function."""
    body = textwrap.indent("".join(line.source for line in examples(name).examples), "    ")
    return f"def {name.lower()}_example() -> None:\n{body}"


SCRIPT = (ROOT / "tests" / "user_script.py").read_text(encoding="utf-8")
SCRIPT += "from treeattn import *\nfrom treeattn.program import Collective\n"
SCRIPT += "".join(map(example, FUNCTIONS))
WRONG = "wrong: int = treeattn.merge(empty, empty)\n"  # what a checker must say something about


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What mypy says, line by line, of the questions, the mistakes and a user's script."""
    folder = tmp_path_factory.mktemp("types")
    files = {"questions.py": QUESTIONS, "mistakes.py": MISTAKES, "user_script.py": SCRIPT + WRONG}
    for name, code in files.items():
        (folder / name).write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent"]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / "build" / "mypy"), *files],
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
        assert "Any" not in returned or name in ONE_OR_TWO, f"{name}: {known}"


@pytest.mark.slow
def test_a_checker_sees_mistakes(lines):
    found = {int(line.split(":")[1]) for line in lines if re.match(r"mistakes.* error: ", line)}
    assert found == {n for n, line in enumerate(MISTAKES.splitlines(), 1) if "  # wrong" in line}


def test_the_package_says_that_it_has_types():
    assert (ROOT / "treeattn" / "py.typed").exists()


@pytest.mark.slow
def test_a_users_script_under_mypy(lines):
    errors = [line for line in lines if line.startswith("user_script")]
    # JAX's PartitionSpec has no types.
    ours = [x for x in errors if "untyped function" not in x]
    assert len(ours) == 1 and '"AttentionState"' in ours[0], ours
