"""The page of all mistakes that the conformance suite names, each with its cure and an address."""

import re

from treeattn_conformance import CURES

# What the ids of a check's mistakes begin with; pages and notebooks link to them.
KINDS = {
    "merge": "fault",
    "attention": "fault",
    "scan": "scan",
    "tree": "tree",
    "packed_loss": "loss",
    "verifier": "verifier",
    "invariance": "axis",
}


def anchor(kind: str, fault: str) -> str:
    """The id of a mistake's row: ("fault", "log base 2") is fault-log-base-2."""
    words = fault.lower().replace("+inf", "plus inf")
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', words).strip('-')}"


def fault_links(text: str, top: str) -> str:
    """Markdown whose links to the suite's faults lead to their rows.

    They are HTML, since Sphinx knows the anchors of headings only.
    """
    kinds = "|".join(sorted(set(KINDS.values())))
    link = rf"\[([^\]]+)\]\([./]*conformance/README\.md#((?:{kinds})-[\w-]+)\)"
    return re.sub(link, rf'<a href="{top}faults.html#\2">\1</a>', text)


def by_kind() -> dict[str, tuple[str, dict[str, str]]]:
    """{"fault": ("check_merge and check_attention", {mistake: cure}), …}"""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for check, cures in CURES.items():
        before, known = found.get(KINDS[check], ("", {}))
        checks = f"{before} and check_{check}" if before else f"check_{check}"
        found[KINDS[check]] = checks, known | cures
    return found


def faults_page() -> str:
    parts = [
        "# Mistakes that have a name\n\n"
        "What the conformance suite says of a wrong answer, and what helps. "
        "[How to ask it](conformance/README.md)."
    ]
    for kind, (checks, cures) in by_kind().items():
        rows = [
            f'| <a id="{anchor(kind, fault)}"></a>{fault} | {cure} |'.replace("*", "\\*")
            for fault, cure in cures.items()
        ]
        parts.append(f"## {checks}\n\n| it says | what helps |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"
