"""What nbval does not notice: cells never executed, stored errors, notebooks too large to show."""

import base64
import importlib.util
import re
from statistics import median

import pytest
from browser import Browser, chromium
from nbconvert import HTMLExporter
from pages import DEEPER, LINK, MAIN_ROAD, NOTEBOOKS, REPOSITORY, cells, run_code, text

pytestmark = pytest.mark.house


def code_cells(path) -> list:
    return [c for c in cells(path) if c.cell_type == "code" and c.source.strip()]


@pytest.fixture
def execute():
    """notebooks/execute.py, as a module."""
    path = REPOSITORY / "notebooks" / "execute.py"
    spec = importlib.util.spec_from_file_location("execute", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_make_run_executes(execute):
    assert len(MAIN_ROAD) == 11 and DEEPER
    assert execute.chosen([], everything=False) == MAIN_ROAD
    assert sorted(execute.chosen([], everything=True)) == sorted(NOTEBOOKS)
    assert execute.chosen(["05", str(DEEPER[0])], everything=False) == [MAIN_ROAD[5], DEEPER[0]]


def test_links_lead_from_the_html_where_they_led_from_the_notebook(execute):
    for stored, moved in {
        "![levers](../../figures/levers.png)": "![levers](../figures/levers.png)",
        "[10](../10_ledger.ipynb#Verdicts)": "[10](10_ledger.html#Verdicts)",
        "[bits](../../labs/exact/the_same_bits.ipynb)": "[bits](../labs/exact/the_same_bits.ipynb)",
        "[a](https://b.org/c_d) [e](#f) `x[0](y)`": "[a](https://b.org/c_d) [e](#f) `x[0](y)`",
    }.items():
        assert execute.seen_from_build(stored, DEEPER[0].parent) == moved


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_what_is_stored(path):
    """nbval lets a cell pass that has neither an output nor an execution count."""
    assert all(cell.execution_count for cell in code_cells(path))
    for cell in code_cells(path):
        tags = cell.metadata.get("tags", ())
        for output in cell.outputs:
            assert output.get("name") != "stderr", output.text
            assert output.output_type != "error" or "raises-exception" in tags
            shown = output.get("text") or output.get("data", {}).get("text/plain", "")
            changes = re.search(r"\bat 0x[0-9a-f]+|/home/|/tmp/|/work/", shown)
            assert "nbval-ignore-output" in tags or not changes, shown


@every_notebook
def test_it_is_pleasant_to_read(path):
    assert path.stat().st_size < 500_000
    lines = [len(re.findall(r"(?m)\S.*$", cell.source)) for cell in code_cells(path)]
    assert max(lines) <= 25 and median(lines) <= 8
    assert cells(path)[0].cell_type == "markdown"
    end = "".join(cell.source for cell in cells(path)[-3:])
    assert "Exercises" in end, "no section Exercises in its last three cells"


def folded(cell) -> str:
    """What a cell shows behind a click, in every viewer: the HTML of figures.folded.folded."""
    shown = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
    return shown if "with folded(" in cell.source and "<details>" in shown else ""


@every_notebook
def test_each_prediction_has_a_folded_output(path):
    """Until the next prediction or section; and nothing else is folded."""
    predictions, answered, open_ = 0, set(), False
    for cell in cells(path):
        if cell.cell_type == "code":
            assert not folded(cell) or open_, cell.source
            answered |= {predictions} if folded(cell) else set()
            continue
        open_ = open_ and not re.search(r"(?m)^##", cell.source)
        _, predict, asked = cell.source.rpartition("**Predict")
        if predict and "<details>" not in asked:  # or the answer is folded right there
            predictions, open_ = predictions + 1, True
    without = set(range(1, predictions + 1)) - answered
    assert not without, f"no folded output answers prediction {without}: see CONTRIBUTING.md"


@pytest.mark.slow
def test_the_first_notebook_needs_jax_and_numpy_alone(tmp_path):
    """It prints what it prints beside the package, which it only compares itself with."""
    hidden = ("treeattn", "course", "figures", "jaxtyping", "matplotlib", "sympy")
    code = [
        f"import sys\nsys.modules.update(dict.fromkeys({hidden}))",  # None: not to be had
        "import IPython.display\nIPython.display.display = lambda shown: print(shown.data)",
    ]
    code += [cell.source for cell in code_cells(MAIN_ROAD[0])]
    outputs = [output for cell in code_cells(MAIN_ROAD[0]) for output in cell.outputs]
    outputs = [x for x in outputs if "<img" not in x.get("data", {}).get("text/html", "")]
    stored = [x.get("text") or x.data["text/html"] + "\n" for x in outputs]
    assert run_code("\n\n".join(code), cwd=tmp_path) == "".join(stored)


def test_the_first_notebook_brings_its_pictures():
    """It is one file: somebody may open it without the folder that it comes from."""
    shown = set()
    for cell in cells(MAIN_ROAD[0]):
        names = {name for image, _, name in LINK.findall(cell.source) if image}
        attached = cell.get("attachments", {})
        assert names == {f"attachment:{name}" for name in attached}
        for name, picture in attached.items():
            drawn = (REPOSITORY / "figures" / name).read_bytes()
            assert base64.b64decode(picture["image/png"]) == drawn, f"make refresh: {name}"
        shown |= names
    assert len(shown) == 6


# ---------------------------------------------------------------- how a chapter is told


a_chapter = pytest.mark.parametrize("path", [*MAIN_ROAD, *DEEPER], ids=lambda path: path.stem)


@a_chapter
def test_it_opens_with_a_question_and_a_picture(path):
    first, *rest = cells(path)
    number = f"{path.stem.partition('_')[0]} · " if path in MAIN_ROAD else ""
    assert first.source.startswith(f"# {number}")
    assert re.search(r"\*\*[^*]+\?\*\*", first.source), "a question"
    assert any(image and len(alt) > 40 for image, alt, _ in LINK.findall(first.source)), "a picture"
    assert re.search(r"\bYou need\b", first.source), "what it needs"
    assert any(cell.cell_type == "code" for cell in rest[:3])


@a_chapter
def test_each_figure_has_an_alternative_text_and_a_caption(path):
    captions = 0
    for cell, below in zip(cells(path), [*cells(path)[1:], None], strict=True):
        outputs = cell.get("outputs", ())
        alts = [
            output.metadata["image/png"]["alt"]
            for output in outputs
            if "image/png" in output.get("data", {})
        ]
        for output in outputs:
            shown = output.get("data", {}).get("text/html", "")
            alts += re.findall('<img [^>]*alt="([^"]*)"', shown)
        assert len(alts) <= 1
        for alt in alts:
            assert len(alt) > 40, cell.source
            captions += 1
            assert re.match(rf"\*Figure (\d+\.)?{captions}\.\* ", below.source), below.source
    assert len(re.findall(r"(?m)^\*Figure ", text(path))) == captions
    assert all(len(alt) > 40 for image, alt, _ in LINK.findall(text(path)) if image)
    assert "<img" not in text(path)


@a_chapter
def test_it_ends_with_exercises_and_the_way_on(path):
    last = cells(path)[-1].source
    assert re.search(r"(?m)^## Exercises$", text(path)) and "<details>" in last
    around = []
    for step, words in ((-1, "← [{}]({})"), (1, "[{}]({}) →")):
        place = MAIN_ROAD.index(path) + step if path in MAIN_ROAD else -1
        if 0 <= place < len(MAIN_ROAD):
            title = cells(MAIN_ROAD[place])[0].source.splitlines()[0].removeprefix("# ")
            around.append(words.format(title, MAIN_ROAD[place].name))
    assert not around or last.rstrip().splitlines()[-1] == " · ".join(around)


@every_notebook
def test_no_code_cell_hides_its_code(path):
    """Only JupyterLab would hide it: a solution is Markdown, in <details>."""
    assert not [c.source for c in code_cells(path) if "source_hidden" in str(c.metadata)]


SEEN = """[...document.querySelectorAll("details > :not(summary)")]
  .filter((part) => part.checkVisibility()).map((part) => part.textContent)"""


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium")
def test_what_is_folded_is_out_of_sight_in_plain_html(tmp_path):
    """As `jupyter nbconvert --to html` writes it."""
    to_html = HTMLExporter(mathjax_url="", require_js_url="")
    browser = Browser(tmp_path / "profile")
    try:
        for path in NOTEBOOKS:
            page = tmp_path / f"{path.stem}.html"
            page.write_text(to_html.from_filename(path)[0], encoding="utf-8")
            browser.open(page.as_uri())
            shown = "".join(map(folded, code_cells(path))) + text(path)
            folds = browser.run("document.querySelectorAll('details').length")
            assert folds >= shown.count("<details>") > 0, path.name
            assert browser.run(SEEN) == [], path.name
    finally:
        browser.close()


def test_the_running_example_is_the_same_everywhere():
    tagged = [
        cell.source
        for path in MAIN_ROAD[1:6]
        for cell in code_cells(path)
        if "running-example" in cell.metadata.get("tags", ())
    ]
    assert len(tagged) == 5 and len(set(tagged)) == 1
