"""What the site is made with: the check of its links, and the page of the API."""

import inspect
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import Browser, chromium
from readme_blocks import blocks, run

import treeattn

SITE = Path(__file__).parent.parent / "site"


@pytest.fixture
def site(monkeypatch):
    """The modules beside site/build.py can be imported."""
    monkeypatch.syspath_prepend(str(SITE))
    yield
    for name in ("docstrings", "faults", "found", "ledger", "links", "llms"):
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


def test_the_site_is_found_and_a_lost_visitor_finds_back(site, tmp_path):
    from found import write_for_finders

    (tmp_path / "a").mkdir()
    pages = [tmp_path / "index.html", tmp_path / "a" / "b&c.html"]
    write_for_finders(pages, tmp_path, "")
    assert {x.name for x in tmp_path.glob("*.*")} == {"404.html"}  # a sitemap needs an address
    write_for_finders(pages, tmp_path, "https://x.invalid/docs/")
    urls = ElementTree.parse(tmp_path / "sitemap.xml").getroot()
    found = [url[0].text.removeprefix("https://x.invalid/docs/") for url in urls]
    assert found == ["a/b&c.html", "index.html"]
    assert '<base href="https://x.invalid/docs/">' in (tmp_path / "404.html").read_text("utf-8")


def test_the_api_has_every_public_name_once():
    """Those of the core by name; autodoc lists those of the other two packages."""
    page = (SITE / "api.md").read_text("utf-8")
    entries = re.findall(r"^\.\. auto(?:class|function):: (\w+)", page, re.MULTILINE)
    assert sorted(entries) == sorted(treeattn.__all__)
    whole = re.findall(r"^\.\. automodule:: ([\w.]+)", page, re.MULTILINE)
    assert whole == ["treeattn_llama", "treeattn_conformance"]


HOW_TO = [(page, block) for page in sorted(SITE.glob("howto_*.md")) for block in blocks(page)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), HOW_TO, ids=lambda x: getattr(x, "stem", ""))
def test_the_answers_of_how_do_i_run(page, block):
    assert run(block.code) == block.prints != ""


def test_the_ledgers_page_has_every_row(site):
    from ledger import ledger_page, line, read

    page, rows = ledger_page(), read()
    ids = {row["id"] for row in rows}
    for id in ids:
        assert page.count(f'<a id="{id}" class="row" href="#{id}"') == 1
    row = next(row for row in rows if row["id"] == "2024-E04")
    assert line(row, ids, "en") == (
        '| <a id="2024-E04" class="row" href="#2024-E04" data-source="2024 text" '
        'data-verdict="checked">2024-E04</a><br>eq. 4 | '
        "A running denominator, d\\_i = d\\_{i−1} + s\\_i, and z = n/d."
        '<br><q lang="en">d&#95;i&#94;&#123;&#40;j&#41;&#125; &#61; '
        "d&#95;&#123;i&#45;1&#125;&#94;&#123;&#40;j&#41;&#125; &#43; "
        "s&#95;i&#94;&#123;&#40;j&#41;&#125; &#92;quad &#40;4&#41;</q>"
        ' | **checked** (As <a href="#2025-E03">2025-E03</a>.)'
        " | [01, 3. A key is a dual number]"
        "(notebooks/01_the_energy_function.ipynb#3-a-key-is-a-dual-number)<br>"
        "`test_printed.py::test_running_sums_are_attention` |"
    )
    linked = set(re.findall(r'<a href="#([^"]+)">', page))
    assert linked and linked <= ids


def test_every_mistake_has_an_address_of_its_own(site):
    from faults import anchors, fault_links

    wanted = list(anchors())
    rows = (SITE.parent / "conformance" / "names.md").read_text("utf-8")
    assert sorted(re.findall(r'<a id="([^"]+)"></a>', rows)) == sorted(wanted)
    assert len(set(wanted)) == len(wanted) > 50
    pages = [*SITE.glob("*.md"), *SITE.parent.glob("*.md"), *SITE.parent.glob("*/README.md")]
    text = "".join(fault_links(page.read_text("utf-8"), "") for page in pages)
    linked = set(re.findall(r'href="conformance/names\.html#([^"]+)"', text))
    assert linked and linked <= set(wanted)
    kept = "[x](conformance/README.md#a-merge) [y](../conformance/names.md#merge-log-base-2)"
    row = '<a href="../conformance/names.html#merge-log-base-2">y</a>'
    assert fault_links(kept, "../") == f"[x](conformance/README.md#a-merge) {row}"


