"""Links to the mistakes that the conformance suite names: each has a row in its README."""

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
    """Markdown whose links to these rows are HTML: Sphinx knows the anchors of headings only."""
    kinds = "|".join(sorted(set(KINDS.values())))
    link = rf"\[([^\]]+)\]\([./]*conformance/README\.md#((?:{kinds})-[\w-]+)\)"
    return re.sub(link, rf'<a href="{top}conformance/README.html#\2">\1</a>', text)


def by_kind() -> dict[str, tuple[str, dict[str, str]]]:
    """{"fault": ("check_merge and check_attention", {mistake: cure}), …}"""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for check, cures in CURES.items():
        before, known = found.get(KINDS[check], ("", {}))
        checks = f"{before} and check_{check}" if before else f"check_{check}"
        found[KINDS[check]] = checks, known | cures
    return found
