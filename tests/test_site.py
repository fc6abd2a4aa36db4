"""What the site is made with: the check of its links, and the page of the API."""

import inspect
import re
import sys
from pathlib import Path

import pytest

import treeattn
import treeattn.llama

SITE = Path(__file__).parent.parent / "site"


@pytest.fixture
def site(monkeypatch):
    """The modules beside site/build.py can be imported."""
    monkeypatch.syspath_prepend(str(SITE))
    yield
    for name in ("docstrings", "ledger", "links"):
        sys.modules.pop(name, None)


def test_broken_links_and_what_needs_a_network_are_found(site, tmp_path):
    from links import broken, fetched

    (tmp_path / "a b.html").write_text('<h1 id="here">one</h1><a href="#here">fine</a>')
    (tmp_path / "two.html").write_text(
        """<a href="a%20b.html#here">fine</a> <a href="https://nowhere.invalid/x">not followed</a>
        <a href="a%20b.html#there">no such place</a> <a href="three.html">no such page</a>
        <img src="four.png"> <script src="https://cdn.invalid/x.js"></script>"""
    )
    pages = sorted(tmp_path.glob("*.html"))
    wanted = ["a%20b.html#there", "four.png", "three.html"]
    assert broken(pages) == [f"two.html: {link}" for link in wanted]
    assert fetched(pages) == ["two.html: https://cdn.invalid/x.js"]


def test_the_api_has_every_public_name_once():
    """Those of treeattn by name; autodoc lists those of the modules that stand there whole."""
    page = (SITE / "api.md").read_text("utf-8")
    entries = re.findall(r"^\.\. auto(?:class|function):: (\w+)", page, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(entries) == set(treeattn.__all__) | set(treeattn.llama.__all__)
    whole = re.findall(r"^\.\. automodule:: ([\w.]+)", page, re.MULTILINE)
    assert whole == ["treeattn.cost", "treeattn.conformance"]


def test_the_ledgers_page_has_every_row(site):
    from ledger import ledger_page, line, read

    page, rows = ledger_page(), read()
    for row in rows:
        assert page.count(f'<a id="{row["id"].lower()}"></a>') == 1
    assert line(next(row for row in rows if row["id"] == "v1-E04")) == (
        '| <a id="v1-e04"></a>eq. 4 | '
        "A running denominator, d\\_i = d\\_{i−1} + s\\_i, and z = n/d."
        " | **checked** | [01, Notation](notebooks/01_the_energy_function.ipynb#notation)<br>"
        "`test_printed.py::test_running_sums_are_attention` |"
    )


def test_a_docstring_as_restructured_text(site):
    from docstrings import as_restructured_text

    text = """One line about `merge`, a*b and m_i:
    NaN: not a name's line, since the paragraph began before it.

    axis:  an axis
           of two lines
    """
    lines = inspect.cleandoc(text).split("\n")
    as_restructured_text(None, "function", "f", None, None, lines)
    assert lines == [
        r"One line about `merge`, a\*b and m\_i:",
        "NaN: not a name's line, since the paragraph began before it.",
        "",
        "::",
        "",
        "    axis:  an axis",
        "           of two lines",
        "",
    ]
