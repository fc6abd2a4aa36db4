"""The circles: who may import whom, in which order, what is public, and how large each may be."""

import ast
import functools
import graphlib
import importlib
import inspect
import io
import sys
import tokenize

import pytest
from pages import REPOSITORY, codes, text

import treeattn

pytestmark = pytest.mark.house

# The folder in which each package, or folder of scripts, stands.
FOUND_IN = {
    "treeattn": ".",
    "treeattn_llama": "llama",
    "treeattn_conformance": "conformance",
    "figures": ".",
    "course": "notebooks",
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
    "course": {"treeattn", "figures"},
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
    "slots",
    "key_shards",
    "mesh",
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
    "treeattn": 21_250,
    "treeattn_llama": 19_000,
    "treeattn_conformance": 25_000,
    "figures": 22_200,
    "course": 11_870,
    "benchmarks": 8_200,  # each way of calling PyTorch is code of its own
    "labs.acceptance": 4_550,
    "labs.cluster": 5_000,
    "labs.cost": 13_830,
    "labs.exact": 8_150,
    "labs.kernels": 11_000,
    "labs.recurrent": 2_970,
    "labs.sharding": 1_900,
    "labs.training": 7_060,
}
LINES = 400  # of a file of the packages and the figures
PARAMETERS = 10  # of a public function, beside q, k and v


def modules() -> dict[str, str]:
    """Dotted name and text of every module of ours but tests; packages end in ".__init__"."""
    found = {}
    for top, folder in FOUND_IN.items():
        root = REPOSITORY / folder
        for file in sorted((root / top).rglob("*.py")):
            name = file.relative_to(root).with_suffix("").parts
            if "tests" not in name:
                found[".".join(name)] = text(file)
    return found


MODULES = modules()


def circle_of(name: str) -> str:
    """ "labs.cost" of labs.cost.network, "figures" of figures.style."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "labs" else parts[0]


@functools.cache  # the planted imports ask about all of the other modules again
def imported(code: str, importer: str = "") -> frozenset[str]:
    """Dotted names of all that this code imports, wherever in it: modules, or names of theirs."""
    names = set()
    for node in ast.walk(ast.parse(code)):
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
    for importer, code in texts.items():
        names = imported(code, importer)
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


def test_imports_go_inwards_downwards_and_in_no_ring():
    """From a circle to what it stands on; in the core to an earlier file."""
    edges = graph(MODULES)
    assert outward(edges) == set()
    core = {name for name in MODULES if circle_of(name) == "treeattn"}
    assert core == {f"treeattn.{name}" for name in CORE}
    assert upward(edges) == set()
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError names a ring


@pytest.mark.parametrize(
    ("rule", "module", "line", "target"),
    [
        (outward, "treeattn.state", "from treeattn_llama import Llama", "treeattn_llama.__init__"),
        (outward, "treeattn.across", "def f():\n    import figures.style", "figures.style"),
        (outward, "labs.exact.digits", "from labs.cost import network", "labs.cost.network"),
        (upward, "treeattn.state", "from treeattn.local import attend", "treeattn.local"),
        (upward, "treeattn.devices", "def f():\n    import treeattn", "treeattn.__init__"),
        (upward, "treeattn.state", "from . import gradient", "treeattn.gradient"),
    ],
)
def test_a_planted_import_is_found(rule, module, line, target):
    planted = MODULES | {module: f"{MODULES[module]}\n{line}\n"}
    assert rule(graph(planted)) == {f"{module} imports {target}"}


def test_the_core_and_the_suite_need_little():
    for circle, allowed in OTHERS.items():
        names = [name for name in MODULES if circle_of(name) == circle]
        tops = {x.split(".")[0] for name in names for x in imported(MODULES[name], name)}
        assert tops - sys.stdlib_module_names - {circle} <= allowed


def test_nobody_imports_a_lab_but_its_own_notebook_and_tests():
    found = set()
    ours = [top for top in REPOSITORY.iterdir() if top.is_dir() and top.name[0] != "."]
    for path in [path for top in ours for path in top.rglob("*")]:
        place = path.relative_to(REPOSITORY).parts
        if path.suffix in (".py", ".ipynb") and place[0] != "build":
            names = {name for code in codes(path) for name in imported(code)}
            labs = {circle_of(name) for name in names if name.startswith("labs.")}
            found |= {f"{path.name} imports {lab}" for lab in labs - {".".join(place[:2])}}
    assert found == set()


# ---------------------------------------------------------------- what is public


def users() -> list:
    """All that uses the packages as a reader would."""
    folders = ("examples", "benchmarks", "site", "figures", "labs", "notebooks", "conformance")
    found = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.*")]
    found += [*REPOSITORY.glob("llama/treeattn_llama/*.py"), *REPOSITORY.glob("*.md")]
    kinds = (".py", ".ipynb", ".md")
    within = {"tests", "treeattn_conformance"}
    return [path for path in found if path.suffix in kinds and not within & set(path.parts)]


def is_public(name: str) -> bool:
    """Whether "treeattn.x" is a name of the package's `__all__`."""
    top, _, rest = name.partition(".")
    return not rest or rest in importlib.import_module(top).__all__ or rest == "__version__"


