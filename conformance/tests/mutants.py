"""Mutants: right functions with one operator, constant, name or argument changed, by program."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

OPERATORS = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.BitAnd: (ast.BitOr,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
}
NAMES = {
    "max": ("min", "mean"),
    "maximum": ("minimum", "add"),
    "sum": ("mean", "max"),
    "exp": ("exp2", "expm1"),
    "log": ("log2", "log10", "log1p"),
    "repeat": ("tile",),
    "isposinf": ("isneginf",),
    "isneginf": ("isposinf", "isinf"),
    "float64": ("float16",),
}


def mutants(right: Callable) -> Iterator[tuple[str, Callable]]:
    """(what was changed, the function with this change) for every single change."""
    source = textwrap.dedent(inspect.getsource(right))
    tree = ast.parse(source)
    before = ast.unparse(tree).splitlines()
    for place, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            changed = ast.parse(source)
            change(list(ast.walk(changed))[place])
            ast.fix_missing_locations(changed)
            line = getattr(node, "lineno", 0)
            text = ast.unparse(changed).splitlines()
            diff = [
                f"{a.strip()} -> {b.strip()}" for a, b in zip(before, text, strict=False) if a != b
            ]
            names = dict(right.__globals__)
            exec(compile(changed, f"<mutant of {right.__name__}>", "exec"), names)
            yield f"{line}: {what}: {diff[0] if diff else ''}", names[right.__name__]


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable]]:
    """(what, a function that changes a node of this kind)"""
    if isinstance(node, ast.BinOp):
        for other in OPERATORS.get(type(node.op), ()):
            yield other.__name__, lambda x, o=other: setattr(x, "op", o())
    if isinstance(node, ast.Compare):
        for other in OPERATORS.get(type(node.ops[0]), ()):
            yield other.__name__, lambda x, o=other: setattr(x, "ops", [o()])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        yield (
            "sign",
            lambda x: setattr(x, "op", ast.UAdd() if isinstance(x.op, ast.USub) else ast.Not()),
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "bool", lambda x: setattr(x, "value", not x.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        for by in (-1, 1):
            yield f"{by:+}", lambda x, by=by: setattr(x, "value", x.value + by)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "," in node.value:
        for text in _subscripts(node.value):
            yield text, lambda x, t=text: setattr(x, "value", t)
    if isinstance(node, ast.Attribute):
        for other in NAMES.get(node.attr, ()):
            yield other, lambda x, o=other: setattr(x, "attr", o)
    if isinstance(node, ast.Call) and len(node.args) in (2, 3):
        yield "arguments", lambda x: x.args.__setitem__(slice(-2, None), x.args[-2:][::-1])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("where", "maximum", "swapaxes"):
            kept = 1 if node.func.attr != "swapaxes" else None
            if kept:
                yield "no call", lambda x: x.__dict__.update(_only(x))


def _only(call: ast.Call) -> dict:
    """In place of where(c, a, b) or maximum(a, b): its last argument."""
    return {
        "func": ast.Attribute(ast.Name("np", ast.Load()), "asarray", ast.Load()),
        "args": call.args[-1:],
    }


def _subscripts(text: str) -> Iterator[str]:
    """An einsum's subscripts with two of the result's axes exchanged."""
    inputs, _, result = text.partition("->")
    for i in range(len(result) - 1):
        yield f"{inputs}->{result[:i]}{result[i + 1]}{result[i]}{result[i + 2 :]}"
