"""The site's first page as a file: up to date, self-contained, short, and true to notebook 00."""

import json
import re

import jax
import make_page
import numpy as np
import pytest
from pages import MAIN_ROAD, SITE, codes, text

import ledger
from treeattn import attend, finalize

pytestmark = pytest.mark.house

PAGE = SITE / "one_page.html"
SECTIONS = re.findall(r'(?s)<section id="(\w+)">(.*?)</section>', text(SITE / "page" / "page.html"))


def split(page: str) -> tuple[str, dict]:
    """(the page without its data, the data)"""
    begin, found, end = re.split(r'(?s)(?<=id="data">)(.*?)(?=</script>)', page, maxsplit=1)
    return begin + end, json.loads(found)


def test_the_page_has_what_its_sources_say():
    """All but the model's numbers, which take minutes: see the next test."""
    stored, _ = split(text(PAGE))
    assert stored == split(make_page.written({"stored": "elsewhere"}))[0]
    assert PAGE.stat().st_size <= 180_000
    stored = stored.replace("http://www.w3.org/", "")  # names; nothing outside is fetched
    assert not re.search(
        r"https?:|\bsrc=|@import|url\(|<link(?! rel=\"icon\" href=\"data:)", stored
    )


@pytest.mark.slow
def test_the_stored_numbers_are_the_models(monkeypatch):
    """One tree of choices stands for all, since each takes as long as everything else."""
    _, stored = split(text(PAGE))
    trees = stored.pop("trees")
    assert [tree["prompt"] for tree in trees] == make_page.PROMPTS
    monkeypatch.setattr(make_page, "PROMPTS", make_page.PROMPTS[:1])
    with jax.enable_x64(False):  # as the generator runs
        fresh = make_page.numbers()
    jax.tree.map(same, stored | {"trees": trees[:1]}, fresh)
    model = make_page.packaged_model()
    for head in stored["heads"]:  # and they give the model's attention to its own keys
        ids = model.tokenizer.encode("".join(head["words"]))
        q, k, v = list(model.layers_qkv(np.array([ids])))[head["layer"]]
        out, lse = (np.asarray(x)[0, 0, head["head"]] for x in finalize(attend(q[:, -1:], k, v)))
        weights = np.exp(np.array(head["scores"]) - lse)
        np.testing.assert_allclose(weights.sum(), 1, atol=0.002)
        np.testing.assert_allclose(weights @ np.array(head["values"]), out, atol=0.01)


def same(x, y) -> None:
    assert x == y if isinstance(x, str) else abs(x - y) < 0.0021  # machines round differently


@pytest.mark.parametrize(("name", "section"), SECTIONS[:-1], ids=lambda x: x[:9].strip())
def test_a_section_is_short_asks_and_quotes_notebook_00(name, section):
    prose = re.sub(r"(?s)<noscript>.*?</noscript>|<footer>.*?</footer>|<[^>]+>", " ", section)
    told = re.findall(r'(?s)<(?:p|summary)(?! class="hint")[^>]*>(.*?)</(?:p|summary)>', section)
    words = re.sub(r"<[^>]+>", " ", " ".join(told)).split()
    assert len(words) <= 120 and len(prose.split()) <= 220
    assert len(re.findall(r"<summary>[^<]+\?</summary>", section)) == 1
    notebook = text(MAIN_ROAD[0]) + "\n".join(codes(MAIN_ROAD[0]))
    quoted = re.search(r"<footer><code>(.*?)</code>", section)[1]
    assert all(line in notebook for line in re.split(r"(?<=:) (?=new)", quoted)), quoted
    rows = {row["id"] for row in ledger.read()}
    assert set(re.findall(r"ledger\.ipynb#([\w-]+)", section)) <= rows
    for place in re.findall(r'href="(\.\./[^"#]+)', section):
        assert (SITE / place).exists(), place
