"""Annotations are checked in the tests: of functions, of functions within them, of dataclasses."""

import sys

import checked
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import treeattn

SOURCE = """
from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float


def same(x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"]):
    return x + y


def returned(x) -> Float[np.ndarray, "2"]:
    return x


def plain(x, *more, **options):
    return x


def within(x):
    def annotated(y: int):
        return y

    return annotated(x)


@dataclasses.dataclass
class Record:
    x: Float[np.ndarray, "n"]

    @property
    def size(self) -> int:
        return str(self.x)

    @staticmethod
    def made(x: int):
        return Record(np.zeros(x))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    checked.install("planted")
    import planted

    yield planted
    del sys.modules["planted"]


def test_what_has_annotations_is_checked(module):
    x, y = np.zeros(2), np.zeros(3)
    assert len(module.same(x, x)) == len(module.returned(x)) == len(module.Record(y).x) - 1 == 2
    assert module.within(1) == 1 and len(module.Record.made(3).x) == 3
    wrong = (
        lambda: module.same(x, y),
        lambda: module.same(x, x.astype(int)),
        lambda: module.returned(y),
        lambda: module.within("1"),
        lambda: module.Record(1),
        lambda: module.Record(x).size,
        lambda: module.Record.made("3"),
    )
    for call in wrong:
        with pytest.raises(jaxtyping.TypeCheckError):
            call()


def test_what_has_none_stays_as_it_is(module):
    assert not hasattr(module.plain, "__wrapped__") and hasattr(module.same, "__wrapped__")


def test_the_package_is_checked():
    x = jnp.zeros((1, 2, 2, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        treeattn.attend(x[0], x, x)
    assert sys.modules["treeattn.local"].__spec__.loader.__class__ is checked.Loader
