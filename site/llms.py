"""llms.txt: what the site holds, as a page of plain text for programs that read it.

Addresses are relative to the file, which lies at the site's root.
"""

import importlib
import inspect
import re
from pathlib import Path

import treeattn_conformance as conformance

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
FACTS = [
    "Queries are (batch, q_len, heads, head_dim).",
    "Keys and values are (batch, kv_len, kv_heads, head_dim).",
    "lse is (batch, q_len, heads), natural, in float32 or wider.",
    "No keys are out 0 and lse -inf. scale=None is 1/sqrt(head_dim).",
    "The names in treeattn.__all__ are public, and stable.",
]
# The anchors' prefix in CONFORMANCE.md: the list of faults, each with its cure, and who names them.
FAULTS = {
    "fault": (conformance.FINGERPRINTS, "check_merge and check_attention"),
    "loss": (conformance.PACKING_FINGERPRINTS, "check_packed_loss"),
    "tree": (conformance.TREE_FINGERPRINTS, "check_tree"),
    "stripe": (conformance.STRIPE_FINGERPRINTS, "check_local_lengths"),
    "top-k": (conformance.TOP_K_FINGERPRINTS, "check_top_k"),
    "scan": (conformance.SCAN_FINGERPRINTS, "check_scan"),
    "verifier": (conformance.VERIFIER_FINGERPRINTS, "check_verifier"),
}


def anchor(kind: str, fault: str) -> str:
    """The id of a fault's row in CONFORMANCE.md: ("fault", "log base 2") is fault-log-base-2."""
    words = fault.lower().replace("+inf", "plus inf")
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', words).strip('-')}"


def fault_links(text: str, top: str) -> str:
    """Markdown whose links to faults are HTML: Sphinx knows the anchors of headings only."""
    kinds = "|".join(FAULTS)
    link = rf"\[([^\]]+)\]\((?:\.\./)?CONFORMANCE\.md#((?:{kinds})-[\w-]+)\)"
    return re.sub(link, rf'<a href="{top}CONFORMANCE.html#\2">\1</a>', text)


def _title(page: Path) -> str:
    found = re.search(r"(?m)^# (.+)$", page.read_text(encoding="utf-8"))
    return found[1] if found else page.stem


def _links(pages: list[Path], root: Path) -> list[str]:
    return [f"- [{_title(x)}]({x.relative_to(root).with_suffix('.html')})" for x in pages]


def _api() -> list[str]:
    """A line for each public name on the API's page: its address there, and its first sentence."""
    lines = []
    module = ""
    page = (HERE / "api.md").read_text(encoding="utf-8")
    for kind, name in re.findall(r"(?m)^\.\. (currentmodule|autofunction|autoclass):: (\S+)", page):
        if kind == "currentmodule":
            module = name
            continue
        known = getattr(importlib.import_module(module), name)
        first = (inspect.getdoc(known) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"- [{module}.{name}](api.html#{module}.{name}): {first}")
    return lines


def llms_text() -> str:
    """The file: what this is, its conventions, pages, notebooks, names, and faults with cures."""
    index = (HERE / "index.md").read_text(encoding="utf-8")
    idea = re.search(r"(?s)\*\*(.+?)\*\*", index)[1].replace("\n", " ")
    pages = [x for x in sorted(HERE.glob("*.md")) if x.name != "index.md"]
    chapters = re.findall(r"\* - \[([^\]]+)\]\((notebooks/\w+)\.ipynb\)\n  - (.+)", index)
    lines = ["# treeattn", "", f"> {idea}", "", *(f"- {fact}" for fact in FACTS)]
    lines += ["", "## Pages", "", *_links(sorted(REPOSITORY.glob("*.md")), REPOSITORY)]
    lines += [*_links(pages, HERE), "- [The ledger](ledger.html)"]
    lines += ["", "## Notebooks", ""]
    lines += [f"- [{title}]({page}.html): {words}" for title, page, words in chapters]
    lines += ["", "## API", "", *_api()]
    for kind, (faults, who) in FAULTS.items():
        lines += ["", f"## Faults that {who} name{'' if ' and ' in who else 's'}", ""]
        for fault, cure in faults.items():
            lines.append(f"- [{fault}](CONFORMANCE.html#{anchor(kind, fault)}): {cure}")
    return "\n".join(lines) + "\n"
