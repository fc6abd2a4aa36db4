"""conformance/names.md has a row for each mistake that the suite names; and links to these rows.

python site/faults.py   write the page
"""

import re
from pathlib import Path

from treeattn_conformance import CURES

PAGE = Path(__file__).parent.parent / "conformance" / "names.md"


def anchor(check: str, name: str) -> str:
    """The id of a mistake's row: merge-log-base-2."""
    words = name.lower().replace("+inf", "plus inf")
    return f"{check}-{re.sub(r'[^a-z0-9]+', '-', words).strip('-')}"


def names_page() -> str:
    """Every mistake that has a name, with its cure, in Markdown."""
    lines = ["# Mistakes that have a name", "", "`python site/faults.py` writes this page."]
    for check, cures in CURES.items():
        lines += ["", f"## check_{check}", "", "| it says | what helps |", "|---|---|"]
        lines += [f'| <a id="{anchor(check, x)}"></a>{x} | {cures[x]} |' for x in cures]
    return "\n".join(lines) + "\n"


def fault_links(text: str, top: str) -> str:
    """Markdown whose links to these rows are HTML: Sphinx knows the anchors of headings only."""
    link = rf"\[([^\]]+)\]\([./]*conformance/names\.md#((?:{'|'.join(CURES)})-[\w-]+)\)"
    return re.sub(link, rf'<a href="{top}conformance/names.html#\2">\1</a>', text)


def anchors() -> dict[str, tuple[str, str]]:
    """{the id of a mistake's row: (its name, its cure)}"""
    return {
        anchor(check, name): (name, cure)
        for check, cures in CURES.items()
        for name, cure in cures.items()
    }


if __name__ == "__main__":
    PAGE.write_text(names_page(), encoding="utf-8")