@pytest.mark.parametrize("page", sorted(SITE.glob("*.md")), ids=lambda x: x.name)
def test_links_of_the_sites_pages_work_in_a_checkout(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8"))
    made = {"ledger.md"}  # by the site's build
    assert [x for x in links if x not in made and not (SITE / x).exists()] == []


def test_llms_txt_names_pages_that_are_there(site):
    from llms import NOTEBOOKS, llms_text

    text = llms_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert all(x.endswith(".html") for x in links)
    made = {"ledger", "api"}
    for link in set(links):
        place = SITE.parent / link
        there = [place, SITE / link]
        sources = [x.with_suffix(kind) for x in there for kind in (".md", ".ipynb")]
        assert any(x.exists() for x in sources) or place.stem in made, link
    notebooks = {path.stem for kind in NOTEBOOKS for path in SITE.parent.glob(kind)}
    assert notebooks <= {Path(x).stem for x in links}
    assert {f"treeattn.{name}" for name in treeattn.__all__} <= set(re.findall(r"\[(\S+)\]", text))


def test_the_one_page_is_the_first_page(site, tmp_path):
    from found import for_the_site
    from links import Page

    stored = (SITE / "one_page.html").read_text("utf-8")
    (tmp_path / "index.html").write_text(for_the_site(stored), encoding="utf-8")
    before, after = Page(SITE / "one_page.html").links, Page(tmp_path / "index.html").links
    assert len(after) == len(before) and not any(link.startswith("..") for link in after)
    wanted = {
        "contents.html",
        "ledger.html#2024-C02",
        "labs/cost/how_to_shard_a_cache.html#prefill",
    }
    assert wanted <= after


def as_html(markdown: str) -> str:
    """The page as a browser gets it, near enough: headings, tables, links and strong words."""
    lines, table = [], False
    for text in markdown.splitlines():
        if text.startswith("|"):
            cells = re.split(r" \| ", text.strip("| "))
            lines.append("<table>" * (not table))
            lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
            table = True
            continue
        lines.append("</table></section>" * table)
        table = False
        title = text.startswith("## ")
        lines.append(f"<section><h2>{text[3:]}</h2>" if title else text)
    html = "\n".join([*lines, "</table></section>" * table])
    html = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', html)
    html = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html)
    return f"<!doctype html><meta charset=utf-8><title>x</title>{html}"


@pytest.mark.slow
def test_the_ledgers_rows_are_found_and_filtered_in_a_browser(site, tmp_path):
    """By keyboard, from a file, without a server or a network."""
    from ledger import ledger_page, read

    if chromium() is None:
        pytest.skip("there is no Chromium")
    (tmp_path / "_static").mkdir()
    shutil.copy(SITE / "static" / "ledger.js", tmp_path / "_static")
    page = tmp_path / "ledger.html"
    page.write_text(as_html(ledger_page()), encoding="utf-8")
    rows = read()
    browser = Browser(tmp_path / "profile")

    def shown() -> list[str]:
        return browser.run(
            "[...document.querySelectorAll('a.row')].filter((a) => !a.closest('tr').hidden)"
            ".map((a) => a.textContent)"
        )

    def wanted(test) -> list[str]:
        return [row["id"] for row in rows if test(row)]

    try:
        browser.open(page.as_uri())
        assert shown() == wanted(lambda row: True)
        browser.run("document.querySelector('[name=find]').focus()")
        browser.type("saddle")  # in a note, and nowhere else
        assert shown() == wanted(lambda row: re.search(r"\bsaddle\b", row["note"]))
        assert len(shown()) == 2
        hidden = "[...document.querySelectorAll('section')].filter((s) => s.hidden).length"
        assert browser.run(hidden) == 3  # sources with no such row
        browser.press("Escape")
        browser.run("new Promise((done) => setTimeout(done, 50))")
        assert len(shown()) == len(rows)
        for words, ids in (
            ("transfer seamlessly", {"2024-C58", "2025-C84"}),
            ("反向传播", {"expl-C16"}),
            ("liền mạch", {"2025-C84"}),
            ("pack-U3", {"pack-U3"}),
        ):
            browser.run("document.querySelector('[name=find]').select()")
            browser.type(words)
            assert set(shown()) == ids, words
        browser.press("Escape")
        browser.run("new Promise((done) => setTimeout(done, 50))")
        # To the next field, and the verdict by its first letters.
        browser.press("Tab")
        browser.press("Tab")
        assert browser.run("document.activeElement.name") == "verdict"
        browser.run(
            "document.activeElement.value = 'wrong as printed';"
            "document.activeElement.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        wrong = wanted(lambda row: row["verdict"] == "wrong as printed")
        assert shown() == wrong
        said = browser.run("document.querySelector('output').textContent")
        assert said == f"{len(wrong)} of {len(rows)} rows"
        browser.run(
            "document.querySelector('[name=notebook]').value = '02';"
            "document.querySelector('[name=notebook]')"
            ".dispatchEvent(new Event('input', {bubbles: true}))"
        )
        assert shown() == [id for id in wrong if id in wanted(lambda r: "02: " in r["notebook"])]
        browser.run("location.hash = '#2024-C58'")  # a row that is hidden now
        browser.run("new Promise((done) => setTimeout(done, 100))")
        assert len(shown()) == len(rows)
        assert browser.errors == []
    finally:
        browser.close()


def test_a_docstring_as_restructured_text(site):
    from docstrings import as_restructured_text

    text = """One line about `merge`, a*b and m_i:
    NaN: not a name's line, since the paragraph began before it.

    q, k:  arrays
    axis:  an axis
           of two lines, as in:

               f(axis)

           and so on.

    >>> merge(a, b)
    """
    lines = inspect.cleandoc(text).split("\n")
    as_restructured_text(None, "function", "f", None, None, lines)
    assert lines == [
        r"One line about `merge`, a\*b and m\_i:",
        "NaN: not a name's line, since the paragraph began before it.",
        "",
        "``q, k``",
        "    arrays",
        "``axis``",
        "    an axis of two lines, as in:",
        "",
        "    .. code-block:: text",
        "",
        "        f(axis)",
        "",
        "    and so on.",
        "",
        ".. code-block:: pycon",
        "",
        "    >>> merge(a, b)",
        "",
    ]
