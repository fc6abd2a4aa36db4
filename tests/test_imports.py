"""The circles: who may import whom, in which order, what is public, and how large each may be."""

import ast
import functools
import importlib
import inspect
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeattn

REPOSITORY = Path(__file__).parent.parent

# The folder in which each package, or folder of scripts, stands.
FOUND_IN = {
    "treeattn": ".",
    "treeattn_llama": "llama",
    "treeattn_conformance": "conformance",
    "figures": ".",
    "labs": ".",
    "benchmarks": ".",
}
# What each circle stands on, besides itself. Nothing stands on a lab, and no lab on another.
PACKAGES = {"treeattn", "treeattn_llama", "treeattn_conformance"}
BELOW = {
    "treeattn": set(),
    "treeattn_llama": {"treeattn"},
    "treeattn_conformance": set(),
    "figures": PACKAGES,
    "benchmarks": PACKAGES,
    "a lab": PACKAGES | {"figures"},
}
# The core from its ground upwards: a file imports what stands before it, and nothing else of ours.
CORE = (
    "checks",
    "state",
    "inputs",
    "gradient",
    "plain",
    "products",
    "blocks",
    "flash",
    "local",
    "devices",
    "across",
    "ring",
    "layout",
    "decode",
    "prefill",
    "beam",
    "token_tree",
    "hlo",
    "program",
    "__init__",
)
# Of other projects: what the core and the suite may import (flash-attn-jax where it is installed).
OTHERS = {
    "treeattn": {"jax", "numpy", "jaxtyping", "flash_attn_jax"},
    "treeattn_conformance": {"numpy"},
}
# Tokens of code, comments and docstrings aside. They are limits, to be lowered when there is less.
BUDGET = {
    "treeattn": 22_950,
    "treeattn_llama": 20_300,
    "treeattn_conformance": 31_300,
    "figures": 21_000,
    "benchmarks": 7_800,
    "labs.acceptance": 4_550,
    "labs.cluster": 5_000,
    "labs.cost": 14_750,
    "labs.exact": 9_200,
    "labs.kernels": 14_800,
    "labs.recurrent": 3_000,
    "labs.sharding": 1_900,
    "labs.training": 12_050,
}
LINES = 400  # of a file of the packages and the figures
PUBLIC_NAMES = 36
PARAMETERS = 10  # of a public function, beside q, k and v


def modules() -> dict[str, str]:
    """Dotted name and text of every module of ours but tests; packages end in ".__init__"."""
    found = {}
    for top, folder in FOUND_IN.items():
        root = REPOSITORY / folder
        for file in sorted((root / top).rglob("*.py")):
            name = file.relative_to(root).with_suffix("").parts
            if "tests" not in name:
                found[".".join(name)] = file.read_text(encoding="utf-8")
    return found


MODULES = modules()


def circle_of(name: str) -> str:
    """ "labs.cost" of labs.cost.network, "figures" of figures.style."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "labs" else parts[0]


@functools.cache  # the planted imports ask about all of the other modules again
def imported(text: str, importer: str = "") -> frozenset[str]:
    """Dotted names of all that this code imports, wherever in it: modules, or names of theirs."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            holder = [node.module] if node.module else []
            if node.level:
                holder = [*importer.split(".")[: -node.level], *holder]
            names |= {".".join([*holder, alias.name]) for alias in node.names}
    return frozenset(names)


def module_of(name: str, known: dict[str, str]) -> str | None:
    """The module among `known` that a dotted name is, or is a name of; None if there is none."""
    while name:
        for choice in (name, f"{name}.__init__"):
            if choice in known:
                return choice
        name = name.rpartition(".")[0]
    return None


def graph(texts: dict[str, str]) -> dict[str, set[str]]:
    """For each module, the modules of ours that it imports."""
    edges = {}
    for importer, text in texts.items():
        names = imported(text, importer)
        if importer.startswith("benchmarks."):  # scripts, which find each other by their own folder
            names |= {f"benchmarks.{name}" for name in names}
        found = {module_of(name, texts) for name in names}
        edges[importer] = found - {None, importer}
    return edges


def outward(edges: dict[str, set[str]]) -> set[str]:
    """The imports from one circle into another that it does not stand on."""
    found = set()
    for importer, targets in edges.items():
        circle = circle_of(importer)
        below = BELOW["a lab" if circle.startswith("labs.") else circle]
        for target in targets:
            if circle_of(target) not in below | {circle}:
                found.add(f"{importer} imports {target}")
    return found


