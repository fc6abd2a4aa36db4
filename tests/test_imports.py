"""The rooms: who may import whom, no circles, small files, and a core that needs little."""

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeattn

PACKAGE = Path(treeattn.__file__).parent
REPOSITORY = Path(__file__).parent.parent

# What others may import, each as its `__all__` says, or else what has no underscore in front; of
# figures, which belong to a checkout, every module. All else may change its name tomorrow.
PUBLIC = (
    "treeattn",
    "treeattn_llama",
    "treeattn_llama.speculation",
    "labs.cost",
    "treeattn_conformance",
    "figures",
)

# What each room stands on, besides itself. A name of a room stands for all that is in it.
BELOW = {
    "extras": (),
    "idea": (),
    "measured": (),
    "kernel": ("idea",),
    "devices": ("idea", "kernel", "measured"),
    "trees": ("idea.arrays",),
    "cost": ("idea", "measured"),
    "conformance": (),
    "llama": ("idea", "kernel", "devices", "trees", "measured", "extras"),
    "figures": ("idea", "kernel", "devices", "trees", "cost", "llama", "conformance", "extras"),
    "__init__": ("idea", "kernel", "devices", "trees", "llama"),
    "__main__": ("idea", "kernel", "devices", "trees", "llama", "extras"),
}


def sources() -> dict[str, str]:
    """Name of each module, without "treeattn.", and its text; packages end in ".__init__"."""
    files = PACKAGE.rglob("*.py")
    return {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file.read_text(encoding="utf-8")
        for file in files
    }


def imported(importer: str, text: str, modules: set[str]) -> Iterator[str]:
    """Names of the `modules` that the module of this name and text imports, wherever in it.

    Modules are spelled out, but for those of the conformance suite: it can be copied.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:
                assert node.level == 1 and importer.startswith("conformance."), importer
                module = f"treeattn_conformance.{module}"
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "treeattn":
                continue
            name = name.partition(".")[2]
            holder = name.rpartition(".")[0]  # of a function, or of another name
            choices = (name, f"{name}.__init__", holder, f"{holder}.__init__".lstrip("."))
            yield next(choice for choice in choices if choice in modules)


def graph(texts: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(imported(name, text, set(texts))) for name, text in texts.items()}


def upward(edges: dict[str, set[str]]) -> list[str]:
    """The imports that `BELOW` does not allow."""
    found = []
    for name, targets in edges.items():
        room = name.split(".")[0]
        for target in targets:
            allowed = any(f"{target}.".startswith(f"{below}.") for below in (room, *BELOW[room]))
            if not allowed:
                found.append(f"{name} imports {target}")
    return found


def circle(edges: dict[str, set[str]]) -> list[str] | None:
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


def test_dependencies_go_downwards_only():
    assert upward(graph(sources())) == []


def test_there_is_no_circle():
    assert circle(graph(sources())) is None


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        ("idea.state", "from treeattn.kernel.attend import attend", "kernel.attend"),
        ("idea.state", "from treeattn.kernel import attend", "kernel.attend"),
        ("kernel.attend", "import treeattn.devices.mesh", "devices.mesh"),
        ("devices.mesh", "def f():\n    from treeattn_llama import Llama", "llama.__init__"),
        ("devices.mesh", "from treeattn import merge", "__init__"),
        ("trees.beam", "from treeattn.idea.state import merge", "idea.state"),
        ("cost.program", "from treeattn.kernel.attend import attend", "kernel.attend"),
        ("llama.model", "from labs.cost import collectives", "cost.__init__"),
        ("llama.model", "import figures.style as style", "figures.style"),
        ("conformance.merging", "from treeattn.idea.state import merge", "idea.state"),
    ],
)
def test_a_planted_upward_import_is_found(module, line, message):
    texts = sources()
    before = upward(graph(texts))
    texts[module] += f"\n{line}\n"
    assert set(upward(graph(texts))) - set(before) == {f"{module} imports {message}"}


@pytest.mark.parametrize(
    "line",
    ["from treeattn.idea.state import merge", "def f():\n    from treeattn.idea import state"],
)
def test_a_planted_circle_is_found(line):
    texts = sources()
    texts["idea.arrays"] += f"\n{line}\n"
    assert set(circle(graph(texts))) == {"idea.arrays", "idea.state"}


def test_a_file_is_what_a_reader_can_hold():
    """Some 300 lines each, figures included; how many files there are is nobody's limit."""
    lines = {name: text.count("\n") for name, text in sources().items()}
    assert {name: n for name, n in lines.items() if n > 330} == {}


