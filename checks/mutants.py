"""Do the tests see a mistake? Sixty are planted, one at a time, and `make test`'s are asked.

make mutants                       go on where the last call stopped; print how many are seen
python checks/mutants.py all        ask about all of them anew
python checks/mutants.py survivors  ask all tests about those that the likeliest tests do not see

A mistake is a change of one line of a package, as a slip of the hand would make it, planted in a
copy of the checkout. The table beside this file names the test that fails then, or says that the
mistake survived, with a remark where it changes nothing. Without the table, others are drawn.
"""

import argparse
import ast
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

REPOSITORY = Path(__file__).parent.parent.resolve()
TABLE = Path(__file__).with_suffix(".tsv")
COLUMNS = ("file", "line", "kind", "before", "after", "result", "remark")
SEEN = re.compile(r"\S+\.(py|ipynb)\b")  # how the name of a test begins
SEED = 0
# Where each package stands, how many mistakes it gets, and whose tests are asked, in this order.
CIRCLES = {
    "treeattn": (30, ("tests", "llama/tests", "conformance/tests", "checks", "notebooks")),
    "llama/treeattn_llama": (15, ("llama/tests", "tests", "notebooks")),
    "conformance/treeattn_conformance": (15, ("conformance/tests", "tests")),
}
# Nobody needs the smallest example that fails: the profile "once" of conftest.py looks for none.
OPTIONS = "-x -q -rfE --tb=no -p no:cacheprovider --hypothesis-profile=once --hypothesis-seed=0"
OPTIONS = [*f"{OPTIONS} --nbval --nbval-current-env".split(), "-m", "not slow"]
LIKELIEST = 4  # files of tests
SECONDS = 60  # of processor time for each of them
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.BitAnd, ast.BitOr)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod)),
    *(("max", "min"), ("maximum", "minimum"), ("any", "all"), ("zeros", "ones")),
)
OTHER = dict(PAIRS) | {b: a for a, b in PAIRS} | {ast.Pow: ast.Mult, "sum": "max"}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What a program computes with: neither annotations nor the words of messages."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.JoinedStr | ast.Raise):
            continue
        if getattr(tree, "arg", None) == "strict":  # of `zip`: what has one length has it still
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from nodes(child)


