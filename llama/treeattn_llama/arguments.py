"""Errors that name the argument, what came, and what was expected."""

import math
import numbers
import operator

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def integer(name: str, x, least: int | None = None, most: int | None = None) -> int:
    """`x` as an int: any whole number of Python's, NumPy's or JAX's, but no bool and no float.

    Raises a TypeError for anything else, a ValueError below `least` or above `most`.
    """
    expected = "an integer"
    if most is not None:
        expected += f" from {least} to {most}"
    elif least is not None:
        expected += f" of at least {least}"
    try:
        found = None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name}: expected {expected}, got {x!r:.40}")
    if (least is not None and found < least) or (most is not None and found > most):
        raise ValueError(f"{name}: expected {expected}, got {found}")
    return found


def number(name: str, x, above: float | int | None = None) -> float:
    """`x` as a float: any finite real number of Python's, NumPy's or JAX's, but no bool.

    Raises a TypeError for anything else, a ValueError unless it is finite and over `above`.
    """
    expected = "a finite number" if above is None else f"a finite number above {above}"
    is_number = isinstance(x, numbers.Real | Array) and not isinstance(x, bool)
    if not is_number or np.ndim(x):
        raise TypeError(f"{name}: expected {expected}, got {x!r:.40}")
    try:
        found = float(x)
    except OverflowError:  # an int that no float holds
        found = math.inf
    if not math.isfinite(found) or (above is not None and found <= above):
        raise ValueError(f"{name}: expected {expected}, got {x!s:.40}")
    return found


def boolean(name: str, x) -> bool:
    """`x`, if it is True or False. Raises a TypeError for anything else."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected true or false, got {x!r:.40}")
    return x


def text(name: str, x) -> str:
    """`x`, if it is a text that can be encoded: a TypeError for anything else, a ValueError for
    half a character (a surrogate, as Python has for bytes that are no UTF-8)."""
    if not isinstance(x, str):
        raise TypeError(f"{name}: expected a text, got {x!r:.40}")
    try:
        x.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: no Unicode at {error.start}: {x[error.start]!a}") from None
    return x


def as_array(name: str, x) -> Array:
    """`x`, made an array if it is a (nested) list of numbers; a TypeError for a ragged one."""
    if isinstance(x, Array):
        return x
    try:
        found = np.asarray(x)
    except ValueError:
        found = None
    if found is None or found.dtype == object:
        raise TypeError(f"{name}: expected an array, got {type(x).__name__} {x!r:.40}")
    return found


def integers(name: str, x, shape: tuple, what: str = "", most: int | None = None) -> Array:
    """`x` as an array of integers of that shape (None for any size), each from 0 to `most`.

    The entries of an array that is being traced are not looked at.
    """
    x = as_array(name, x)
    fits = x.ndim == len(shape) and all(m in (None, n) for n, m in zip(x.shape, shape, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        expected = str(shape).replace("None", "any")
        raise ValueError(f"{name}: expected integers {expected} in shape, got {x.dtype} {x.shape}")
    if most is not None and x.size and not isinstance(x, jax.core.Tracer):
        for found in (int(np.min(x)), int(np.max(x))):
            if not 0 <= found <= most:
                raise ValueError(f"{name}: expected {what} from 0 to {most}, got {found}")
    return x
