"""The suite finds faults that were met in public, and mutants of right functions."""

import functools

import mutants
import numpy as np
import public_bugs
import pytest
import right_ones

from treeattn_conformance import check_attention, check_merge, check_tree
from treeattn_conformance.forward import attention_questions, merge_questions
from treeattn_conformance.judge import judge
from treeattn_conformance.pairs import pairs

CHECKS = {
    "merge": check_merge,
    "attention": check_attention,
    "tree": check_tree,
    "commit": lambda commit: check_tree(commit=commit),
}
BUGS = [(kind, bug) for kind, bugs in public_bugs.BUGS.items() for bug in bugs]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("kind", "bug"), BUGS, ids=[bug.link.split("com/")[1] for _, bug in BUGS])
def test_a_public_bug_fails_and_has_its_name(kind, bug):
    report = CHECKS[kind](bug.function)
    assert report.names("failed"), str(report)
    assert report.fingerprints == set(bug.names), str(report)


def in_turn(merge_two):
    """A merge of two, from left to right."""

    def merge(parts):
        nothing = (0 * parts[0][0], np.full(parts[0][1].shape, -np.inf))
        return functools.reduce(merge_two, [merge_two(parts[0], nothing), *parts[1:]])

    return merge


QUESTIONS = {"merge": merge_questions(), "attention": attention_questions()}


def fails(kind, f) -> bool:
    """A pair's first wrong answer is enough; what the mistake is called is not asked."""
    if kind not in QUESTIONS:
        return bool(CHECKS[kind](f).names("failed"))
    subject = pairs((), {}, "float32", None)
    return any(judge(f, [question], subject).names("failed") for question in QUESTIONS[kind])


ALIVE = {
    "merge_at_once": 7,
    "merge_two": 10,
    "kernel": 10,
    "kernel_by_blocks": 14,
    "build": 0,
    "commit": 0,
}
RIGHT = [
    ("merge", right_ones.merge_at_once, lambda f: f),
    ("merge", right_ones.merge_two, in_turn),
    ("attention", right_ones.kernel, lambda f: f),
    ("attention", right_ones.kernel_by_blocks, lambda f: f),
    ("tree", right_ones.build, lambda f: f),
    ("commit", right_ones.commit, lambda f: f),
]


@pytest.mark.parametrize(
    ("kind", "right", "wrap"),
    [
        pytest.param(*row, id=row[1].__name__, marks=[pytest.mark.slow] * (row[0] == "attention"))
        for row in RIGHT
    ],
)
def test_mutants_that_live_change_nothing(kind, right, wrap):
    """The surviving mutants were read one by one. They change a number that is multiplied by 0 or
    that stands for no keys, or they exchange operands that commute."""
    assert not fails(kind, wrap(right))
    alive = [what for what, mutant in mutants.mutants(right) if not fails(kind, wrap(mutant))]
    assert len(alive) == ALIVE[right.__name__], "\n".join(alive)
