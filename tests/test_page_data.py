"""The site's first page as a file: up to date, self-contained, short, and true to notebook 00."""

import importlib
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from treeattn import attend, finalize

SITE = Path(__file__).parent.parent / "site"
PAGE = SITE / "one_page.html"
NOTEBOOK = SITE.parent / "notebooks" / "00_tree_attention_in_one_sitting.ipynb"
TEMPLATE = (SITE / "page" / "page.html").read_text("utf-8")
SECTIONS = dict(re.findall(r'(?s)<section id="(\w+)">(.*?)</section>', TEMPLATE))
LESSONS = [name for name in SECTIONS if name != "install"]


def split(page: str) -> tuple[str, dict]:
    """(the page without its data, the data)"""
    begin, found, end = re.split(r'(?s)(?<=id="data">)(.*?)(?=</script>)', page, maxsplit=1)
    return begin + end, json.loads(found)


@pytest.fixture(scope="module")
def generator():
    """site/make_page.py, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        return importlib.import_module("make_page")


def test_the_page_has_what_its_sources_say(generator):
    """All but the model's numbers, which take minutes: see the next test."""
    stored, _ = split(PAGE.read_text("utf-8"))
    parts = generator.written({"stored": "elsewhere"})
    assert stored == split(parts)[0]
    assert PAGE.stat().st_size <= 180_000


@pytest.mark.slow
def test_the_stored_numbers_are_the_models(generator):
    stored = split(PAGE.read_text("utf-8"))[1]
    with jax.enable_x64(False):  # as the generator runs
        fresh = generator.numbers()
    kept, made = jax.tree.flatten(stored), jax.tree.flatten(fresh)
    assert kept[1] == made[1]
    for x, y in zip(kept[0], made[0], strict=True):  # machines round differently
        assert x == y if isinstance(x, str) else abs(x - y) < 0.0021
    model = generator.packaged_model()
    for head in stored["heads"]:  # and they give the model's attention to its own keys
        ids = model.tokenizer.encode("".join(head["words"]))
        q, k, v = list(model.layers_qkv(np.array([ids])))[head["layer"]]
        out, lse = (np.asarray(x)[0, 0, head["head"]] for x in finalize(attend(q[:, -1:], k, v)))
        weights = np.exp(np.array(head["scores"]) - lse)
        assert abs(weights.sum() - 1) < 0.002
        np.testing.assert_allclose(weights @ np.array(head["values"]), out, atol=0.01)


@pytest.mark.parametrize("section", LESSONS)
def test_a_section_is_short_asks_and_quotes_notebook_00(section):
    text = SECTIONS[section]
    prose = re.sub(r"(?s)<noscript>.*?</noscript>|<footer>.*?</footer>|<[^>]+>", " ", text)
    told = re.findall(r'(?s)<(?:p|summary)(?! class="hint")[^>]*>(.*?)</(?:p|summary)>', text)
    words = re.sub(r"<[^>]+>", " ", " ".join(told)).split()
    assert len(words) <= 120 and len(prose.split()) <= 220, section
    assert len(re.findall(r"<summary>[^<]+\?</summary>", text)) == 1
    code = "".join(
        line for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] for line in cell["source"]
    )
    quoted = re.search(r"<footer><code>(.*?)</code>", text)[1]
    for line in re.split(r"(?<=:) (?=new)", quoted):
        assert line in code, line
    rows = (SITE.parent / "notebooks" / "ledger.tsv").read_text("utf-8")
    for row in re.findall(r"ledger\.ipynb#([\w-]+)", text):
        assert f"\n{row}\t" in rows
    for place in re.findall(r'href="(\.\./[^"#]+)', text):
        assert (SITE / place).exists(), place


def test_nothing_outside_the_page_is_fetched():
    text = split(PAGE.read_text("utf-8"))[0].replace("http://www.w3.org/", "")  # names, no links
    assert not re.search(r"https?:|\bsrc=|@import|url\(|<link(?! rel=\"icon\" href=\"data:)", text)
