"""What other machines run: requirements.lock on every platform that we name, a forge's workflow."""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parent.parent
# uv's names. The last two were never run: their wheels exist, no more is known.
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")


def pins(file: str) -> dict[str, str]:
    """The version of each distribution, by its name."""
    text = (REPOSITORY / file).read_text()
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, flags=re.MULTILINE))


def test_the_lock_has_each_pin_and_a_hash_for_all_it_names():
    lock = pins("requirements.lock")
    assert pins("requirements.txt").items() <= lock.items()
    entries = re.split(r"\n(?=\w)", (REPOSITORY / "requirements.lock").read_text())[1:]
    assert len(entries) >= len(lock) > 100  # a Python may need another release than the others
    assert all(entry.count("==") and "--hash=sha256:" in entry for entry in entries)


def test_the_lock_names_no_index():
    text = (REPOSITORY / "requirements.lock").read_text()
    assert "://" not in text and "index-url" not in text and "-e " not in text


def test_a_forge_runs_what_is_there():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["tests"]["steps"] if "run" in step]
    assert commands == ["make test", ".ci/run"]
    assert (REPOSITORY / ".ci/run").stat().st_mode & 0o111


def test_the_hooks_are_of_the_pinned_ruff():
    (repo,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["rev"] == f"v{pins('requirements.txt')['ruff']}"


@pytest.fixture(scope="module")
def uv(tmp_path_factory) -> str:
    """A command: uv, installed for this test if there is none."""
    if found := shutil.which("uv"):
        return found
    folder = tmp_path_factory.mktemp("uv")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "uv"]
    if subprocess.run(pip, timeout=300).returncode:
        pytest.skip("uv cannot be installed here")
    return str(folder / "bin/uv")


def run(*words: str) -> str:
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_pin_has_a_wheel(uv, platform):
    lines = run(
        *(uv, "pip", "compile", "--quiet", "--python-version", "3.11", "--only-binary", ":all:"),
        *("--python-platform", platform, "--no-deps", "requirements.lock"),
    ).splitlines()
    names = {line.partition("==")[0] for line in lines if "==" in line}
    cuda = {"flash-attn-jax", "einops", "nvidia-cuda-runtime-cu12"}
    assert names & cuda == (cuda if "linux" in platform else set())
    assert {"jax", "jaxlib", "jupyterlab"} <= names


@pytest.mark.slow
def test_uv_takes_the_lock_with_its_hashes(uv):
    """`make` hands the file to uv where there is one, and to pip otherwise."""
    words = ("pip", "install", "--dry-run", "--no-deps", "--require-hashes", "-r")
    run(uv, *words, "requirements.lock", "--python", sys.executable)
