"""What the site is made with: the check of its links, the page of the API, the ledger's rows."""

import inspect
import re
import shutil
from xml.etree import ElementTree

import mistune
import pytest
from browser import Browser, chromium
from bs4 import BeautifulSoup
from docstrings import as_restructured_text
from faults import anchors, fault_links, names_page
from found import for_the_site, write_for_finders
from links import Page, broken, fetched
from llms import llms_text
from pages import NOTEBOOKS, REPOSITORY, SITE, text

import ledger
import treeattn

pytestmark = pytest.mark.house

ROWS = ledger.read()


def test_broken_links_and_what_needs_a_network_are_found(tmp_path):
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


def test_the_site_is_found_and_a_lost_visitor_finds_back(tmp_path):
    (tmp_path / "a").mkdir()
    pages = [tmp_path / "index.html", tmp_path / "a" / "b&c.html"]
    write_for_finders(pages, tmp_path, "")
    assert {x.name for x in tmp_path.glob("*.*")} == {"404.html"}  # a sitemap needs an address
    write_for_finders(pages, tmp_path, "https://x.invalid/docs/")
    urls = ElementTree.parse(tmp_path / "sitemap.xml").getroot()
    found = [url[0].text.removeprefix("https://x.invalid/docs/") for url in urls]
    assert found == ["a/b&c.html", "index.html"]
    assert '<base href="https://x.invalid/docs/">' in text(tmp_path / "404.html")


def test_the_api_has_every_public_name_once():
    """Those of the core by name; autodoc lists those of the other two packages."""
    page = text(SITE / "api.md")
    entries = re.findall(r"(?m)^\.\. auto(?:class|function|data):: (\w+)", page)
    missing = set(entries) ^ set(treeattn.__all__)
    assert not missing and len(entries) == len(treeattn.__all__), f"site/api.md: {missing}"
    whole = re.findall(r"(?m)^\.\. automodule:: ([\w.]+)", page)
    assert whole == ["treeattn_llama", "treeattn_conformance"]


def test_every_mistake_has_an_address_of_its_own():
    wanted = list(anchors())
    rows = text(REPOSITORY / "conformance" / "names.md")
    assert rows == names_page(), "python site/faults.py"
    assert sorted(re.findall(r'<a id="([^"]+)"></a>', rows)) == sorted(wanted)
    assert len(set(wanted)) == len(wanted) > 50
    pages = [*SITE.glob("*.md"), *REPOSITORY.glob("*.md"), *REPOSITORY.glob("*/README.md")]
    linked = "".join(fault_links(text(page), "") for page in pages)
    linked = set(re.findall(r'href="conformance/names\.html#([^"]+)"', linked))
    assert linked and linked <= set(wanted)
    kept = "[x](conformance/README.md#a-merge)"
    assert fault_links(kept, "../") == kept


def test_llms_txt_names_pages_that_are_there():
    links = re.findall(r"\[(\S+).*?\]\(([^)#]+)\.html(?:#[^)]*)?\)", llms_text())
    made = {"ledger", "api"}
    for link in {link for _, link in links} - made:
        there = [top / f"{link}{kind}" for top in (REPOSITORY, SITE) for kind in (".md", ".ipynb")]
        assert any(x.exists() for x in there), link
    named = {path.relative_to(REPOSITORY).with_suffix("").as_posix() for path in NOTEBOOKS}
    assert named <= {link for _, link in links}
    assert {f"treeattn.{name}" for name in treeattn.__all__} <= {name for name, _ in links}


def test_the_one_page_is_the_first_page(tmp_path):
    (tmp_path / "index.html").write_text(for_the_site(text(SITE / "one_page.html")), "utf-8")
    before, after = Page(SITE / "one_page.html").links, Page(tmp_path / "index.html").links
    assert len(after) == len(before) and not any(link.startswith("..") for link in after)
    wanted = {"contents.html", "ledger.html#2024-C02"}
    assert wanted | {"labs/cost/how_to_shard_a_cache.html#prefill"} <= after


def test_a_docstring_as_restructured_text():
    lines = inspect.cleandoc("""One line about `merge`, a*b and m_i:
    NaN: not a name's line, since the paragraph began before it.

    q, k:  arrays
    axis:  an axis
           of two lines, as in:

               f(axis)

    >>> merge(a, b)
    """).split("\n")
    as_restructured_text(None, "function", "f", None, None, lines)
    assert (
        "\n".join(lines)
        == r"""One line about `merge`, a\*b and m\_i:
NaN: not a name's line, since the paragraph began before it.

``q, k``
    arrays
``axis``
    an axis of two lines, as in:

    .. code-block:: text

        f(axis)

.. code-block:: pycon

    >>> merge(a, b)
"""
    )


