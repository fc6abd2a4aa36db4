"""What a student meets after `make lab`: the server that it starts, and its pages in Chromium."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from browser import Browser, chromium

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("notebooks", "notebooks/deeper", "labs/*")
NOTEBOOKS = sorted(path for folder in FOLDERS for path in REPOSITORY.glob(f"{folder}/*.ipynb"))
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def markdown(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def pictures(path: Path) -> int:
    """How many a reader sees in the notebook once it has run."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    drawn = sum("image/png" in output.get("data", ()) for output in outputs)
    return drawn + sum(image == "!" for image, _ in LINK.findall(markdown(path)))


class Lab:
    """The server that `make lab` starts, on a free port and without a browser of its own."""

    def __init__(self, folder: Path):
        make = ["make", "--dry-run", "--no-print-directory", "lab"]
        recipe = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        command = recipe.stdout.splitlines()[-1].replace(
            ".venv/bin/", f"{Path(sys.executable).parent}/"
        )
        options = "--no-browser --port=0 --allow-root --expose-app-in-browser"
        own = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")}
        own |= {f"JUPYTERLAB_{name}_DIR": str(folder / name) for name in ("SETTINGS", "WORKSPACES")}
        settings = folder / "SETTINGS" / "@jupyterlab" / "docmanager-extension"
        settings.mkdir(parents=True)
        (settings / "plugin.jupyterlab-settings").write_text('{"autosave": false}')
        self.folder = folder
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                ["env", *shlex.split(f"{command} {options}")],
                cwd=REPOSITORY,
                env=os.environ | own,
                stdout=log,
                stderr=log,
            )

    def wait(self):
        """Until it answers: then it has written a file, as a browser is to open it."""
        deadline, opens = time.monotonic() + 60, None
        while opens is None:
            failed = self.process.poll() is not None or time.monotonic() > deadline
            assert not failed, (self.folder / "log").read_text()
            time.sleep(0.1)
            for page in self.folder.glob("RUNTIME/jpserver-*-open.html"):
                opens = re.search("url=([^?]+)", page.read_text())
        self.opens = opens[1]
        self.about = json.loads(next(self.folder.glob("RUNTIME/jpserver-*.json")).read_text())

    def answer(self, path: str):
        headers = {"Authorization": f"token {self.about['token']}"}
        request = urllib.request.Request(self.about["url"] + path, headers=headers)
        return urllib.request.urlopen(request, timeout=30)

    def status(self, path: str) -> int:
        """Of the server's answer."""
        try:
            with self.answer(path) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.wait()
        yield lab
    finally:
        lab.close()


def test_what_notebooks_show_and_link_to_is_served(lab):
    """JupyterLab joins a target to the notebook's folder, and asks for files below its root."""
    status = {}
    for path in NOTEBOOKS:
        for _, target in LINK.findall(markdown(path)):
            if not re.match(r"\w+:|#", target):
                file = os.path.relpath(path.parent / target.split("#")[0], lab.about["root_dir"])
                status[file] = status.get(file) or lab.status(f"files/{file}")
    assert len(status) > 50
    assert {file: code for file, code in status.items() if code != 200} == {}


def test_it_opens_on_the_first_notebook(lab):
    assert lab.opens.endswith("/lab/tree/notebooks/00_tree_attention_in_one_sitting.ipynb")


def test_it_does_not_offer_news(lab):
    """At its first start JupyterLab would ask, over the notebook's corner."""
    with lab.answer("lab/api/settings/@jupyterlab/apputils-extension:notification") as answer:
        settings = json.load(answer)
    assert settings["schema"]["properties"]["fetchNews"]["default"] == "false"


# ---------------------------------------------------------------- in Chromium

# The pictures of the notebook on the screen: how many, and which of them are broken.
PICTURES = """(() => {
  const all = [...jupyterapp.shell.currentWidget.node.querySelectorAll("img")];
  const whole = (image) => image.complete && image.naturalWidth > 0;
  return { count: all.length, broken: all.filter((image) => !whole(image)).map((x) => x.src) };
})()"""
HIDDEN = """jupyterapp.shell.currentWidget.content.widgets.map(
  (cell, i) => cell.outputHidden ? i : -1).filter((i) => i >= 0)"""
