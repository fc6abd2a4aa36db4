"""Types and checks of arguments: errors name the argument, what was expected, and what came."""

import contextlib
import math
import numbers
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from treeattn.checks import Array, as_array

Tokens = Int[Array, "b l"]  # token ids, or positions
Lengths = Int[Array, " b"]  # a number of tokens for each text
Hidden = Float[Array, "b l width"]  # the input or output of a layer
Queries = Float[Array, "b l h d"]
Keys = Float[Array, "b l h_kv d"]  # or values
Logits = Float[Array, "b l vocabulary"]


@contextlib.contextmanager
def named(where: str | Path, what: str = "") -> Iterator[None]:
    """Any exception inside becomes a ValueError that says where, what, and the exception itself.

    A ValueError that begins with `where` stays as it is. A checkpoint is a stranger's file, and
    libraries raise exceptions of many kinds for a damaged one. PanicException, of libraries in
    Rust, is not even an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # a user's interrupt
        message = str(error)
        if isinstance(error, ValueError) and message.startswith(str(where)):
            raise
        if not isinstance(error, ValueError | TypeError) or not message:
            message = f"{type(error).__name__} {message}".strip()
        raise ValueError(": ".join(filter(None, (str(where), what, message)))) from error


def list_names(names: set[str]) -> str:
    """The first of the names in order, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def number(name: str, x, above: float | int | None = None, most: float | int = math.inf) -> float:
    """`x` as a float, from any real number of Python, NumPy or JAX, but not from a bool.

    Raises TypeError for anything else, and ValueError unless the number is finite, larger than
    `above`, and at most `most`.
    """
    expected = "a finite number" if above is None else f"a finite number above {above}"
    expected += f" and at most {most}" if math.isfinite(most) else ""
    is_number = isinstance(x, numbers.Real | Array) and not isinstance(x, bool)
    if not is_number or np.ndim(x):
        raise TypeError(f"{name}: expected {expected}, got {x!r:.40}")
    found = float(x)
    if not math.isfinite(found) or (above is not None and found <= above) or found > most:
        raise ValueError(f"{name}: expected {expected}, got {x!s:.40}")
    return found


def boolean(name: str, x) -> bool:
    """`x`, if it is True or False. Raises TypeError for anything else."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected true or false, got {x!r:.40}")
    return x


def text(name: str, x) -> str:
    """`x`, if it is a text that UTF-8 can encode.

    Raises TypeError for anything else, and ValueError for a surrogate, which Python puts in a text
    for bytes that are not UTF-8.
    """
    if not isinstance(x, str):
        raise TypeError(f"{name}: expected a text, got {x!r:.40}")
    with named(name, "expected Unicode"):
        x.encode()
    return x


def integers(name: str, x, shape: tuple, kind: str = "", most: int | None = None) -> Array:
    """`x` as an array of integers of this shape (None for any size), each from 0 to `most`.

    kind: a name for the integers, for the error
    most: None for any integers. The values of a traced array are not known, and are not checked.
    """
    x = as_array(name, x)
    fits = x.ndim == len(shape) and all(m in (None, n) for n, m in zip(x.shape, shape, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        expected = str(shape).replace("None", "any")
        raise ValueError(f"{name}: expected integers {expected} in shape, got {x.dtype} {x.shape}")
    if most is not None and x.size and not isinstance(x, jax.core.Tracer):
        for found in (int(np.min(x)), int(np.max(x))):
            if not 0 <= found <= most:
                raise ValueError(f"{name}: expected {kind} from 0 to {most}, got {found}")
    return x
