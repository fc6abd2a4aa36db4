"""A checkpoint is a stranger's file: whatever goes wrong while reading it is a ValueError."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def named(where: str | Path, what: str = "") -> Iterator[None]:
    """Any exception inside becomes a ValueError that says where, what, and the exception itself.

    A ValueError that begins with `where` already says so, and stays as it is. Libraries meet a
    wrong file with any exception; a panic of Rust's is not even an `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # a user's interrupt
        if isinstance(error, ValueError) and str(error).startswith(str(where)):
            raise
        parts = (str(where), what, said(error))
        raise ValueError(": ".join(filter(None, parts))) from error


def said(error: BaseException) -> str:
    """An exception in a line: its message, after its name where that is no ValueError."""
    message = str(error)
    if isinstance(error, ValueError | TypeError) and message:
        return message
    return f"{type(error).__name__} {message}".strip()
