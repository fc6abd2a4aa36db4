"""What a stranger installs: the wheel and what it declares, in an otherwise empty environment."""

import importlib.metadata
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parent.parent


def run(*command: object, cwd: Path) -> str:
    """What the command prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions that these lines require, and of what those require in turn."""
    names = set()
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names |= {requirement.name}
            names |= closure(importlib.metadata.requires(requirement.name) or ())
    return names


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> tuple[object, ...]:
    """The command for Python in an environment of the wheel and what it says it needs, only.

    The wheel is built and installed without a network; what it needs is linked to from here.
    """
    folder = tmp_path_factory.mktemp("environment")
    hatchling = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    run(*hatchling, cwd=REPOSITORY)
    (wheel,) = folder.glob("treeattn-*.whl")

    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    run(*pip, "--no-deps", wheel, cwd=folder)

    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (treeattn,) = importlib.metadata.distributions(name="treeattn", path=[str(packages)])
    for name in closure(treeattn.requires):
        here = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in here.files} - {"..", "__pycache__"}:
            (packages / part).symlink_to(here.locate_file(part))
    return python, "-I"  # without this environment's PYTHONPATH


def test_the_environment_holds_nothing_else(python, tmp_path):
    """Or the other tests would show little."""
    names = "{d.name for d in importlib.metadata.distributions()}"
    found = run(*python, "-c", f"import importlib.metadata; print(*{names})", cwd=tmp_path).split()
    assert {"treeattn", "jax", "numpy", "jaxtyping"} <= set(found)
    assert not {"gguf", "tokenizers", "safetensors", "jinja2", "tqdm", "matplotlib"} & set(found)
    where = run(*python, "-c", "import treeattn; print(treeattn.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python[0].parent.parent)


def test_the_wheel_runs_the_readmes_script_section(python, tmp_path):
    runner = REPOSITORY / "tests" / "test_readme.py"
    printed = run(*python, runner, "In a script", cwd=tmp_path)
    assert printed.endswith(" 0 failed\n") and " 0 examples" not in printed


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("import treeattn; treeattn.Llama", "llama"),
        ("from treeattn import Llama", "llama"),
        ("import runpy; runpy.run_module('treeattn', run_name='__main__')", "llama"),
    ],
)
def test_the_wheel_names_the_extra_that_is_missing(python, tmp_path, line, extra):
    catch = f"try:\n    {line}\nexcept ImportError as error:\n    print(error)"
    assert f"pip install 'treeattn[{extra}]'" in run(*python, "-c", catch, cwd=tmp_path)


def test_all_but_the_llama_works_without_an_extra(python, tmp_path):
    """And the figures, which belong to a checkout, are not there at all."""
    code = """
import importlib, pkgutil, treeattn
for module in pkgutil.walk_packages(treeattn.__path__, "treeattn.", onerror=lambda name: None):
    if not module.name.startswith("treeattn_llama") and module.name != "treeattn.__main__":
        importlib.import_module(module.name)
        print(module.name)
"""
    found = run(*python, "-c", code, cwd=tmp_path).split()
    assert {"labs.cost.papers", "treeattn_conformance", "treeattn.trees.beam"} <= set(found)
    assert not any(name.startswith("figures") for name in found)
    advice = run(*python, "-m", "labs.cost", "--context", "1000", cwd=tmp_path)
    assert "heads + sequence" in advice


def test_the_whole_package_but_its_figures_is_in_the_wheel(python, tmp_path):
    installed = run(*python, "-c", "import treeattn; print(*treeattn.__path__)", cwd=tmp_path)
    names, here = (
        {file.relative_to(folder) for file in folder.rglob("*") if "__pycache__" not in file.parts}
        for folder in (Path(installed.strip()), REPOSITORY / "treeattn")
    )
    assert names == {name for name in here if name.parts[0] != "figures"}
    assert Path("py.typed") in names
    assert not any(name.suffix == ".safetensors" or "recurrent" in name.stem for name in names)
    assert not (Path(installed.strip()).parent / "training").exists()


def test_extras_are_what_a_user_installs(python, tmp_path):
    """What the tests, the notebooks and the site need are groups, which a wheel does not show."""
    code = """
from importlib.metadata import metadata
print(*metadata("treeattn").get_all("Provides-Extra"))
"""
    assert set(run(*python, "-c", code, cwd=tmp_path).split()) == {"llama", "flash"}
