"""The page of all mistakes that the conformance suite names, each with its cure and an address."""

import re

from treeattn_conformance import CURES


def anchor(fault: str) -> str:
    """The id of a mistake's row: "log base 2" is fault-log-base-2."""
    words = fault.lower().replace("+inf", "plus inf")
    return f"fault-{re.sub(r'[^a-z0-9]+', '-', words).strip('-')}"


def fault_links(text: str, top: str) -> str:
    """Markdown whose links to the suite's faults lead to their rows.

    They are HTML, since Sphinx knows the anchors of headings only.
    """
    link = r"\[([^\]]+)\]\((?:\.\./)*(?:site/)?[\w/]*\w+\.md#(fault-[\w-]+)\)"
    return re.sub(link, rf'<a href="{top}faults.html#\2">\1</a>', text)


def by_check() -> dict[str, dict[str, str]]:
    """{"check_merge, check_attention": {mistake: cure}}: checks that know the same stand together."""
    found: dict[int, tuple[list[str], dict[str, str]]] = {}
    for check, cures in CURES.items():
        found.setdefault(id(cures), ([], cures))[0].append(f"check_{check}")
    return {", ".join(checks): cures for checks, cures in found.values()}


def faults_page() -> str:
    parts = [
        "# Mistakes that have a name\n\nWhat the conformance suite says of a wrong answer, and what "
        "helps. [How to ask it](conformance/README.md)."
    ]
    for checks, cures in by_check().items():
        rows = [
            f'| <a id="{anchor(fault)}"></a>{fault} | {cure} |'.replace("*", "\\*")
            for fault, cure in cures.items()
        ]
        parts.append(f"## {checks}\n\n| it says | what helps |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"