def test_every_module_can_be_imported_by_its_name():
    """`import treeattn.x as x` is a module, not a function that a package exports as x."""
    names = [module.name for module in pkgutil.walk_packages(treeattn.__path__, "treeattn.")]
    assert {name.removeprefix("treeattn.") for name in names} == {
        name.removesuffix(".__init__") for name in sources() if name != "__init__"
    }
    for name in names:
        importlib.import_module(name)
        scope: dict[str, object] = {}
        exec(f"import {name} as module", scope)
        assert isinstance(scope["module"], types.ModuleType), name
        assert scope["module"].__name__ == name


def test_every_public_name_is_there_and_listed():
    assert set(treeattn.__all__) <= set(dir(treeattn))
    for name in treeattn.__all__:
        assert getattr(treeattn, name) is not None
    assert treeattn.energy is importlib.import_module("treeattn.idea.energy").energy
    with pytest.raises(AttributeError, match="no attribute 'flash_attention'"):
        _ = treeattn.flash_attention


def run(code: str) -> str:
    """What a fresh Python prints that runs `code`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_jax_numpy_and_jaxtyping_only():
    list_new = """
import sys
import jax, numpy, jaxtyping
def tops():
    return {name.split(".")[0] for name in sys.modules}
before = tops()
from treeattn import merge, pack, tree_decode
print(*sorted(tops() - before - set(sys.stdlib_module_names)))
ours = [name for name in sys.modules if name.startswith("treeattn.") and name.count(".") == 1]
print(*sorted(ours))
print("jax.experimental.pallas" in sys.modules)  # a fifth of JAX's own time
"""
    assert run(list_new).splitlines() == [
        "treeattn",
        "treeattn.devices treeattn.idea treeattn.kernel treeattn.measured treeattn.trees",
        "False",
    ]


def test_costs_need_no_more_than_the_core():
    """Whatever draws figures or reads checkpoints may be absent, and is not imported where not."""
    absent = ("matplotlib", "PIL", "gguf", "tokenizers", "safetensors", "jinja2", "tqdm")
    code = f"""
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({absent}, None)
import labs.cost
for module in pkgutil.iter_modules(labs.cost.__path__, "labs.cost."):
    importlib.import_module(module.name)
print(set(labs.cost.__all__) <= set(dir(labs.cost)))
print(*sorted({{name.split(".")[1] for name in sys.modules if name.startswith("treeattn.")}}))
labs.cost.__main__.main(["--context", "1000"])
"""
    same, rooms, _, blank, *table = run(code).splitlines()
    assert (same, rooms, blank) == ("True", "cost devices idea kernel measured trees", "")
    assert table[0].startswith("do: ") and table[2].startswith("ms") and len(table) > 7


@pytest.mark.parametrize(
    ("what", "absent", "message"),
    [
        ("import treeattn; treeattn.Llama", "gguf", "treeattn_llama needs gguf"),
        ("from treeattn import Llama", "tokenizers", "treeattn_llama needs tokenizers"),
        ("import treeattn_llama.text", "jinja2", "treeattn_llama needs jinja2"),
        ("import treeattn.__main__", "tqdm", "treeattn_llama needs tqdm"),
        ("import figures", "PIL", "figures needs PIL"),
        ("import figures.style", "matplotlib", "figures needs matplotlib"),
        ("import figures.energy", "safetensors", "treeattn_llama needs safetensors"),
    ],
)
def test_what_is_missing_names_its_extra(what, absent, message):
    """Figures belong to a checkout, which has a group of dependencies for them."""
    install = "'treeattn[llama]'"
    if message.startswith("figures"):
        install = "-e '.[llama]' --group dev"
    code = f"""
import sys
sys.modules[{absent!r}] = None  # as if it were not there
try:
    {what}
except ImportError as error:
    print(error)
