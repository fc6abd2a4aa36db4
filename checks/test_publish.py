"""One call writes the project's public address wherever a file names it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

CHECKOUT = Path(__file__).parent.parent
WRITTEN = ("README.md", "CITATION.cff", "pyproject.toml")


@pytest.fixture
def published(tmp_path):
    """(folder, what a call writes there)"""
    script = tmp_path / "site" / "publish.py"
    script.parent.mkdir()
    shutil.copy(CHECKOUT / "site" / "publish.py", script)
    for name in WRITTEN:
        shutil.copy(CHECKOUT / name, tmp_path)

    def publish(*words):
        done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
        return done, {name: (tmp_path / name).read_text("utf-8") for name in WRITTEN}

    return publish


def test_badges_launch_links_citation_and_site_name_one_address(published):
    done, before = published("https://github.com/Some/where/")
    assert (done.returncode, "no slash at its end" in done.stderr) == (2, True)
    done, texts = published("https://github.com/Some/where")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [x for x in texts["README.md"].splitlines() if x.startswith("[![tests]")]
    first = "blob/main/notebooks/00_tree_attention_in_one_sitting.ipynb"
    assert f"(https://colab.research.google.com/github/Some/where/{first})" in line
    assert f"(https://github.com/Some/where/{first})" in line
    assert 'repository-code: "https://github.com/Some/where"\nlicense:' in texts["CITATION.cff"]
    site = 'Documentation = "https://some.github.io/where/"\n'
    assert f'Repository = "https://github.com/Some/where"\n{site}' in texts["pyproject.toml"]
    assert len(texts["README.md"].split()) <= 1200  # as checks/test_readme.py wants it
    # Nothing else changed, and another address leaves nothing of this one.
    for name, text in texts.items():
        kept = [x for x in text.splitlines() if "Some/where" not in x and x not in site]
        assert [x for x in before[name].splitlines() if x] == [x for x in kept if x]
    done, texts = published("https://forge.invalid/a/b", "--site", "https://docs.invalid/")
    assert (done.returncode, done.stderr) == (0, "")
    assert not re.search(r"some/where|some\.github", "".join(texts.values()), re.IGNORECASE)
    assert 'Documentation = "https://docs.invalid/"' in texts["pyproject.toml"]


@pytest.mark.slow
def test_notebook_00_opens_from_the_address_that_is_published(published, tmp_path):
    """Alone, in an empty folder, it is run in checks/test_notebooks.py."""
    subprocess.run(["git", "clone", "-q", "--bare", CHECKOUT, tmp_path / "forge.git"], check=True)
    _, texts = published(f"file://{tmp_path}/forge.git")
    (address,) = re.findall(r'^repository-code: "(.+)"$', texts["CITATION.cff"], re.MULTILINE)
    (path,) = re.findall(rf"\({address}/blob/main/(.+?\.ipynb)\)", texts["README.md"])
    subprocess.run(["git", "clone", "-q", address, tmp_path / "reader"], check=True)
    notebook = nbformat.read(tmp_path / "reader" / path, as_version=4)
    assert notebook.cells[0].source.startswith("# 00 · ")
