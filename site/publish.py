"""Write the project's public address into the files that name it. Until then no file names one.

    make publish REPOSITORY=https://github.com/owner/name

writes the badges and launch links of README.md, `repository-code` of CITATION.cff, and the URLs in
pyproject.toml. Another call replaces the address that an earlier call wrote. The site's address is
https://owner.github.io/name/, unless ADDRESS=https://…/ names another. `make site` reads it from
pyproject.toml, for canonical links, cards and the sitemap.
"""

import argparse
import re
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
FIRST = "notebooks/00_tree_attention_in_one_sitting.ipynb"
MARK = "<!--published-->\n"  # in README.md, the line after it is ours
GITHUB = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)")


def site_address(repository: str) -> str:
    """Where a forge that has pages of its own would show the site; "" for other forges."""
    known = GITHUB.fullmatch(repository)
    return f"https://{known[1].lower()}.github.io/{known[2]}/" if known else ""


def links(repository: str, site: str) -> str:
    """README.md's line: do the tests pass, notebook 00 to run and to read, the site."""
    found = [f"[read notebook 00]({repository}/blob/main/{FIRST})"]
    if known := GITHUB.fullmatch(repository):
        colab = f"https://colab.research.google.com/github/{known[1]}/{known[2]}/blob/main/{FIRST}"
        badge = "https://colab.research.google.com/assets/colab-badge.svg"
        found.insert(0, f"[![open in Colab]({badge})]({colab})")
        tests = f"{repository}/actions/workflows/tests.yml"
        found.insert(0, f"[![tests]({tests}/badge.svg)]({tests})")
    if site:
        found.append(f"[the site]({site})")
    return " · ".join(found)


def change(file: Path, pattern: str, text: str) -> None:
    """Replaces the one place in a file that matches."""
    before = file.read_text(encoding="utf-8")
    after, places = re.subn(pattern, lambda _: text, before, flags=re.MULTILINE)
    if places != 1:
        raise ValueError(f"{file}: expected one place that matches {pattern!r}, found {places}")
    file.write_text(after, encoding="utf-8")


def published(checkout: Path = CHECKOUT) -> str:
    """The site's address in pyproject.toml, "" until there is one."""
    text = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["urls"].get("Documentation", "")


def publish(repository: str, site: str = "", checkout: Path = CHECKOUT) -> None:
    if not re.fullmatch(r"(https|file)://[^?#\s\"]+[^/?#\s\"]", repository):
        raise ValueError(f"REPOSITORY: expected https://…, no slash at its end, got {repository!r}")
    if site and not re.fullmatch(r"https?://[^?#\s\"]+/", site):
        raise ValueError(f"ADDRESS: expected https://…/, got {site!r}")
    site = site or site_address(repository)
    change(checkout / "README.md", rf"^{MARK}(.+\n)?", f"{MARK}{links(repository, site)}\n")
    cited = f'repository-code: "{repository}"\nlicense: '
    change(checkout / "CITATION.cff", r"^(repository-code: .*\n)?license: ", cited)
    urls = f'[project.urls]\nRepository = "{repository}"\n'
    urls += f'Documentation = "{site}"\n' if site else ""
    table = r"^\[project\.urls\]\n((Repository|Documentation) = .*\n)*"
    change(checkout / "pyproject.toml", table, urls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", help="https://github.com/owner/name, or another forge's")
    parser.add_argument("--site", default="", help="where the site stands, https://…/")
    asked = parser.parse_args()
    try:
        publish(asked.repository, asked.site)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
