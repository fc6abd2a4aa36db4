"""Links to mistakes that the conformance suite names: each has a row in conformance/names.md."""

import re

from treeattn_conformance import CURES, anchor


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
