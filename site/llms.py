"""llms.txt: the site's contents, as a page of plain text for programs.

Addresses are relative to the file, which lies at the site's root.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

from faults import anchors

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
IDEA = "Attention over a set of keys is a small state, and the states of disjoint sets merge."
FACTS = [
    "Queries are (batch, q_len, heads, head_dim).",
    "Keys and values are (batch, kv_len, kv_heads, head_dim).",
    "lse is (batch, q_len, heads), natural, in float32 or wider.",
    "No keys are out 0 and lse -inf. scale=None is 1/sqrt(head_dim).",
    "The names in treeattn.__all__ are public, and stable.",
]
NOTEBOOKS = (
    "notebooks/*.ipynb",
    "notebooks/deeper/*.ipynb",
    "labs/*/*.ipynb",
    "conformance/*.ipynb",
)


def title(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    found = re.search(r"(?m)^# (.+)$", text)
    return found[1] if found else page.stem


def entries(pages: list[Path], root: Path) -> list[str]:
    return [f"- [{title(x)}]({x.relative_to(root).with_suffix('.html')})" for x in pages]


def names() -> list[str]:
    """A line for each public name on the API's page: its address there, and its first sentence."""
    lines = []
    module = ""
    page = (HERE / "api.md").read_text(encoding="utf-8")
    for kind, name in re.findall(
        r"(?m)^\.\. (currentmodule|autofunction|autoclass|autodata):: (\S+)", page
    ):
        if kind == "currentmodule":
            module = name
            continue
        known = getattr(importlib.import_module(module), name)
        about = inspect.getdoc(known) or "" if callable(known) else ", ".join(known)
        first = about.split("\n\n")[0].replace("\n", " ")
        lines.append(f"- [{module}.{name}](api.html#{module}.{name}): {first}")
    return lines


def llms_text() -> str:
    """The file: the project, its conventions, pages, notebooks, names, and faults with cures."""
    lines = ["# treeattn", "", f"> {IDEA}", "", *(f"- {fact}" for fact in FACTS)]
    lines += ["", "## Pages", "", *entries(sorted(REPOSITORY.glob("*.md")), REPOSITORY)]
    own = set(HERE.glob("*.md")) - {HERE / "contents.md", HERE / "README.md"}
    lines += entries(sorted(own), HERE)
    lines += entries([REPOSITORY / "conformance" / "README.md"], REPOSITORY)
    lines += entries(sorted(REPOSITORY.glob("labs/*/README.md")), REPOSITORY)
    lines += ["- [The ledger](ledger.html)", "", "## Notebooks", ""]
    for pattern in NOTEBOOKS:
        lines += entries(sorted(REPOSITORY.glob(pattern)), REPOSITORY)
    lines += ["", "## API", "", *names()]
    lines += ["", "## Mistakes that treeattn_conformance names", ""]
    lines += [
        f"- [{x}](conformance/names.html#{id}): {cure}" for id, (x, cure) in anchors().items()
    ]
    return "\n".join(lines) + "\n"