def mistakes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind, what could have been written instead of this node)"""
    match node:
        case ast.Compare(left, [op], right) if type(op) in OTHER:
            yield "comparison", ast.Compare(left, [OTHER[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield "operator", ast.BinOp(left, OTHER[type(op)](), right)
        case ast.BoolOp(op, values):
            yield "and, or", ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield "sign, not", operand
        case ast.Constant(bool() as value):
            yield "true, false", ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.AugAssign() | ast.Expr(ast.Call()):
            yield "dropped", ast.Pass()
        case ast.Assign([ast.Name(name)], value):
            if name in {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}:
                yield "dropped", ast.Pass()  # x = f(x)
        case ast.Call(function, arguments, keywords):
            if isinstance(function, ast.Attribute) and function.attr in OTHER:
                other = ast.Attribute(function.value, OTHER[function.attr])
                yield "function", ast.Call(other, arguments, keywords)
            if len(arguments) > 1:
                turned = [arguments[1], arguments[0], *arguments[2:]]
                yield "order", ast.Call(function, turned, keywords)


def faults(file: Path) -> Iterator[dict]:
    """All mistakes that could stand in this file, each of them in one line."""
    text = file.read_text(encoding="utf-8")
    lines = text.encode().splitlines()  # columns count bytes
    for node in nodes(ast.parse(text)):
        for kind, wrong in mistakes(node):
            if node.lineno != node.end_lineno:
                continue
            operation = isinstance(wrong, ast.BoolOp | ast.BinOp | ast.Compare)
            code = f"({ast.unparse(wrong)})" if operation else ast.unparse(wrong)
            line = lines[node.lineno - 1]
            changed = line[: node.col_offset] + code.encode() + line[node.end_col_offset :]
            place = (str(file.relative_to(REPOSITORY)), node.lineno, kind)
            row = (*place, line.decode().strip(), changed.decode().strip(), "", "")
            yield dict(zip(COLUMNS, row, strict=True))


def draw() -> Iterator[dict]:
    """As many mistakes in each circle as it has a share, all kinds equally likely."""
    chance = random.Random(SEED)
    for folder, (share, _) in CIRCLES.items():
        kinds = defaultdict(list)
        for file in sorted((REPOSITORY / folder).glob("*.py")):
            for fault in faults(file):
                kinds[fault["kind"]].append(fault)
        for _ in range(share):
            pool = kinds[chance.choice(sorted(kinds))]
            yield pool.pop(chance.randrange(len(pool)))


def defined(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if hasattr(node, "name")}


def likeliest(fault: dict) -> list[str]:
    """The tests about this circle, those first that name most often what the file defines, or what
    files define that import it."""
    file = REPOSITORY / fault["file"]
    users = [x for x in file.parent.glob("*.py") if f"{file.stem} import" in x.read_text("utf-8")]
    names = defined(file).union(*map(defined, users))

    def score(path: Path) -> int:
        words = re.findall(r"\w+", path.read_text(encoding="utf-8"))
        return sum(word in names for word in words) + 1000 * (path.stem == f"test_{file.stem}")

    found = []
    _, folders = CIRCLES[str(Path(fault["file"]).parent)]
    for folder in folders:
        found += sorted((REPOSITORY / folder).glob("test_*.py"), key=score, reverse=True)
        found += sorted((REPOSITORY / folder).glob("*.ipynb"))
    return [str(path.relative_to(REPOSITORY)) for path in found]


def ask(fault: dict, copy: Path, tests: list[str]) -> str:
    """The first of these tests that fails with the mistake planted in the copy, or "survived"."""
    file = copy / fault["file"]
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    same = [i for i, line in enumerate(lines) if line.strip() == fault["before"]]
    if not same:
        return "gone: the line is no more"
    nearest = min(same, key=lambda i: abs(i + 1 - int(fault["line"])))
    wrong = lines[nearest].replace(fault["before"], fault["after"])
    file.write_text("".join([*lines[:nearest], wrong, *lines[nearest + 1 :]]), encoding="utf-8")
    ours = os.pathsep.join(str(copy / folder) for folder in (".", "llama", "conformance"))
    limit = SECONDS * len(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *tests],
        cwd=copy,
        # Python would not notice a file that is as new and as long as the one before.
        env=os.environ | {"PYTHONPATH": ours, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
    )
    file.write_text("".join(lines), encoding="utf-8")
    if done.returncode not in (0, 1, 2):  # by a signal where it was out of time, or crashed
        return f"pytest ended with {done.returncode}"
    failed = re.search(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout)
    return failed[1] if failed else "survived"


def write(table: list[dict]) -> None:
    rows = [COLUMNS, *(row.values() for row in table)]
    lines = ["\t".join(map(str, row)) + "\n" for row in rows]
    TABLE.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="?", choices=("all", "survivors"))
    which = parser.parse_args().which
    if not TABLE.exists():
        write(list(draw()))
    _, *rows = TABLE.read_text(encoding="utf-8").splitlines()
    table = [dict(zip(COLUMNS, row.split("\t"), strict=True)) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".*", "build", "__pycache__")
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        for fault in tqdm(table, unit="mistake"):
            known = fault["result"]
            if known and which != "all" and (which != "survivors" or known != "survived"):
                continue
            tests = likeliest(fault)[: None if which == "survivors" else LIKELIEST]
            for asked in ([known], tests) if SEEN.match(known) else (tests,):
                fault["result"] = ask(fault, copy, asked)
                if SEEN.match(fault["result"]):
                    break
            write(table)
    for folder in CIRCLES:
        results = [row["result"] for row in table if str(Path(row["file"]).parent) == folder]
        seen = sum(SEEN.match(result) is not None for result in results)
        print(f"{folder}: {seen} of {len(results)} seen")


if __name__ == "__main__":
    main()
