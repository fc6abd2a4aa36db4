"""Ask a function of yours from a shell, and end with 1 unless it passes.

python -m treeattn_conformance merge my_module:my_merge
python -m treeattn_conformance attention my_package.my_module:my_kernel --dtype bfloat16
python -m treeattn_conformance gradients my_module:my_backward --expect "stale NaN"
python -m treeattn_conformance tree my_module:build_my_tree
python -m treeattn_conformance verifier my_module:my_step --only chain --only siblings
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .forward import check_attention, check_merge
from .gradients import check_gradients
from .reference import TOLERANCES
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


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn_conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("check", choices=CHECKS, help="what your function does")
    add("function", help="where it is, as module:function")
    add("--dtype", choices=TOLERANCES, help="of the arrays that it gets (default: float32)")
    add("--tolerance", type=float, help="how far a number may be off")
    add("--only", action="append", metavar="QUESTION", help="ask this question, and no others")
    add("--expect", action="append", metavar="NAME", help="a question or mistake known to fail")
    add("--version", action="version", version=f"treeattn_conformance {__version__}")
    return parser


def main(command_line: Sequence[str] | None = None) -> int:
    parser = arguments()
    given = vars(parser.parse_args(command_line))
    check, function = CHECKS[given.pop("check")], given.pop("function")
    try:
        report = check(named(function), **given)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        parser.error(str(error))
    print(report)
    return int(not report)


if __name__ == "__main__":
    sys.exit(main())
