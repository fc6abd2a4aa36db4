"""Ask a function of yours from a shell, and end with 1 unless it passes.

python -m treeattn_conformance merge my_module:my_merge
python -m treeattn_conformance attention my_package.my_module:my_kernel --dtype bfloat16
python -m treeattn_conformance invariance my_module:my_kernel
python -m treeattn_conformance packed_loss my_module:my_loss
python -m treeattn_conformance tree my_module:build_my_tree
python -m treeattn_conformance verifier my_module:my_step
python -m treeattn_conformance scan my_module:my_scan
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .attention import check_attention
from .invariance import check_invariance
from .merging import check_merge
from .packed_loss import check_packed_loss
from .rounding import TOLERANCES
from .scans import check_scan
from .trees import check_tree
from .verifying import check_verifier

CHECKS = {
    "merge": check_merge,
    "attention": check_attention,
    "invariance": check_invariance,
    "packed_loss": check_packed_loss,
    "tree": check_tree,
    "verifier": check_verifier,
    "scan": check_scan,
}
OF_NO_DTYPE = ("tree", "verifier", "scan")


def named(place: str) -> Callable:
    """The function at "module:function"; the module may stand in the folder you are in."""
    module, colon, function = place.partition(":")
    if not (module and colon and function):
        raise ValueError(f"function is {place!r}, expected module:function")
    return getattr(importlib.import_module(module), function)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn_conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("check", choices=CHECKS, help="what your function does")
    add("function", help="where it is, as module:function")
    add(
        "--dtype",
        choices=TOLERANCES,
        default="float32",
        help="of the arrays that it gets, where a check has several (default: float32)",
    )
    add("--version", action="version", version=f"treeattn_conformance {__version__}")
    chosen = parser.parse_args(arguments)
    try:
        function = named(chosen.function)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    options = {} if chosen.check in OF_NO_DTYPE else {"dtype": chosen.dtype}
    report = CHECKS[chosen.check](function, **options)
    print(report)
    return int(not report)


if __name__ == "__main__":
    sys.exit(main())
