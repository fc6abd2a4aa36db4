"""What a check answers: a sentence, and in a notebook a picture of the reader's own result."""

import copy
import ctypes
import functools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from figures.folded import as_html
from figures.style import Figure

FEW_DIGITS = "right to a few digits only: float32 has seven"
RECORD = "COURSE_VERDICTS"  # of the environment: a file to which each check adds its verdict
SECONDS = 30  # after which a function counts as one that does not end


@dataclass
class Verdict:
    """`str()` is the sentence; a notebook shows the picture, whose title is the sentence."""

    sentence: str
    right: bool = False
    draw: Callable[[str], Figure] | None = None  # of the sentence

    def __repr__(self) -> str:
        return self.sentence

    __str__ = __repr__

    def _repr_mimebundle_(self, **_) -> dict[str, str]:
        shown = {"text/plain": self.sentence}
        if self.draw:
            shown["text/html"] = as_html(*self.draw(self.sentence)._repr_mimebundle_())
        return shown


class Mistake(Exception):
    """Ends a check: the sentence for the reader, and what draws the mistake."""

    def __init__(self, sentence: str, draw=None):
        super().__init__(sentence)
        self.sentence, self.draw = sentence, draw


def verdict(ask: Callable) -> Callable[[Callable], Verdict]:
    """A check, of a function that raises a Mistake, or returns what draws the right answer."""

    @functools.wraps(ask)
    def check(mine) -> Verdict:
        try:
            found = Verdict("right", True, ask(mine))
        except Mistake as mistake:
            found = Verdict(mistake.sentence, False, mistake.draw)
        except Exception as error:  # of the check itself, which could not read what `mine` returned
            found = Verdict(f"it returned something of another form: {error}".partition("\n")[0])
        if RECORD in os.environ:
            with open(os.environ[RECORD], "a", encoding="utf-8") as record:
                print(json.dumps([ask.__name__, found.right, found.sentence]), file=record)
        return found

    return check


def call(mine: Callable, *arguments, given: str):
    """What `mine` returns. Mistake if it raises, never ends, returns None, changes what it got."""
    copies, ended = copy.deepcopy(arguments), []

    def work():
        try:
            with np.errstate(all="ignore"):
                ended.append((jax.block_until_ready(mine(*copies)), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=work, daemon=True)  # a compiled loop hears no alarm
    thread.start()
    try:
        thread.join(SECONDS)
    finally:  # also after a KeyboardInterrupt
        late = thread.is_alive()
        if late:  # ends a loop in Python
            stop = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(*stop)
    if late:
        raise Mistake(f"no answer within {SECONDS} seconds: does a loop never end?")
    ((found, error),) = ended
    if isinstance(error, Mistake):
        raise error
    if error is not None:
        message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
        raise Mistake(f"{hint(message)}It stops with {message}. Given: {given}") from None
    if found is None:
        raise Mistake("it returned None")
    if jax.tree.structure(copies) != jax.tree.structure(arguments) or not all(
        map(np.array_equal, jax.tree.leaves(copies), jax.tree.leaves(arguments))
    ):
        raise Mistake("it changes what it was given: work on a copy")
    return found


HINTS = {  # part of an error's message -> what helps
    "truth value of an array": "max, min and if take single numbers: use jnp.maximum. ",
    "Attempted boolean conversion": "max, min and if take single numbers: use jnp.maximum. ",
    "shapes for broadcasting": "the shapes do not fit: does a weight lack an axis, [..., None]? ",
    "could not be broadcast": "the shapes do not fit: does a weight lack an axis, [..., None]? ",
    "RecursionError": "the recursion never ends: one case must call nothing. ",
    "ZeroDivisionError": "it divides by zero. ",
    "positional argument": "it takes another number of arguments. ",
    "unbound axis name": "the devices' axis is called 'kv'. ",
}


def hint(message: str) -> str:
    return next((help for part, help in HINTS.items() if part in message), "")