# ---------------------------------------------------------------- the ledger's page


@pytest.fixture(scope="module")
def html() -> str:
    """The ledger's page, near enough to what Sphinx makes of it: a section for each source."""
    html = mistune.create_markdown(escape=False, plugins=["table"])(ledger.ledger_page())
    sections = "</section><section>".join(re.split("(?=<h2)", html))
    return f"<!doctype html><meta charset=utf-8><title>x</title><section>{sections}</section>"


def test_the_ledgers_page_has_every_row(html):
    page = BeautifulSoup(html, "html.parser")
    found = page.select("a.row")
    assert [a["id"] for a in found] == [row["id"] for row in ROWS]
    assert {a["href"][1:] for a in page.select("a[href^='#']")} == {row["id"] for row in ROWS}
    for a, row in zip(found, ROWS, strict=True):
        line = a.find_parent("tr")
        assert line.q.text == row["quote"] and line.strong.text == row["verdict"]
        assert row["says"] in line.text and row["note"].replace("`", "") in line.text
        assert (a["data-source"], a["data-verdict"]) == (row["source"], row["verdict"])
        assert len(line.select('a[href*=".ipynb#"]')) == len(ledger.parts(row["notebook"]))
        tests = [ledger.short(test) for test in ledger.parts(row["test"])]
        assert {*tests} <= {code.text for code in line.select("code")}


@pytest.mark.slow
def test_the_ledgers_rows_are_found_and_filtered_in_a_browser(html, tmp_path):
    """By keyboard, from a file, without a server or a network."""
    if chromium() is None:
        pytest.skip("there is no Chromium")
    (tmp_path / "_static").mkdir()
    shutil.copy(SITE / "static" / "ledger.js", tmp_path / "_static")
    page = tmp_path / "ledger.html"
    page.write_text(html, encoding="utf-8")
    browser = Browser(tmp_path / "profile")
    browser.open(page.as_uri())

    def shown_are(test) -> bool:
        wanted = str([row["id"] for row in ROWS if test(row)]).replace("'", '"')
        rows = "[...document.querySelectorAll('a.row')].filter((a) => !a.closest('tr').hidden)"
        return browser.wait(f"`${{{rows}.map((a) => a.id)}}` === `${{{wanted}}}`")

    assert shown_are(lambda row: True)
    for words, where in {
        "saddle": lambda row: re.search(r"\bsaddle\b", row["note"]),  # and nowhere else
        "transfer seamlessly": lambda row: row["id"] in ("2024-C58", "2025-C84"),
        "反向传播": lambda row: row["id"] == "expl-C16",
        "pack-U3": lambda row: row["id"] == "pack-U3",
    }.items():
        browser.run("document.querySelector('[name=find]').select()")
        browser.type(words)
        assert shown_are(where)
    assert browser.run("location.search") == "?find=pack-U3"
    browser.open(f"{page.as_uri()}?find=saddle&verdict=wrong+as+printed")  # a link to a search
    assert shown_are(lambda row: "saddle" in row["note"])
    browser.open(f"{page.as_uri()}?find=pack-U3")
    browser.run("document.querySelector('[name=find]').focus()")
    sections = "[...document.querySelectorAll('section')].filter((s) => s.hidden).length"
    assert browser.run(sections) == 4  # sources with no such row
    browser.press("Escape")
    assert shown_are(lambda row: True)
    for _ in range(2):  # to the next field, and on
        browser.press("Tab")
    assert browser.run("document.activeElement.name") == "verdict"
    browser.run("document.activeElement.value = 'wrong as printed'")
    browser.run("document.activeElement.dispatchEvent(new Event('input', {bubbles: true}))")
    assert shown_are(lambda row: row["verdict"] == "wrong as printed")
    number = sum(row["verdict"] == "wrong as printed" for row in ROWS)
    said = browser.run("document.querySelector('output').textContent")
    assert said == f"{number} of {len(ROWS)} rows"
    browser.run("location.hash = '#2024-C58'")  # a row that is hidden now
    assert shown_are(lambda row: True)
    browser.close()
    assert browser.errors == []