def upward(edges: dict[str, set[str]]) -> set[str]:
    """The imports within the core that go up, or sideways."""
    place = {f"treeattn.{name}": i for i, name in enumerate(CORE)}
    return {
        f"{importer} imports {target}"
        for importer, i in place.items()
        for target in edges[importer]
        if place.get(target, i) >= i
    }


def ring(edges: dict[str, set[str]]) -> list[str] | None:
    """Modules of which each imports the next, and the last the first; None if there are none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for target in edges[name]:
                if found := visit(target, [*path, name]):
                    return found
            done.add(name)
        return None

    return next((found for name in edges if (found := visit(name, []))), None)


def test_no_circle_imports_what_is_further_out():
    assert outward(graph(MODULES)) == set()


def test_the_core_imports_downwards():
    files = {name for name in MODULES if circle_of(name) == "treeattn"}
    assert files == {f"treeattn.{name}" for name in CORE}
    assert upward(graph(MODULES)) == set()


def test_no_modules_import_each_other_in_a_ring():
    assert ring(graph(MODULES)) is None


def test_the_core_and_the_suite_need_little():
    for circle, allowed in OTHERS.items():
        texts = {name: text for name, text in MODULES.items() if circle_of(name) == circle}
        tops = {x.split(".")[0] for name in texts for x in imported(texts[name], name)}
        assert tops - sys.stdlib_module_names - {circle} <= allowed


def test_nobody_imports_a_lab_but_its_own_notebook_and_tests():
    found = set()
    ours = [top for top in REPOSITORY.iterdir() if top.is_dir() and top.name[0] != "."]
    for path in [path for top in ours for path in top.rglob("*")]:
        place = path.relative_to(REPOSITORY).parts
        if path.suffix not in (".py", ".ipynb") or place[0] == "build":
            continue
        own = ".".join(place[:2])
        for code in codes(path):
            labs = {circle_of(name) for name in imported(code) if name.split(".")[0] == "labs"}
            found |= {f"{path.name} imports {lab}" for lab in labs - {own}}
    assert found == set()


@pytest.mark.parametrize(
    ("module", "line", "target"),
    [
        ("treeattn.state", "from treeattn_llama import Llama", "treeattn_llama.__init__"),
        ("treeattn.across", "def f():\n    import figures.style", "figures.style"),
        ("treeattn_llama.model", "from labs.cost import network", "labs.cost.network"),
        ("treeattn_conformance.merging", "from treeattn import finalize", "treeattn.__init__"),
        ("figures.style", "import labs.cost.network as n", "labs.cost.network"),
        ("labs.exact.digits", "from labs.cost import network", "labs.cost.network"),
    ],
)
def test_a_planted_import_outwards_is_found(module, line, target):
    planted = MODULES | {module: f"{MODULES[module]}\n{line}\n"}
    before = outward(graph(MODULES))
    assert outward(graph(planted)) - before == {f"{module} imports {target}"}


@pytest.mark.parametrize(
    ("module", "line", "target"),
    [
        ("treeattn.state", "from treeattn.local import attend", "treeattn.local"),
        ("treeattn.devices", "def f():\n    from treeattn import finalize", "treeattn.__init__"),
        ("treeattn.state", "from . import gradient", "treeattn.gradient"),
    ],
)
def test_a_planted_import_upwards_is_found(module, line, target):
    planted = MODULES | {module: f"{MODULES[module]}\n{line}\n"}
    before = upward(graph(MODULES))
    assert upward(graph(planted)) - before == {f"{module} imports {target}"}


def test_a_planted_ring_is_found():
    texts = {
        "figures.a": "from figures import b",
        "figures.b": "from figures.c import draw",
        "figures.c": "def draw():\n    import figures.a",
        "benchmarks.one": "from two import times",
        "benchmarks.two": "times = 3",
    }
    assert set(ring(graph(texts))) == {"figures.a", "figures.b", "figures.c"}
    texts["figures.c"] = ""
    assert ring(graph(texts)) is None
    texts["benchmarks.two"] = "import one"
    assert set(ring(graph(texts))) == {"benchmarks.one", "benchmarks.two"}


def run(code: str) -> str:
    """What a fresh Python prints that runs `code`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_core_loads_little_and_starts_nothing():
    code = """
import sys
import jax, numpy, jaxtyping
def tops():
    return {name.split(".")[0] for name in sys.modules}
before = tops()
import treeattn
print(*sorted(tops() - before - set(sys.stdlib_module_names)))
print("jax.experimental.pallas" in sys.modules)  # a fifth of JAX's own time
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run(code).split() == ["treeattn", "False", "False"]


# ---------------------------------------------------------------- what is public


def blocks(markdown: str) -> Iterator[str]:
    """The Python code of a text in Markdown."""
    for block in re.findall(r"^```python\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        if block.startswith(">>> "):
            lines = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        yield "\n".join(lines)


def codes(path: Path) -> Iterator[str]:
    """The Python code in a module, a notebook or a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".md":
        yield from blocks(text)
    else:
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            yield from [source] if cell["cell_type"] == "code" else blocks(source)


