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
from pages import LINK, MAIN_ROAD, NOTEBOOKS, REPOSITORY, cells, run, text
from test_notebooks import test_each_prediction_has_a_folded_output as predictions_are_folded
from test_notebooks import test_what_is_stored as stored_as_it_should_be
from test_reruns import shown


class Lab:
    """The server that `make lab` starts, on a free port and without a browser of its own."""

    def __init__(self, folder: Path):
        recipe = run("make", "--dry-run", "--no-print-directory", "lab").splitlines()[-1]
        command = recipe.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        options = "--no-browser --port=0 --allow-root --expose-app-in-browser"
        own = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")}
        own |= {f"JUPYTERLAB_{name}_DIR": str(folder / name) for name in ("SETTINGS", "WORKSPACES")}
        self.folder = folder
        words = ["env", *shlex.split(f"{command} {options}")]
        log = {"stdout": (folder / "log").open("w"), "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(words, cwd=REPOSITORY, env=os.environ | own, **log)

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
    files = {
        os.path.relpath(path.parent / target.split("#")[0], lab.about["root_dir"])
        for path in NOTEBOOKS
        for _, _, target in LINK.findall(text(path))
        if not re.match(r"\w+:|#", target)
    }
    assert len(files) > 50
    for file in files:
        lab.answer(f"files/{file}").close()  # or an HTTPError with its status and address


def test_it_opens_on_the_first_notebook(lab):
    assert lab.opens.endswith("/lab/tree/notebooks/00_tree_attention_in_one_sitting.ipynb")


def test_it_does_not_offer_news(lab):
    """At its first start JupyterLab would ask, over the notebook's corner."""
    with lab.answer("lab/api/settings/@jupyterlab/apputils-extension:notification") as answer:
        settings = json.load(answer)
    assert settings["schema"]["properties"]["fetchNews"]["default"] == "false"


def test_it_saves_nothing_by_itself(lab):
    with lab.answer("lab/api/settings/@jupyterlab/docmanager-extension:plugin") as answer:
        settings = json.load(answer)
    assert settings["schema"]["properties"]["autosave"]["default"] is False


# ---------------------------------------------------------------- in Chromium

# Once its kernel has said which language it speaks, which JupyterLab writes into the notebook.
CHANGED = """(async () => {
  const { context } = jupyterapp.shell.currentWidget;
  await context.sessionContext.ready;
  await context.sessionContext.session.kernel.info;
  await new Promise((resolve) => setTimeout(resolve, 1000));
  return context.model.dirty;
})()"""
# Every cell by itself, in a kernel that has run nothing; which of them failed. The kernel first
# answers: what waits for its answer when it restarts would keep the connection open, and the new
# connection has the same name, so the kernel would not listen to it.
RUN_ALL = """(async () => {
  const { commands, shell } = jupyterapp;
  const { content, sessionContext } = shell.currentWidget;
  await sessionContext.ready;
  const { kernel } = sessionContext.session;
  while (kernel.connectionStatus !== "connected") await new Promise((done) => setTimeout(done, 50));
  await kernel.requestKernelInfo();
  await sessionContext.restartKernel();
  const failed = [];
  for (const [i, cell] of content.widgets.entries()) {
    content.activeCellIndex = i;
    await content.activeCell.ready;
    await commands.execute("notebook:run-cell");
    const outputs = cell.model.type === "code" ? cell.model.outputs.toJSON() : [];
    if (outputs.some((output) => output.output_type === "error")) failed.push(i);
  }
  return failed;
})()"""
# What a reader saves.
SAVED = "JSON.stringify(jupyterapp.shell.currentWidget.context.model.toJSON())"
# The pictures of the notebook on the screen: how many, once none of them is broken.
PICTURES = """(() => {
  const all = [...jupyterapp.shell.currentWidget.node.querySelectorAll("img")];
  return all.every((image) => image.complete && image.naturalWidth > 0) && all.length;
})()"""


@pytest.fixture(scope="module")
def browser(lab, tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"), seconds=600)
    yield browser
    browser.close()
    # JupyterLab asks before a notebook that was changed is left; nobody is there to answer. For a
    # moment it shows the pictures that a notebook brings along by their own names. It asks a kernel
    # that restarts for its debugger, and runs no script of a page before the reader trusts it.
    asked = f"asked the network for ((blob:)?{lab.about['url']}|attachment:)"
    expected = re.compile(f"{asked}|Blocked attempt to show a 'beforeunload'")
    others = [error for error in browser.errors if not expected.match(error)]
    passing = " attachment:", "Could not restore the debugger state", "'allow-scripts'"
    assert [error for error in others if not any(x in error for x in passing)] == []


def open_notebook(lab, browser, path: Path):
    place = path.relative_to(REPOSITORY).as_posix()
    browser.open(f"{lab.about['url']}lab/tree/{place}?token={lab.about['token']}")
    shown = f"window.jupyterapp?.shell.currentWidget?.context?.path === {json.dumps(place)}"
    browser.wait(f"{shown} && jupyterapp.shell.currentWidget.content.widgets.length > 5")


@pytest.mark.slow
@pytest.mark.parametrize("path", MAIN_ROAD, ids=lambda path: path.stem)
def test_opening_a_notebook_changes_nothing(lab, browser, path):
    before = path.read_bytes()
    open_notebook(lab, browser, path)
    assert browser.run(CHANGED) is False
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("path", [MAIN_ROAD[i] for i in (0, 1, 7)], ids=lambda path: path.stem)
def test_a_notebook_that_was_run_and_saved_passes_its_tests(lab, browser, path, tmp_path):
    before = path.read_bytes()
    open_notebook(lab, browser, path)
    assert browser.run(RUN_ALL) == []
    outputs = [output for cell in cells(path) for output in cell.get("outputs", ())]
    drawn = sum("image/png" in output.get("data", ()) for output in outputs)
    drawn += sum(o.get("data", {}).get("text/html", "").count("<img") for o in outputs)
    assert browser.wait(PICTURES) == drawn + sum(x == "!" for x, *_ in LINK.findall(text(path)))
    assert path.read_bytes() == before  # nothing is saved unless the reader saves
    saved = tmp_path / path.name
    saved.write_text(browser.run(SAVED), encoding="utf-8")
    stored_as_it_should_be(saved)
    predictions_are_folded(saved)
    for was, now in zip(cells(path), cells(saved), strict=True):
        same = shown(was.get("outputs", ())) == shown(now.get("outputs", ()))
        assert same or "nbval-ignore-output" in was.metadata.get("tags", ()), now.source


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
# What the button "Trust HTML" does.
TRUST = """(async () => {
  const viewer = jupyterapp.shell.currentWidget;
  if (!viewer?.context?.path.endsWith(".html")) return false;
  await jupyterapp.commands.execute("htmlviewer:trust-html");
  return viewer.trusted;
})()"""
# How many elements the page has beyond those it was written with: its scripts have made them.
MADE = """(() => {
  const page = document.querySelector("iframe")?.contentDocument;
  if (page?.readyState !== "complete" || !page.body?.children.length) return 0;
  const count = (part) => part.querySelectorAll("body *").length;
  return count(page) - count(new DOMParser().parseFromString(%s, "text/html"));
})()"""


@pytest.mark.slow
def test_a_page_that_a_notebook_links_to_runs_its_scripts_if_trusted(lab, browser):
    path, i, target = next(
        (path, i, target)
        for path in NOTEBOOKS
        for i, cell in enumerate(cells(path))
        for _, _, target in LINK.findall(cell.source)
        if target.partition("#")[0].endswith(".html") and ":" not in target
    )
    open_notebook(lab, browser, path)
    browser.wait(FOLLOW % i)
    browser.wait(TRUST)
    written = text(path.parent / target.partition("#")[0])
    assert browser.wait(MADE % json.dumps(written)) > 20
    links = "[...document.querySelector('iframe').contentDocument.links]"
    targets = browser.run(f"{links}.map((link) => link.href.replace(/[?#].*/, ''))")
    shown = f"{lab.about['url']}lab/tree/"
    assert all((REPOSITORY / x.removeprefix(shown)).exists() for x in targets), targets
