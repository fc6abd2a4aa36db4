"""Docstrings for Sphinx's autodoc: arguments as a list that wraps, tables as they are."""

import re
import textwrap

ENTRY = re.compile(r"^(\w+(?:, \w+)*):\s+(?=\S)", re.MULTILINE)  # "name:   what it is"
# Paragraphs with an indented line, a table or a list, or a doctest.
AS_SET = re.compile(r"^(\s|\||[-*] |>>>)", re.MULTILINE)
MARKUP = str.maketrans({character: f"\\{character}" for character in "\\*_|"})


def as_restructured_text(app, what, name, thing, options, lines: list[str]) -> None:
    """The lines of a docstring as reStructuredText, in place (autodoc's event)."""
    done: list[str] = []
    before, in_list = "", False
    for paragraph in re.split(r"\n[ \t]*\n", "\n".join(lines).strip()):
        indented = paragraph.startswith(" ")
        in_list = in_list if indented else is_list(paragraph)
        text = restructured(paragraph, before)
        done.append(textwrap.indent(text, "    ") if indented and in_list else text)
        before = paragraph
    lines[:] = [*"\n\n".join(done).split("\n"), ""]


def restructured(paragraph: str, before: str = "") -> str:
    """A paragraph as a list of what it explains, as a block of code, or as prose.

    An indented one is code after a paragraph that announces it, by a comma or a colon, and
    otherwise prose.
    """
    if is_list(paragraph):
        pieces = ENTRY.split(paragraph)[1:]
        pairs = zip(pieces[::2], pieces[1::2], strict=True)
        return "\n".join(f"``{names}``\n    {prose(' '.join(x.split()))}" for names, x in pairs)
    if paragraph.startswith(">>>"):
        return f".. code-block:: pycon\n\n{textwrap.indent(paragraph, '    ')}"
    dedented = textwrap.dedent(paragraph)
    if dedented != paragraph and not before.endswith((",", ":")) and not AS_SET.search(dedented):
        return prose(dedented)
    if AS_SET.search(paragraph):
        return f".. code-block:: text\n\n{textwrap.indent(dedented, '    ')}"
    return prose(paragraph)


def is_list(paragraph: str) -> bool:
    """Whether each line begins an entry, or goes on with one, further to the right."""
    first, *others = paragraph.splitlines() or [""]
    return bool(ENTRY.match(first)) and all(
        ENTRY.match(line) or line.startswith("  ") for line in others
    )


def prose(text: str) -> str:
    """Text in which only backticks mean something."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(piece if i % 2 else piece.translate(MARKUP) for i, piece in enumerate(pieces))


def skip_field(app, what, name, thing, skip: bool, options) -> bool | None:
    """Leave out the fields of named tuples: their class says what they are (autodoc's event)."""
    is_field = (getattr(thing, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_field else None