def users() -> Iterator[Path]:
    """All that uses the packages as a reader would."""
    for folder in ("examples", "benchmarks", "site", "figures", "labs", "notebooks", "conformance"):
        for kind in ("*.py", "*.ipynb", "*.md"):
            for path in sorted((REPOSITORY / folder).rglob(kind)):
                if not {"tests", "treeattn_conformance"} & set(path.parts):
                    yield path
    yield from sorted((REPOSITORY / "llama" / "treeattn_llama").rglob("*.py"))
    yield from sorted(REPOSITORY.glob("*.md"))


def is_public(name: str) -> bool:
    """Whether "treeattn.x" is a name of the package's `__all__`."""
    top, _, rest = name.partition(".")
    return not rest or rest in importlib.import_module(top).__all__ or rest == "__version__"


def private(code: str, own: str = "") -> set[str]:
    """What this code imports, or reaches as `treeattn.…`, of packages not its own, not public."""
    names = imported(code, own)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {f"{node.value.id}.{node.attr}"}
    ours = {name for name in names if name.split(".")[0] in PACKAGES - {own.split(".")[0]}}
    return {name for name in ours if not is_public(name)}


def test_users_import_what_is_public_only():
    found = set()
    for path in users():
        own = "treeattn_llama.x" if "treeattn_llama" in path.parts else ""
        for code in codes(path):
            found |= {(path.name, name) for name in private(code, own)}
    assert found == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from treeattn.state import merge", {"treeattn.state.merge"}),
        ("def f():\n    import treeattn.flash as flash", {"treeattn.flash"}),
        ("import treeattn\n\ntreeattn.flash.load()", {"treeattn.flash"}),
        ("from treeattn_llama import text", {"treeattn_llama.text"}),
        ("import treeattn\n\ntreeattn.merge", set()),
        ("from treeattn import collectives", set()),
        ("from figures.style import palette", set()),
    ],
)
def test_what_is_public(code, found):
    assert private(code) == found


def test_every_public_name_is_there_and_no_other():
    assert sorted(treeattn.__all__) == list(treeattn.__all__)
    for name in treeattn.__all__:
        assert getattr(treeattn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'flash_attention'"):
        _ = treeattn.flash_attention


# ---------------------------------------------------------------- how large


def tokens(text: str) -> int:
    """Tokens of code: what is not a comment, a docstring or white space. An f-string is one."""
    count, within, begins = 0, 0, True
    layout = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    opening = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 tells f-strings' parts
    closing = getattr(tokenize, "FSTRING_END", None)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        within -= token.type == closing
        if token.type in layout:
            begins = True
            continue
        documentation = begins and token.type == tokenize.STRING
        count += not within and not documentation and token.type != closing
        within += token.type == opening
        begins = False
    return count


def test_what_counts_as_a_token():
    text = (
        '"""About."""\n\n# why\ndef f(x):\n    """More."""\n    return f"{x} or {x + 1}"  # what\n'
    )
    assert tokens(text) == len("def f ( x ) : return f''".split())


def by_circle() -> dict[str, int]:
    found: dict[str, int] = {}
    for name, text in MODULES.items():
        circle = circle_of(name)
        found[circle] = found.get(circle, 0) + tokens(text)
    return found


def test_the_budget():
    found = by_circle()
    assert set(found) == set(BUDGET), f"BUDGET has a line for each circle; their tokens: {found}"
    assert {name: n for name, n in found.items() if n > BUDGET[name]} == {}


def test_a_file_is_what_a_reader_can_hold():
    lines = {name: text.count("\n") for name, text in MODULES.items()}
    held = {name for name in lines if circle_of(name) in PACKAGES | {"figures"}}
    assert {name: lines[name] for name in held if lines[name] > LINES} == {}


def test_public_names_and_parameters_are_few():
    assert len(treeattn.__all__) <= PUBLIC_NAMES
    many = {}
    for name in treeattn.__all__:
        if inspect.isfunction(inspect.unwrap(getattr(treeattn, name))):
            parameters = set(inspect.signature(getattr(treeattn, name)).parameters)
            if len(parameters - {"q", "k", "v"}) > PARAMETERS:
                many[name] = len(parameters)
    assert many == {}
