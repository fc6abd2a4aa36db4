"""Ask a function of yours from a shell, and end with 1 unless it passes.

python -m treeattn_conformance merge my_module:my_merge
python -m treeattn_conformance attention my_package.my_module:my_kernel --dtype bfloat16
python -m treeattn_conformance gradients my_module:my_backward --expect "stale NaN"
python -m treeattn_conformance tree my_module:build_my_tree
python -m treeattn_conformance verifier my_module:my_step --only chain --only siblings
python -m treeattn_conformance --names
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from . import CURES, __version__, anchor
from .forward import check_attention, check_merge
from .gradients import check_gradients
from .reference import TOLERANCES
from .report import printable
from .trees import check_tree
from .verifying import check_verifier

CHECKS = {
    "merge": check_merge,
    "attention": check_attention,
    "gradients": check_gradients,
    "tree": check_tree,
    "verifier": check_verifier,
}


def named(place: str) -> Callable:
    """The function at "module:function"; the module may stand in the folder you are in."""
    module, colon, function = place.partition(":")
    if not (module and colon and function):
        raise ValueError(f"function is {place!r}, expected module:function")
    return getattr(importlib.import_module(module), function)


def names_page() -> str:
    """Every mistake that has a name, with its cure, in Markdown."""
    lines = ["# Mistakes that have a name", ""]
    lines += ["This page is what `python -m treeattn_conformance --names` prints."]
    for check, cures in CURES.items():
        lines += ["", f"## check_{check}", "", "| it says | what helps |", "|---|---|"]
        lines += [f'| <a id="{anchor(check, x)}"></a>{x} | {cures[x]} |' for x in cures]
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn_conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("check", nargs="?", choices=CHECKS, help="what your function does")
    add("function", nargs="?", help="where it is, as module:function")
    add("--dtype", choices=TOLERANCES, help="of the arrays that it gets (default: float32)")
    add("--tolerance", type=float, help="how far a number may be off")
    add("--only", action="append", metavar="QUESTION", help="ask this question, and no others")
    add("--expect", action="append", metavar="NAME", help="a question or mistake known to fail")
    add("--names", action="store_true", help="print all mistakes that have a name, with cures")
    add("--version", action="version", version=f"treeattn_conformance {__version__}")
    return parser


def main(command_line: Sequence[str] | None = None) -> int:
    parser = arguments()
    given = vars(parser.parse_args(command_line))
    if given["names"]:
        print(printable(names_page()))
        return 0
    if not given["function"]:
        parser.error("a check and a function are needed, or --names")
    check = CHECKS[given["check"]]
    chosen = ("dtype", "tolerance", "only", "expect")
    options = {name: given[name] for name in chosen if given[name] is not None}
    try:
        report = check(named(given["function"]), **options)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        parser.error(str(error))
    print(report)
    return int(not report)


if __name__ == "__main__":
    sys.exit(main())
