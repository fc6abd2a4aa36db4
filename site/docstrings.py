"""Docstrings for Sphinx's autodoc: what is aligned by hand stays as it is set."""

import re
import textwrap

# Paragraphs with an indented line, a table or a list, or that begin with "name:   what it is".
AS_SET = re.compile(r"^(\s|\||[-*] )|\A\w+(, \w+)*:\s", re.MULTILINE)
MARKUP = str.maketrans({character: f"\\{character}" for character in "\\*_|"})


def as_restructured_text(app, what, name, thing, options, lines: list[str]) -> None:
    """The lines of a docstring as reStructuredText, in place (autodoc's event)."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip())
    lines[:] = [*"\n\n".join(map(restructured, paragraphs)).split("\n"), ""]


def restructured(paragraph: str) -> str:
    """A paragraph as prose, in which only backticks mean something, or as a literal block."""
    if AS_SET.search(paragraph):
        return "::\n\n" + textwrap.indent(paragraph, "    ")
    pieces = re.split(r"(`[^`]+`)", paragraph)
    prose = [piece if i % 2 else piece.translate(MARKUP) for i, piece in enumerate(pieces)]
    return "".join(prose)


def skip_field(app, what, name, thing, skip: bool, options) -> bool | None:
    """Leave out the fields of named tuples: their class says what they are (autodoc's event)."""
    is_field = (getattr(thing, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_field else None
