"""What a name's documentation says: an example that runs, and no more than a screen."""

import doctest
import inspect

import pytest

import treeattn

FINDER = doctest.DocTestFinder(recurse=False)
FLAGS = doctest.NORMALIZE_WHITESPACE


def examples(name):
    """The doctest of a public name, in the names of its own file."""
    public = getattr(treeattn, name)
    (found,) = FINDER.find(public, name, globs=vars(inspect.getmodule(public)).copy())
    return found


@pytest.mark.parametrize("name", treeattn.__all__)
def test_every_public_name_has_an_example_that_runs(name, unchecked, capsys):
    found = examples(name)
    assert found.examples, f"{name}: no example"
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(found)
    assert not failed, capsys.readouterr().out


@pytest.mark.parametrize("name", treeattn.__all__)
def test_no_documentation_is_longer_than_a_screen(name):
    text = inspect.getdoc(getattr(treeattn, name))
    assert len(text.splitlines()) <= 60
    assert text.splitlines()[0].endswith((".", ":", ")")), "a whole sentence first"


def test_a_wrong_example_fails(capsys):
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(wrong).failed == 1