# In their place JupyterLab shows the first line, often the answer, unless a style sheet forbids it.
FIRST_LINE = """(async () => {
  const { content } = jupyterapp.shell.currentWidget;
  await content.scrollToItem(%d);
  await content.widgets[%d].ready;
  const line = content.widgets[%d].node.querySelector(".jp-OutputPlaceholder .jp-PlaceholderText");
  return line && getComputedStyle(line).fontSize;
})()"""
# Every cell by itself; which of them failed.
RUN_ALL = """(async () => {
  const { commands, shell } = jupyterapp;
  const { content, sessionContext } = shell.currentWidget;
  await sessionContext.ready;
  content.activeCellIndex = 0;
  const errors = [];
  for (let i = 0; i < content.widgets.length; i++) {
    content.activeCellIndex = i;
    await content.activeCell.ready;
    await commands.execute("notebook:run-cell");
    const cell = content.widgets[i];
    const outputs = cell.model.type === "code" ? cell.model.outputs.toJSON() : [];
    if (outputs.some((output) => output.output_type === "error")) errors.push(i);
  }
  return errors;
})()"""


@pytest.fixture(scope="module")
def browser(lab, tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"), seconds=600)
    yield browser
    browser.close()
    # JupyterLab asks before a notebook that was changed is left; nobody is there to answer.
    asked = f"asked the network for (blob:)?{lab.about['url']}"
    expected = re.compile(f"{asked}|Blocked attempt to show a 'beforeunload'")
    assert [error for error in browser.errors if not expected.match(error)] == []


def wait(browser, script: str):
    """The first value of the expression that is true."""
    deadline = time.monotonic() + 60
    while not (value := browser.run(script)):
        assert time.monotonic() < deadline, script
        time.sleep(0.1)
    return value


def open_notebook(lab, browser, path: Path):
    place = path.relative_to(REPOSITORY).as_posix()
    browser.open(f"{lab.about['url']}lab/tree/{place}?token={lab.about['token']}")
    shown = f"window.jupyterapp?.shell.currentWidget?.context?.path === {json.dumps(place)}"
    wait(browser, f"{shown} && jupyterapp.shell.currentWidget.content.widgets.length > 5")


@pytest.mark.slow
def test_a_notebook_run_cell_by_cell_shows_all_its_pictures(lab, browser):
    path = REPOSITORY / "notebooks" / "04_the_associative_merge.ipynb"
    open_notebook(lab, browser, path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    folded = [c["metadata"].get("jupyter", {}) for c in cells]
    hidden = [i for i, x in enumerate(folded) if "outputs_hidden" in x]  # what is predicted
    assert browser.run(HIDDEN) == hidden != []
    assert wait(browser, FIRST_LINE.replace("%d", str(hidden[0]))) == "0px"
    assert browser.run(RUN_ALL) == []
    assert browser.run(HIDDEN) == []
    wait(browser, f"{PICTURES}.broken.length === 0")
    assert browser.run(PICTURES) == {"count": pictures(path), "broken": []}


# Follows the first link to a page in a cell, as a click does, once JupyterLab knows where it leads.
FOLLOW = """(async () => {
  const { content } = jupyterapp.shell.currentWidget;
  content.activeCellIndex = %d;
  await content.scrollToItem(content.activeCellIndex);
  await content.activeCell.ready;
  const link = content.activeCell.node.querySelector('a[href*="/files/"][href*=".html"]');
  link?.click();
  return link !== null;
})()"""
# How many elements the page has beyond those it was written with: its scripts have made them.
MADE = """(() => {
  const page = document.querySelector("iframe")?.contentDocument;
  if (page?.readyState !== "complete" || !page.body.children.length) return 0;
  const count = (part) => part.querySelectorAll("body *").length;
  return count(page) - count(new DOMParser().parseFromString(%s, "text/html"));
})()"""


@pytest.mark.slow
def test_a_page_that_a_notebook_links_to_runs_its_scripts(lab, browser):
    found = (
        (path, i, target)
        for path in NOTEBOOKS
        for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"])
        for _, target in LINK.findall("".join(cell["source"]))
        if target.partition("#")[0].endswith(".html") and ":" not in target
    )
    path, i, target = next(found)
    open_notebook(lab, browser, path)
    wait(browser, FOLLOW % i)
    written = (path.parent / target.partition("#")[0]).read_text(encoding="utf-8")
    assert wait(browser, MADE % json.dumps(written)) > 20
