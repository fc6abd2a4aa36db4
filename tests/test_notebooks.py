"""What nbval does not notice: cells never executed, stored errors, notebooks too large to show."""

import base64
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import nbformat
import numpy as np
import pytest

REPOSITORY = Path(__file__).parent.parent
MAIN_ROAD = sorted(REPOSITORY.glob("notebooks/*.ipynb"))
DEEPER = sorted(REPOSITORY.glob("notebooks/deeper/*.ipynb"))
BESIDE = sorted(REPOSITORY.glob("labs/*/*.ipynb"))
LINK = r"(!?)\[([^\]]*)\]\(([^)\s]+)\)"


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(params=[*MAIN_ROAD, *DEEPER, *BESIDE], ids=lambda path: path.stem)
def notebook(request):
    return request.param, read(request.param)


@pytest.fixture(params=[*MAIN_ROAD, *DEEPER], ids=lambda path: path.stem)
def told(request):
    """(path, its cells as (type, source, cell))"""
    cells = read(request.param)["cells"]
    return request.param, [(c["cell_type"], "".join(c["source"]), c) for c in cells]


def code_cells(content) -> list[dict]:
    return [
        c for c in content["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()
    ]


def test_there_are_notebooks():
    assert len(MAIN_ROAD) == 11 and DEEPER and BESIDE


@pytest.fixture
def execute():
    """notebooks/execute.py, as a module."""
    path = REPOSITORY / "notebooks" / "execute.py"
    spec = importlib.util.spec_from_file_location("execute", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_make_run_executes(execute):
    assert execute.chosen([], everything=False) == MAIN_ROAD
    assert sorted(execute.chosen([], everything=True)) == sorted([*MAIN_ROAD, *DEEPER, *BESIDE])
    assert execute.chosen(["05", str(DEEPER[0])], everything=False) == [MAIN_ROAD[5], DEEPER[0]]


def test_links_lead_from_the_html_where_they_led_from_the_notebook(execute):
    deeper = REPOSITORY / "notebooks" / "deeper"
    for text, moved in {
        "![levers](../../figures/levers.png)": "![levers](../figures/levers.png)",
        "[10](../10_ledger.ipynb#Verdicts)": "[10](10_ledger.html#Verdicts)",
        "[bits](../../labs/exact/the_same_bits.ipynb)": "[bits](../labs/exact/the_same_bits.ipynb)",
        "[a](https://b.org/c_d) [e](#f) `x[0](y)`": "[a](https://b.org/c_d) [e](#f) `x[0](y)`",
    }.items():
        assert execute.seen_from_build(text, deeper) == moved


def test_every_cell_was_executed_in_order(notebook):
    """nbval lets a cell pass that has neither an output nor an execution count."""
    _, content = notebook
    counts = [cell["execution_count"] for cell in code_cells(content)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_stored_errors_or_warnings(notebook):
    _, content = notebook
    for cell in code_cells(content):
        for output in cell["outputs"]:
            assert output.get("name") != "stderr", "".join(output["text"])
            if output["output_type"] == "error":
                assert "raises-exception" in cell["metadata"].get("tags", ())


def test_no_stored_text_that_changes_between_runs(notebook):
    _, content = notebook
    for cell in code_cells(content):
        if "nbval-ignore-output" in cell["metadata"].get("tags", ()):
            continue
        for output in cell["outputs"]:
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            found = re.search(r"\bat 0x[0-9a-f]+|/home/|/tmp/|/work/", "".join(text))
            assert not found, found


def test_it_is_pleasant_to_read(notebook):
    path, content = notebook
    assert path.stat().st_size < 500_000
    lines = [
        sum(bool(line.strip()) for line in "".join(cell["source"]).splitlines())
        for cell in code_cells(content)
    ]
    assert max(lines) <= 25 and median(lines) <= 8
    assert content["cells"][0]["cell_type"] == "markdown"
    end = "".join("".join(c["source"]) for c in content["cells"][-3:])
    assert "Exercises" in end, "no section Exercises in its last three cells"


@pytest.mark.slow
def test_the_first_notebook_needs_jax_and_numpy_alone(tmp_path):
    """It prints what it prints beside the package, which it only compares itself with."""
    cells = code_cells(read(MAIN_ROAD[0]))
    hidden = ("treeattn", "figures", "jaxtyping", "matplotlib", "sympy")
    code = [f"import sys\nsys.modules.update(dict.fromkeys({hidden}))"]  # None: not to be had
    code += ["".join(cell["source"]) for cell in cells]
    (tmp_path / "sitting.py").write_text("\n\n".join(code), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "sitting.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "".join(
        "".join(output["text"]) for cell in cells for output in cell["outputs"]
    )


def test_the_first_notebook_brings_its_pictures():
    """It is one file: somebody may open it without the folder that it comes from."""
    shown = set()
    for cell in read(MAIN_ROAD[0])["cells"]:
        names = {name for image, _, name in re.findall(LINK, "".join(cell["source"])) if image}
        attached = cell.get("attachments", {})
        assert names == {f"attachment:{name}" for name in attached}
        for name, picture in attached.items():
            drawn = (REPOSITORY / "figures" / name).read_bytes()
            assert base64.b64decode(picture["image/png"]) == drawn, f"make refresh: {name}"
        shown |= names
    assert len(shown) == 4


# ---------------------------------------------------------------- conventions


def texts(cells) -> str:
    return "\n\n".join(source for kind, source, _ in cells if kind == "markdown")


def title(path: Path) -> str:
    return "".join(read(path)["cells"][0]["source"]).splitlines()[0].removeprefix("# ")


def test_links_to_files_resolve(notebook):
    path, content = notebook
    for cell in content["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        for _, _, target in re.findall(LINK, "".join(cell["source"])):
            if not re.match(r"https?:|#|attachment:", target):
                assert (path.parent / target.split("#")[0]).exists(), target


def test_it_opens_with_a_question_and_a_picture(told):
    path, cells = told
    kind, first, _ = cells[0]
    number = f"{path.stem.partition('_')[0]} · " if path in MAIN_ROAD else ""
    assert kind == "markdown" and first.startswith(f"# {number}")
    assert re.search(r"\*\*[^*]+\?\*\*", first), "a question"
    assert any(image and len(alt) > 40 for image, alt, _ in re.findall(LINK, first)), "a picture"
    assert re.search(r"\bYou need\b", first), "what it needs"
    assert any(kind == "code" for kind, *_ in cells[1:4])


def test_each_figure_has_an_alternative_text_and_a_caption(told):
    _, cells = told
    captions = 0
    for i, (_, _, cell) in enumerate(cells):
        pictures = [o for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
        assert len(pictures) <= 1
        for picture in pictures:
            assert len(picture["metadata"]["image/png"]["alt"]) > 40, i
            captions += 1
            kind, below, _ = cells[i + 1]
            assert kind == "markdown", i
            assert re.match(rf"\*Figure (\d+\.)?{captions}\.\* ", below), below[:40]
    assert len(re.findall(r"^\*Figure ", texts(cells), re.MULTILINE)) == captions
    for image, alt, target in re.findall(LINK, texts(cells)):
        assert not image or len(alt) > 40, target
    assert "<img" not in texts(cells)


def test_it_ends_with_exercises_and_the_way_on(told):
    path, cells = told
    heads = [source.split("\n")[0] for kind, source, _ in cells if kind == "markdown"]
    last = cells[-1][1]
    assert "## Exercises" in heads + last.splitlines() and "<details>" in last
    if path not in MAIN_ROAD:
        return
    place = MAIN_ROAD.index(path)
    around = []
    if place:
        before = MAIN_ROAD[place - 1]
        around.append(f"← [{title(before)}]({before.name})")
    if place + 1 < len(MAIN_ROAD):
        after = MAIN_ROAD[place + 1]
        around.append(f"[{title(after)}]({after.name}) →")
    assert last.rstrip().splitlines()[-1] == " · ".join(around)


def test_each_prediction_has_a_hidden_output(notebook):
    """Until the next prediction or section; and nothing else is hidden."""
    _, content = notebook
    predictions, answered, open_ = 0, set(), False
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            hidden = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            assert not hidden or (open_ and cell["outputs"]), source
            answered |= {predictions} if hidden else set()
            continue
        open_ = open_ and not re.search(r"(?m)^##", source)
        _, predict, asked = source.rpartition("**Predict")
        if predict and "<details>" not in asked:  # or the answer is folded right there
            predictions, open_ = predictions + 1, True
    without = set(range(1, predictions + 1)) - answered
    assert not without, f"no hidden output answers prediction {without}: see CONTRIBUTING.md"
    assert answered == set(range(1, predictions + 1))


@pytest.mark.parametrize("hidden", ["outputs_hidden", "source_hidden", None])
def test_what_is_hidden_is_folded_in_html(execute, hidden):
    output = nbformat.v4.new_output("stream", text="as you thought")
    metadata = {"jupyter": {hidden: True}} if hidden else {}
    cell = nbformat.v4.new_code_cell("solved", metadata=metadata, outputs=[output])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    html = execute.as_html(notebook, REPOSITORY, execute.exporter())
    source, shown = html[html.index("<body") :].split("solved")
    assert ("<details" in source) == (hidden == "source_hidden")
    assert ("<details" in shown.partition("as you thought")[0]) == (hidden == "outputs_hidden")


def test_the_running_example_is_the_same_everywhere():
    copies = {}
    for path in [p for p in MAIN_ROAD if p.name[:2] in ("01", "02", "03", "04", "05")]:
        cells = code_cells(read(path))
        tagged = [c for c in cells if "running-example" in c["metadata"].get("tags", ())]
        assert len(tagged) == 1, path.stem
        copies[path.stem] = "".join(tagged[0]["source"]).strip()
    assert len(set(copies.values())) == 1, copies
    names = {"np": np}
    exec(next(iter(copies.values())), names)
    weights = np.exp(names["k"] @ names["q"])
    np.testing.assert_allclose(weights, [1, 2, 4, 1, 8])
    np.testing.assert_allclose(weights @ names["v"] / weights.sum(), [1.25, 2.25])
    assert names["words"] == ["the", "cat", "drank", "warm", "milk"]