"""
    expected = f"{message}, not installed here: pip install {install}"
    assert run(code).strip() == expected


def blocks(markdown: str) -> Iterator[str]:
    """The Python code of a text in Markdown, without what a shell or IPython would run."""
    for block in re.findall(r"^```python\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        if block.startswith(">>> "):
            lines = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        yield "\n".join(lines)


def users() -> Iterator[tuple[str, str]]:
    """(file, code) of all that stands outside of the package and uses it as a reader would."""
    for folder in ("examples", "benchmarks", "training", "site", "notebooks"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            yield f"{folder}/{file.name}", file.read_text(encoding="utf-8")
    for file in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            for code in [source] if cell["cell_type"] == "code" else blocks(source):
                yield file.name, code
    for file in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "site").glob("*.md")):
        for code in blocks(file.read_text(encoding="utf-8")):
            yield file.name, code


def is_public(name: str) -> bool:
    """Whether "treeattn.x.y" is a public module, one of its names, or of the figures."""
    holder, _, last = name.rpartition(".")
    if name in PUBLIC or f"{name}.".startswith("figures."):
        return True
    if holder not in PUBLIC or last.startswith("_"):
        return False
    module = importlib.import_module(holder)
    return last in getattr(module, "__all__", dir(module))


def private(code: str) -> set[str]:
    """What this code imports, or reaches through `treeattn.…`, and is not public."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {f"{node.value.id}.{node.attr}"}
    ours = {name for name in names if name.split(".")[0] == "treeattn"}
    return {name for name in ours if not is_public(name)}


def test_users_import_what_is_public_only():
    """Notebooks, the README, examples, benchmarks, training and the site."""
    found = {(file, name) for file, code in users() for name in private(code)}
    assert found == set()
    files = {file for file, _ in users()}
    assert {"README.md", "01_the_energy_function.ipynb", "examples/decode_sharded.py"} <= files


def test_contributing_has_the_public_modules():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## What is public\n\n")
    sentence, _, _ = section.partition(":")
    assert re.findall(r"`(treeattn[\w.]*)`", sentence) == list(PUBLIC)


def test_the_readmes_tree_is_that_of_the_project():
    """Every folder that holds files of ours: at the top, the package's rooms, and theirs."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## What is where\n\n```\n")
    tree, _, _ = section.partition("```")
    path: list[str] = []
    shown = set()
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 4
        path = [*path[:depth], name.rstrip("/")]
        assert (REPOSITORY / "/".join(path)).exists() and len(line.split()) > 2, line
        shown |= {"/".join(path)} if name.endswith("/") else set()
    ours = {str(file.parent.relative_to(REPOSITORY)) for file in PACKAGE.rglob("*.py")}
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").replace("/", "").split()
    for folder in REPOSITORY.iterdir():
        if folder.is_dir() and not any(map(folder.match, (".*", *ignored))):
            ours |= {folder.name}
    assert shown == ours


def test_what_we_rely_on_is_where_the_table_says():
    """Each place is a file with that word in it, and each test that would notice is there."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.search(r"^\| what \| where .*?\n\n", text, re.MULTILINE | re.DOTALL)[0]
    _, _, *rows = [row.strip("|").split(" | ") for row in table.strip().splitlines()]
    files = (REPOSITORY / "tests").glob("test_*.py")
    tests = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for what, where, _, notices in rows:
        file, word = re.findall(r"`(\S+?)`", where)
        assert word in (REPOSITORY / file).read_text(encoding="utf-8"), what
        named = re.findall(r"`(\S+?)`", notices)
        assert named or "`make " in notices, what
        for name in named:
            if name.startswith("test_"):
                assert f"def {name}(" in tests, name
            elif "/" in name:
                assert (REPOSITORY / name).is_file(), name


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from treeattn.idea.state import merge", "treeattn.idea.state.merge"),
        ("from treeattn.kernel import flash", "treeattn.kernel.flash"),
        ("from treeattn import kernel", "treeattn.kernel"),
        ("import treeattn.devices.merge as m", "treeattn.devices.merge"),
        ("def f():\n    from treeattn.program import memory", "treeattn.program.memory"),
        ("import treeattn\n\ntreeattn.kernel.flash.load()", "treeattn.kernel"),
        ("from treeattn_llama import model", "treeattn_llama.model"),
        ("from treeattn_conformance import judging", "treeattn_conformance.judging"),
        ("import treeattn\n\ntreeattn.merge", None),
        ("from labs.cost import memory", None),
        ("from figures import energy", None),
        ("from figures.sent import sent_by_context", None),
        ("from treeattn_llama import speculation", None),
    ],
)
def test_what_is_public(code, found):
    assert private(code) == ({found} - {None})
