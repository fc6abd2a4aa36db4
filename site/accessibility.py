"""Faults that axe-core, the usual checker of accessibility, finds in pages in headless Chromium.

The check also finds elements wider than the window, or, on the API's page, than their frame. axe is
taken from the package axe-playwright-python, without the playwright that the package asks for.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).parent.parent / "checks"))
from browser import Browser, chromium

# It need not fetch the styles anew, which a page of a file may not.
RUN = """axe.run({preload: false}).then(({violations}) => violations.map(({id, impact, nodes}) =>
  `${impact}: ${id}, ${nodes.length} times, as at ${nodes[0].target.join(" ")}`))"""
# What MathJax is still about to set, axe would meet half done, and MathJax would fail.
SET = """new Promise(done => window.MathJax?.Hub
  ? MathJax.Hub.Register.StartupHook("End", () => done(true)) : done(false))"""
WIDE = """[...(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []),
  ...[...document.querySelectorAll("dl.py pre, dl.py dt")]
    .filter((x) => x.scrollWidth > x.clientWidth + 1).map((x) => x.textContent.slice(0, 40))]"""
PHONE = {"prefers_color_scheme": "light", "width": 390}
DARK = {"prefers_color_scheme": "dark"}
VIEWS = {  # of the other pages, one
    "api.html": (PHONE, DARK),
    "index.html": (PHONE, DARK, PHONE | DARK, {"prefers_color_scheme": "light", "width": 1400}),
}


def violations(pages: list[Path]) -> list[str] | None:
    """The serious faults of each page on a phone, and of some in the dark and on a wide screen.

    None without a browser or axe.
    """
    package = importlib.util.find_spec("axe_playwright_python")
    if chromium() is None or package is None:
        return None
    axe = (Path(package.submodule_search_locations[0]) / "axe.min.js").read_text("utf-8")
    found = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile), seconds=300)
        for page in tqdm(pages, "checking the pages in Chromium", unit="page"):
            for view in VIEWS.get(page.name, (PHONE,)):
                browser.open(page.resolve().as_uri(), prefers_reduced_motion="reduce", **view)
                browser.run(SET)
                browser.run(f"{axe};1")
                ours = page.name == "index.html"  # Sphinx and Furo make the others
                found_here = browser.run(RUN)
                wrong = [x for x in found_here if ours or x.startswith(("serious", "critical"))]
                wrong += [f"wider than {view}: {x}" for x in browser.run(WIDE)]
                found += [f"{page.name}: {x}" for x in wrong]
        browser.close()
        # MathJax, before it finds its fonts, looks for one at about:blank.
        found += [x for x in browser.errors if "about:blank" not in x and "ERR_FAILED" not in x]
    return found
