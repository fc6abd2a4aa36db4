"""How the site is found: a sitemap, robots.txt, and a page for addresses that lead nowhere."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

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
