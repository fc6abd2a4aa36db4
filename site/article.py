"""Notebook 00 as an article for the first page, with the steppers where their subject is."""

import re
from pathlib import Path

import nbformat

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "00_tree_attention_in_one_sitting.ipynb"
LAST = "## Where next"  # from here on the notebook speaks to who runs it
# Before which heading a stepper stands, and what a screen reader calls it.
STEPPERS = {
    "## 3. ": ("energy", "The energy, step by step"),
    "## 6. ": ("merge", "The merge, step by step"),
    "## 8. ": ("prefix_tree", "A beam as a prefix tree, step by step"),
}


def stepper(name: str, title: str) -> str:
    page = f"{name}_stepper.html"
    about = f'class="stepper" title="{title}" loading="lazy"'
    more = f'<a href="{page}">the page by itself</a> has more'
    return f'<iframe {about} src="{page}?short"></iframe>\n\n*By mouse, finger or keys; {more}.*'


def at_the_top(text: str) -> str:
    """Markdown of a notebook in notebooks/, its links as from the site's first page."""
    text = re.sub(r"\]\(\.\./", "](", text)
    return re.sub(r"\]\((\w+\.ipynb)", r"](notebooks/\1", text)


def article() -> str:
    """Text, code and stored outputs, up to the sections that speak of running it."""
    parts = []
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        source = cell.source
        if source.startswith(LAST):
            break
        if cell.cell_type == "markdown":
            for heading, (name, title) in STEPPERS.items():
                if source.startswith(heading):
                    parts.append(stepper(name, title))
            parts.append(at_the_top(re.sub(r"\A# .*\n", "", source)))
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if not printed:
            continue
        printed = f"```text\n{printed.rstrip()}\n```"
        if cell.metadata.get("jupyter", {}).get("outputs_hidden"):  # the answer to a question
            printed = f"<details><summary>Output</summary>\n\n{printed}\n\n</details>"
        parts.append(printed)
    return "\n\n".join(parts)
