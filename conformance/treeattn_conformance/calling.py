"""Calling the function under test: on copies, with the options that it has; arrays come back."""

import copy
import inspect
from collections.abc import Callable

import numpy as np


def takes(f: Callable, option: str) -> bool:
    """Whether f has an argument of this name, or takes any keyword."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python
        return False
    kinds = {parameter.kind for parameter in parameters.values()}
    return option in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def as_array(x) -> np.ndarray:
    """x as an array. Raises TypeError, with advice, if NumPy cannot read a tensor."""
    try:
        return np.asarray(x)
    except (TypeError, RuntimeError) as error:
        words = (("BFloat16", ".float()"), ("cuda", ".cpu()"), ("grad", ".detach()"))
        advice = [call for word, call in words if word in str(error)]
        if not advice:
            raise
        raise TypeError(f"NumPy cannot read this tensor: return x{advice[0]}") from error


def on_copies(f: Callable, arguments: dict, options: dict, written: set[str]):
    """f's answer on copies; adds to `written` the names of the arguments that f changed."""
    given = copy.deepcopy(arguments), copy.deepcopy(options)
    answer = f(*given[0].values(), **given[1])
    for before, after in zip((arguments, options), given, strict=True):
        written |= {name for name in before if not same_bits(before[name], after[name])}
    return answer


def same_bits(x, y) -> bool:
    """Whether two arrays, or two lists or mappings of arrays, hold the same numbers."""
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same_bits(x[name], y[name]) for name in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same_bits, x, y))
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