def private(code: str) -> set[str]:
    """What this code imports, or reaches as `treeattn.…`, of our packages, and is not public."""
    names = set(imported(code))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {f"{node.value.id}.{node.attr}"}
    return {name for name in names if name.split(".")[0] in PACKAGES and not is_public(name)}


def test_users_import_what_is_public_only():
    found = set()
    for path in users():
        own = "treeattn_llama" if "treeattn_llama" in path.parts else None
        names = {name for code in codes(path) for name in private(code)}
        if own:  # the Llama's errors are worded as the core's, of the same release
            names = {name for name in names if not name.startswith("treeattn.checks.")}
        found |= {(path.name, name) for name in names if name.split(".")[0] != own}
    assert found == set()
    code = """
from treeattn.state import merge
import treeattn.beam as beam
treeattn.flash.load(), treeattn.merge
from treeattn_llama import text
from figures.style import palette
"""
    planted = {"treeattn.state.merge", "treeattn.beam", "treeattn.flash", "treeattn_llama.text"}
    assert private(code) == planted


def test_every_public_name_is_there_and_no_other():
    assert len(set(treeattn.__all__)) == len(treeattn.__all__)  # ruff sorts them
    for name in treeattn.__all__:
        assert getattr(treeattn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'flash_attention'"):
        _ = treeattn.flash_attention


# ---------------------------------------------------------------- how large


def tokens(code: str) -> int:
    """Tokens of code: what is not a comment, a docstring or white space. An f-string is one."""
    count, within, begins = 0, 0, True
    layout = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    opening = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 tells f-strings' parts
    closing = getattr(tokenize, "FSTRING_END", None)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
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


def test_the_budget():
    known = '"""About."""\ndef f(x):\n    """More."""\n    return f"{x} or {x + 1}"  # what\n'
    assert tokens(known) == len("def f ( x ) : return f''".split())
    found: dict[str, int] = {}
    for name, code in MODULES.items():
        found[circle_of(name)] = found.get(circle_of(name), 0) + tokens(code)
    assert set(found) == set(BUDGET), f"BUDGET has a line for each circle; their tokens: {found}"
    over = {name: f"{n:,} of {BUDGET[name]:,}" for name, n in found.items() if n > BUDGET[name]}
    assert not over, f"tokens of code over BUDGET, checks/test_imports.py: {over}: a keeper decides"


def test_a_file_is_what_a_reader_can_hold():
    lines = {name: code.count("\n") for name, code in MODULES.items()}
    held = {name for name in lines if circle_of(name) in PACKAGES | {"figures"}}
    assert {name: lines[name] for name in held if lines[name] > LINES} == {}


def test_parameters_are_few():
    functions = [getattr(treeattn, name) for name in treeattn.__all__]
    for function in filter(inspect.isfunction, map(inspect.unwrap, functions)):
        parameters = set(inspect.signature(function).parameters) - {"q", "k", "v"}
        assert len(parameters) <= PARAMETERS, function
