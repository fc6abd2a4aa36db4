"""How the site is found: its first page, its card, a sitemap, and a page for lost visitors."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from html import escape
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "checks"))
from browser import Browser, chromium

FIGURE = Path(__file__).parent.parent / "figures" / "ring_and_tree.png"

LOST = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="This address leads nowhere on the site of treeattn.">
<title>No such page · treeattn</title>
<base href="{root}">
<link rel="icon" href="_static/favicon.svg">
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 15vh auto; max-width: 34rem; padding: 0 1rem; }}
body {{ font: 18px/1.5 system-ui, sans-serif; }}
</style>
<main>
<h1>There is no such page</h1>
<p>Perhaps it has moved. <a href="index.html">The first page</a> explains Tree Attention, and
<a href="search.html">the search</a> knows the words of all pages.</p>
</main>
</html>
"""


def for_the_site(page: str) -> str:
    """The one page's HTML, with links as from the top of the site instead of a checkout's site/."""

    def target(link: re.Match) -> str:
        place, row = link[1], link[2] or ""
        if place == "README.md":
            return 'href="contents.html"'
        if place == "notebooks/10_ledger.ipynb":
            return f'href="ledger.html{row}"'
        return f'href="{re.sub(r"(ipynb|md)$", "html", place)}{row.lower()}"'

    return re.sub(r'href="\.\./([\w./]+)(#[\w-]+)?"', target, page)


def first_page(page: Path, site: Path, address: str) -> None:
    """index.html, and its first frame as the picture of cards; without a browser, a figure."""
    text = for_the_site(page.read_text(encoding="utf-8"))
    card = f"{address}_static/card.png"
    tags = [f'<meta property="og:image" content="{escape(card)}">']
    if address:
        tags.append(f'<meta property="og:url" content="{escape(address)}">')
        tags.append(f'<link rel="canonical" href="{escape(address)}">')
    text = text.replace("</head>", "\n".join([*tags, "</head>"]), 1)
    (site / "index.html").write_text(text, encoding="utf-8")
    if chromium() is None:
        shutil.copy(FIGURE, site / "_static" / "card.png")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile), seconds=120)
        size = {"width": 1200, "height": 630}  # as cards are cut
        browser.open(page.resolve().as_uri(), **size, prefers_reduced_motion="reduce")
        browser.screenshot(site / "_static" / "card.png", **size)
        browser.close()


def sitemap(pages: Iterable[Path], site: Path, address: str) -> str:
    """The addresses of all pages, as https://www.sitemaps.org asks for them: whole ones."""
    places = sorted(page.relative_to(site).as_posix() for page in pages)
    lines = [f"<url><loc>{escape(address + place)}</loc></url>" for place in places]
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    return "\n".join([head, f'<urlset xmlns="{space}">', *lines, "</urlset>\n"])


def write_for_finders(pages: Iterable[Path], site: Path, address: str) -> None:
    """404.html; where the site's address is known ("https://…/"), sitemap.xml and robots.txt."""
    (site / "404.html").write_text(LOST.format(root=escape(address or "/")), encoding="utf-8")
    if address:
        (site / "sitemap.xml").write_text(sitemap(pages, site, address), encoding="utf-8")
        robots = f"User-agent: *\nAllow: /\nSitemap: {address}sitemap.xml\n"
        (site / "robots.txt").write_text(robots, encoding="utf-8")
