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


FUNCTIONS = [name for name in treeattn.__all__ if callable(getattr(treeattn, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_name_has_a_screen_of_words_and_an_example_that_runs(name, unchecked, capsys):
    lines = inspect.getdoc(getattr(treeattn, name)).splitlines()
    assert len(lines) <= 60, f"the docstring of {name} has {len(lines)} lines, at most 60"
    assert lines[0].endswith((".", ":", ")")), "a whole sentence first"
    found = examples(name)
    assert found.examples, f"{name}: no example"
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(found)
    assert not failed, capsys.readouterr().out


ROWS = {
    "merge_across": [f'"{name}":' for name in treeattn.METHODS],
    "attend": [f"{x}:" for x in inspect.signature(treeattn.attend).parameters if x not in "kv"],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_docstring_has_a_row_for_each_choice(name):
    text = getattr(treeattn, name).__doc__
    missing = [row for row in ROWS[name] if row not in text]
    assert not missing, f"the docstring of {name}: a row for {missing}"
