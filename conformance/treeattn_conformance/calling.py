"""Calling somebody's function: with the options that it has, and its answer as NumPy arrays."""

import inspect
from collections.abc import Callable

import numpy as np


def takes(f: Callable, option: str) -> bool:
    """Whether f has an argument of this name, or takes any."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python
        return False
    kinds = {parameter.kind for parameter in parameters.values()}
    return option in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def as_array(x) -> np.ndarray:
    """x as an array; TypeError with a word on what to do where NumPy cannot read a tensor."""
    try:
        return np.asarray(x)
    except (TypeError, RuntimeError) as error:
        words = (("BFloat16", ".float()"), ("cuda", ".cpu()"), ("grad", ".detach()"))
        advice = [call for word, call in words if word in str(error)]
        if not advice:
            raise
        raise TypeError(f"NumPy cannot read this tensor: return x{advice[0]}") from error
