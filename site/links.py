"""Do the links of a set of pages lead somewhere, and do the pages need a network?"""

from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """The ids of a page, its links, and the files that a browser loads to show it."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = {name: value for name, value in attributes if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        self.links |= {found[name] for name in ("href", "src") if name in found}
        if LOADED.get(tag) in found and found.get("rel") != "canonical":
            self.loads.add(found[LOADED[tag]])


def broken(paths: Iterable[Path]) -> list[str]:
    """The links of these pages to missing files, or to ids that pages do not have.

    Links to other sites are not followed.
    """
    pages = {path.resolve(): Page(path) for path in paths}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            missing = place and target in pages and place not in pages[target].ids
            if not target.exists() or missing:
                found.append(f"{path.name}: {link}")
    return found


def fetched(paths: Iterable[Path]) -> list[str]:
    """Scripts, styles and images that these pages would get from a network."""
    pages = {path: Page(path) for path in paths}
    return [
        f"{path.name}: {url}"
        for path, page in pages.items()
        for url in sorted(page.loads)
        if urlsplit(url).netloc
    ]
