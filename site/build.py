"""Build the site from what is stored, without a network: python site/build.py [folder]

The repository is laid out anew under build/, so that links which work in a checkout work here:
pages of this folder at the top, all others and the notebooks where they are, with what Sphinx and
MyST-NB need put in. The first page is one_page.html, which Sphinx does not touch. Warnings are
errors; then every link within the site must lead somewhere, and axe, where it can run, must find
nothing.
"""

import argparse
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
from accessibility import violations
from faults import fault_links
from found import first_page, write_for_finders
from links import broken, fetched
from llms import llms_text
from publish import published
from sphinx.cmd.build import build_main

from ledger import ledger_page

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
FOLDERS = (
    "benchmarks",
    "checks",
    "conformance",
    "examples",
    "figures",
    "labs",
    "llama",
    "notebooks",
    "site",
    "tests",
    "treeattn",
)
FILES = ("CITATION.cff", "LICENSE", "Makefile", "pyproject.toml", "requirements.txt")
# The package is a server; only its files are wanted.
(_mathjax,) = importlib.util.find_spec("jupyter_server_mathjax").submodule_search_locations
MATHJAX = Path(_mathjax) / "static"
# Of MathJax, what its output as HTML with its own fonts needs.
LEFT_OUT = shutil.ignore_patterns("a11y", "localization", "mathmaps", "*.mp3", "*.ogg", "*.eot")


def lay_out(folder: Path) -> None:
    """The tree that Sphinx reads."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in REPOSITORY.glob("*.md"):
        (folder / page.name).write_text(as_page(page), encoding="utf-8")
    for page in set(HERE.glob("*.md")) - {HERE / "README.md"}:  # which is about this folder
        (folder / page.name).write_text(as_page(page), encoding="utf-8")
    for top in FOLDERS:
        for file in sorted((REPOSITORY / top).rglob("*")):
            place = folder / file.relative_to(REPOSITORY)
            if file.is_dir() or "__pycache__" in file.parts or file.parent == HERE:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                place.write_text(as_page(file), encoding="utf-8")
            elif file.suffix == ".ipynb":
                nbformat.write(as_notebook(file), place)
            else:
                place.symlink_to(file)
    for name in FILES:
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "ledger.md").write_text(ledger_page(), encoding="utf-8")


def as_notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook, the alternative texts of its figures where MyST-NB reads them."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    top = "../" * (len(path.relative_to(REPOSITORY).parts) - 1)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = without_folders(places(for_site(cell.source, top)), path.parent)
            cell.source = cell.source.replace("](attachment:", f"]({top}figures/")
        for output in cell.get("outputs", ()):
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell.metadata.setdefault("mystnb", {})["image"] = {"alt": alt}
    notebook.cells[0].source += f"\n\n{{download}}`The notebook <{path.name}>`"
    return notebook


def for_site(text: str, top: str) -> str:
    """Markdown whose links to pages of this folder, and to faults, fit the site.

    top: the way from the page to the site's first page, as "../"
    """
    text = fault_links(text, top)
    text = re.sub(r"!\[[^\]]*\]", lambda found: " ".join(found[0].split()), text)
    link = r"\[([^\]]+)\]\((?:\.\./)*(?:site/)?one_page\.html([^)]*)\)"
    text = re.sub(link, rf'<a href="{top}index.html\2">\1</a>', text)
    return re.sub(r"\]\(((?:\.\./)*)site/([\w/]+\.md)", r"](\1\2", text)


def places(text: str) -> str:
    """Links to headings: Jupyter and GitHub's notebooks keep capitals and commas, slugs do not."""

    def slug(link: re.Match) -> str:
        place = re.sub(r"[^-\w]", "", unquote(link[2])).lower()
        return f"]({link[1]}#{place})"

    return re.sub(r"\]\(([\w./]*(?:\.ipynb)?)#([^)\s]+)\)", slug, text)


def as_page(page: Path) -> str:
    """The text with a title."""
    own = page.parent == HERE  # these pages lie at the top of the site
    text = page.read_text(encoding="utf-8")
    text = text if own else text.replace("# treeattn\n", "# Overview\n", 1)
    top = "" if own else "../" * (len(page.relative_to(REPOSITORY).parts) - 1)
    text = for_site(text, top)
    title = "" if text.startswith("# ") else f"# {page.stem.replace('_', ' ').capitalize()}\n\n"
    text = without_folders(text, page.parent)
    return title + (text.replace("](../", "](") if own else text)


def without_folders(text: str, place: Path) -> str:
    """Markdown without the links to folders, which a site cannot show."""

    def words(link: re.Match) -> str:
        return link[1] if (place / link[2]).is_dir() else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([\w./-]+)\)", words, text)


# What Sphinx and Furo leave out: frames that scroll take the focus, and regions have names.
REPAIRS = {
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    '<div class="math ': '<div tabindex="0" class="math ',
    'class="caption" role="heading">': 'class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Contents">',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
}


def repair(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for found, better in REPAIRS.items():
        text = text.replace(found, better)
    page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=REPOSITORY / "build" / "site")
    about = "where the site will stand, https://…/: for its sitemap, its canonical links and cards"
    parser.add_argument("--address", default=published(), help=about)
    site, address = parser.parse_args().folder, parser.parse_args().address
    if address and not re.fullmatch(r"https?://[^?#]+/", address):
        parser.error(f"--address: expected https://…/, got {address!r}")
    print(f"writing the pages under {site}: about two minutes", flush=True)
    sources = site.with_name(f"{site.name}-sources")
    lay_out(sources)
    shutil.rmtree(site, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-E", "-d", str(sources / ".doctrees"), "-c", str(HERE)]
    options += ["-D", f"html_baseurl={address}", "-D", f"ogp_site_url={address}"]
    if status := build_main(["-b", "html", *options, str(sources), str(site)]):
        return status
    for page in site.rglob("*.html"):
        repair(page)
    first_page(HERE / "one_page.html", site, address)
    pages = sorted(site.rglob("*.html"))
    write_for_finders(pages, site, address)
    (site / "llms.txt").write_text(llms_text(), encoding="utf-8")
    shutil.copytree(MATHJAX, site / "_static" / "mathjax", ignore=LEFT_OUT)
    wrong = [f"broken link: {x}" for x in broken(pages)]
    wrong += [f"not offline: {x}" for x in fetched(pages)]
    found = violations(pages)
    if found is None:
        print("without Chromium and axe the pages' accessibility is not checked")
    wrong += [f"not accessible: {x}" for x in found or ()]
    print("\n".join(wrong) or f"open {site / 'index.html'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
