"""The page of the API, from the docstrings."""

import inspect
import re

import treeattn
import treeattn.cost
import treeattn.llama

ROOMS = {  # module -> what its names do
    "idea": "The idea: an energy, and a state that merges",
    "kernel": "One device",
    "devices": "Many devices",
    "trees": "Candidates of tokens",
    "llama": "A Llama, and text from it",
}
SPECIAL = str.maketrans({c: f"\\{c}" for c in "*_<$|[]"})


def signature(thing) -> str:
    """Its parameters with their defaults, without annotations (the docstring has the shapes)."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    plain = []
    for parameter in found.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, int | float | str | None):
            parameter = parameter.replace(
                default=type("Default", (), {"__repr__": lambda _: "…"})()
            )
        plain.append(parameter.replace(annotation=parameter.empty))
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def prose(paragraph: str, known: set[str]) -> str:
    """A paragraph as Markdown: what stands in backticks stays, public names become links."""
    pieces = re.split(r"(`[^`]+`)", " ".join(paragraph.split()))
    for i, piece in enumerate(pieces):
        name = piece.strip("`").removeprefix("treeattn.")
        if i % 2 == 0:
            pieces[i] = piece.translate(SPECIAL)
        elif name in known:
            pieces[i] = f"[{piece}](#treeattn.{name})"
    return "".join(pieces)


def markdown(docstring: str, known: set[str]) -> str:
    """A docstring as Markdown: paragraphs are prose; aligned lines, tables and code stay as set."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        as_set = re.search(r"^(\s|\||[-*] |\w+(, \w+)*:\s)", block, re.MULTILINE)
        blocks.append(f"````text\n{block}\n````" if as_set else prose(block, known))
    return "\n\n".join(blocks)


def entry(name: str, thing, known: set[str]) -> str:
    kind = "class" if inspect.isclass(thing) else "function"
    own = (thing.__doc__ or "").strip()
    lines = [f"### {name}", "", f"`````{{py:{kind}}} treeattn.{name}{signature(thing)}", ""]
    lines += [markdown(own, known), "`````", ""]
    if kind == "class":
        for attribute, member in vars(thing).items():
            member = getattr(member, "__func__", member)
            if attribute.startswith("_") or not inspect.isfunction(member) or not member.__doc__:
                continue
            lines += [f"`````{{py:method}} treeattn.{name}.{attribute}{signature(member)}", ""]
            lines += [markdown(member.__doc__, known), "`````", ""]
    return "\n".join(lines)


def api_page() -> str:
    """All public names of `treeattn`, of `treeattn.llama` and of `treeattn.cost`, by rooms."""
    names = {name: getattr(treeattn, name) for name in treeattn.__all__}
    for name in treeattn.llama.__all__:
        names.setdefault(name, getattr(treeattn.llama, name))
    names = {name: thing for name, thing in names.items() if callable(thing)}
    costs = {
        f"cost.{name}": getattr(treeattn.cost, name)
        for name in treeattn.cost.__all__
        if callable(getattr(treeattn.cost, name))
    }
    known = set(names) | set(costs)
    parts = ["# API", "Every public name with its docstring. Shapes, errors and sources are there."]
    for room, title in ROOMS.items():
        parts.append(f"## {title}")
        for name, thing in sorted(names.items()):
            if thing.__module__.split(".")[1] == room:
                parts.append(entry(name, thing, known))
    parts.append("## Bytes, rounds, memory and time")
    parts += [entry(name, thing, known) for name, thing in sorted(costs.items())]
    return "\n\n".join(parts) + "\n"
