"""What a stranger installs: three wheels and what they declare, in otherwise empty environments."""

import importlib.metadata
import re
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import REPOSITORY, blocks, run, run_code, text

import treeattn
import treeattn_conformance
import treeattn_llama

pytestmark = [pytest.mark.slow, pytest.mark.house]

# The folder of each project, by the package that it holds.
PROJECTS = {
    "treeattn": REPOSITORY,
    "treeattn_llama": REPOSITORY / "llama",
    "treeattn_conformance": REPOSITORY / "conformance",
}
BUILD = (sys.executable, "-m", "hatchling", "build", "-d")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """By package its "wheel" and "sdist", built without a network."""
    found = {}
    for package, project in PROJECTS.items():
        folder = tmp_path_factory.mktemp(package)
        run(*BUILD, folder, cwd=project)
        (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        found[package] = {"wheel": wheel, "sdist": sdist}
    return found


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions that these lines require, and of what those require in turn."""
    names = set()
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names |= {requirement.name}
            names |= closure(importlib.metadata.requires(requirement.name) or ())
    return names


def environment(folder: Path, wheels: list[Path]) -> tuple[object, ...]:
    """The command for Python in an environment of these wheels and what they say they need, only.

    They are installed without a network; what they need is linked to from here.
    """
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    run(*pip, "--no-deps", *wheels, cwd=folder)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    installed = list(importlib.metadata.distributions(path=[str(packages)]))
    required = {name for one in installed for name in closure(one.requires or ())}
    for name in required - {one.name for one in installed}:
        here = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in here.files} - {"..", "__pycache__"}:
            if not (packages / part).exists():  # a folder of two distributions
                (packages / part).symlink_to(here.locate_file(part))
    return python, "-I"  # without this environment's PYTHONPATH


@pytest.fixture(scope="module")
def core(built, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("core"), [built["treeattn"]["wheel"]])


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("package", PROJECTS)
def test_a_wheel_holds_its_package_and_nothing_else(built, package):
    folder = PROJECTS[package] / package
    wanted = {
        str(file.relative_to(folder.parent))
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    found = names_in(built[package]["wheel"])
    about = {name for name in found if ".dist-info/" in name}
    assert found - about == wanted
    assert any(name.endswith("/licenses/LICENSE") for name in about)
    assert f"{package}/py.typed" in wanted or package != "treeattn"


@pytest.mark.parametrize("package", PROJECTS)
def test_a_source_distribution_is_small_and_can_be_built_from(built, package, tmp_path):
    sdist = built[package]["sdist"]
    assert sdist.stat().st_size < 1_000_000
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    tops = {path.name for path in folder.iterdir()}
    assert {package, "LICENSE", "pyproject.toml"} <= tops
    beside = {"benchmarks", "figures", "labs", "llama", "conformance", "notebooks", "site", "tests"}
    beside |= {"checks"}
    assert not tops & beside
    run(*BUILD, tmp_path, "-t", "wheel", cwd=folder)
    (wheel,) = tmp_path.glob("*.whl")
    assert names_in(wheel) == names_in(built[package]["wheel"])


def test_the_core_runs_the_blocks_of_its_pages_in_an_environment_of_its_own(core, tmp_path):
    """What an index would show, and the README's block for engineers."""
    names = "{d.name for d in importlib.metadata.distributions()}"
    code = f"import importlib.metadata, treeattn; print(treeattn.__file__, *{names})"
    where, *found = run(*core, "-c", code, cwd=tmp_path).split()
    assert Path(where).is_relative_to(core[0].parent.parent)
    assert not {"treeattn-llama", "treeattn-conformance", "gguf", "matplotlib"} & set(found)
    (shown,) = blocks(REPOSITORY / "treeattn" / "README.md")
    (ours,) = (block for block in blocks() if block.section == "Decode from a sharded cache")
    for block in (shown, ours):
        assert run_code(block.code, *core, cwd=tmp_path) == block.prints


@pytest.mark.parametrize("package", PROJECTS)
def test_what_an_index_would_show_has_links_that_work(built, package):
    """None that leads into a checkout."""
    wheel = zipfile.ZipFile(built[package]["wheel"])
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about, _, page = wheel.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in about and page.startswith("# treeattn")
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert all(link.startswith("https://") for link in links)


def test_the_suite_runs_with_numpy_alone_and_the_llama_beside_the_core(built, tmp_path):
    for package, beside in (("treeattn_conformance", ()), ("treeattn_llama", ("treeattn",))):
        (tmp_path / package).mkdir()
        wheels = [built[name]["wheel"] for name in (package, *beside)]
        python = environment(tmp_path / package, wheels)
        assert "usage" in run(*python, "-m", package, "--help", cwd=tmp_path)
        said = run(*python, "-m", package, "--version", cwd=tmp_path)
        assert said == f"{package} {treeattn.__version__}\n"
        if not beside:
            (block,) = blocks(PROJECTS[package] / package / "README.md")
            code = f"{block.code}\nimport sys\nprint('jax' in sys.modules)"
            assert run_code(code, *python, cwd=tmp_path) == f"{block.prints}False\n"


def test_the_three_agree_on_version_and_licence():
    metadata = {}
    for package, project in PROJECTS.items():
        metadata[package] = tomllib.loads(text(project / "pyproject.toml"))["project"]
        assert (project / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
        assert "version" in metadata[package]["dynamic"]  # hatch reads it from the package
    assert treeattn_llama.__version__ == treeattn_conformance.__version__ == treeattn.__version__
    assert f"treeattn=={treeattn.__version__}" in metadata["treeattn_llama"]["dependencies"]
    assert f"\nversion: {treeattn.__version__}\n" in text(REPOSITORY / "CITATION.cff")
    assert f"\n## {treeattn.__version__}\n" in text(REPOSITORY / "CHANGELOG.md")
