"""The packages' annotations, checked at every call of a function that has any.

`jaxtyping.install_import_hook` decorates every function: those without annotations, too, and those
within another function anew at each of its calls, a millisecond each. Of tests that call much and
compile little that was more than half the time. Here what has nothing to check stays as it is.
"""

import ast
import importlib.machinery
import importlib.util
import sys

import beartype
import jaxtyping

check = jaxtyping.jaxtyped(typechecker=beartype.beartype)


def decorator() -> ast.expr:
    """What is written over a function or class: this module's `check`, wherever it stands."""
    return ast.parse(f"__import__({__name__!r}).check", mode="eval").body


class Decorated(ast.NodeTransformer):
    """A module in which dataclasses, and the functions with annotations, are checked."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.decorator_list.insert(0, decorator())  # it sees what `dataclass` has made
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        a = node.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        if node.returns or any(x is not None and x.annotation for x in arguments):
            node.decorator_list.append(decorator())  # innermost: `jax.jit` is called with the check
        return node


class Loader(importlib.machinery.SourceFileLoader):
    """Reads a module's source, never what Python has cached of it, which has no checks."""

    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        tree = Decorated().visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Finder:
    """Finds the modules of `packages` as Python does, to be loaded by `Loader`."""

    def __init__(self, *packages: str):
        self.packages = packages

    def find_spec(self, name: str, path=None, target=None):
        if name.split(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install(*packages: str) -> None:
    """Check whatever is imported of these packages from now on."""
    sys.meta_path.insert(0, Finder(*packages))
