"""How many functions of the package a call takes, in Python: what a warm call costs its user."""

import sys
from pathlib import Path

import treeattn

PACKAGE = str(Path(treeattn.__file__).parent)


def python_calls(function, *arguments, **options) -> int:
    """Calls of the package's functions in `function(*arguments, **options)`, called before."""
    for _ in range(2):  # traced, compiled and known to be
        function(*arguments, **options)
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        function(*arguments, **options)
    finally:
        sys.setprofile(None)
    return count
