"""Rules of acceptance, enumerated: which are lossless, which accept most, and their bound.

The notebook also has the authors' examples, and chains, where block verification is best.
"""

from fractions import Fraction

import numpy as np
import pytest

from labs.acceptance import drawing, optimum, rules
from labs.acceptance.__main__ import table
from labs.acceptance.beams import beam_candidates, longest_of_tosses
from labs.acceptance.models import SHAPES, TARGET, TextModel, in_floats
from labs.acceptance.rules import ACCEPTANCE_RULES, mean_length, step_law
from treeattn_conformance import check_verifier

MATCHING, TOKENS, BLOCK, TRAVERSAL, K_SEQUENTIAL = ACCEPTANCE_RULES.values()


def models(seed, least=1):
    """A target and a draft. With `least` of 0, one of them gives some tokens probability 0."""
    return TextModel(2 * seed, least), TextModel(2 * seed + 1, least)


def probabilities(model):
    """Probabilities, from a model of log-probabilities as in the suite."""
    return lambda path: np.exp(model(path))


# ---------------------------------------------------------------- lossless, or not


@pytest.mark.parametrize("name", ACCEPTANCE_RULES)
def test_every_rule_is_lossless(name):
    """The suite checks chains, trees, and tokens that have probability 0 in one of the models."""

    def step(target, draft, rng, *, widths, replacement):
        if name == "block" and max(widths) > 1:
            raise NotImplementedError("chains only")
        if name == "k-sequential" and max(widths) > 1 and not replacement:
            raise NotImplementedError("for siblings drawn with replacement")
        given = probabilities(target), probabilities(draft)
        return ACCEPTANCE_RULES[name](rules.draw_tree(*given, rng, widths, replacement), rng)

    report = check_verifier(step)
    assert not report.names("failed"), str(report)
    assert len(report.names("passed")) >= 5


@pytest.mark.parametrize("rule", [MATCHING, TOKENS, TRAVERSAL])
def test_in_fractions_nothing_differs(rule):
    for seed in range(3):
        target, draft = models(seed, least=0)
        assert rules.largest_fault(step_law(rule, target, draft, (2, 1)), target) == 0


def test_the_documents_project_is_not_lossless_at_a_temperature():
    """Its rule for candidates of a beam search, in fractions, does not give TARGET."""
    tossed = [[str(x) for x in drawing.tossed(width)] for width in (1, 2, 3)]
    assert tossed == [["5/6", "0", "1/6"], ["5/6", "1/6", "0"], ["5/6", "1/6", "0"]]
    found = {(x,): chance for x, chance in enumerate(drawing.tossed(2))}
    assert rules.largest_fault(found, lambda path: TARGET) == Fraction(1, 3)


@pytest.mark.parametrize("width", [1, 2])
def test_the_checker_sees_it(width):
    def step(target, draft, rng):
        p, q = probabilities(target), probabilities(draft)
        return longest_of_tosses(beam_candidates(q, width, 1), p, q, rng)

    report = check_verifier(step, widths=(width,))
    assert len(report.names("failed")) > 1, str(report)
    if width == 1:  # for wider beams the suite has no name
        assert "likeliest tokens judged as drawn" in report.fingerprints


def test_the_beam_is_the_drafts_likeliest():
    draft = TextModel(3)
    every = {(a, b): draft(())[a] * draft((a,))[b] for a in range(3) for b in range(3)}
    found = beam_candidates(draft, 9, 2)
    assert [every[path] for path in found] == sorted(every.values(), reverse=True)


# ---------------------------------------------------------------- how much is accepted


def test_one_drafted_token_is_accepted_with_the_overlap():
    """Σ min(p, q), and by matching Σ p q."""
    for seed in range(5):
        target, draft = models(seed, least=0)
        p, q = target(()), draft(())
        for rule in (TOKENS, BLOCK, TRAVERSAL):
            assert mean_length(step_law(rule, target, draft, (1,))) - 1 == np.minimum(p, q).sum()
        assert mean_length(step_law(MATCHING, target, draft, (1,))) - 1 == (p * q).sum()


@pytest.mark.parametrize("replacement", [False, True])
def test_in_trees_from_the_leaves_up_is_more_and_not_all(replacement):
    for seed in range(2):
        how = *models(seed), (2, 1), replacement
        matched, by_token, traversed = (
            mean_length(step_law(rule, *how)) for rule in (MATCHING, TOKENS, TRAVERSAL)
        )
        most, proved = optimum.most_tokens(*how)
        assert matched < by_token < traversed < proved
        assert abs(float(proved) - most) < 1e-6


def test_at_one_node():
    """The closed form of the optimum, SpecTr's promised share of it, and replacement."""
    for seed in range(12):
        target, draft = models(seed, least=0)
        least = {}
        for replacement in (False, True):
            how = target, draft, (2,), replacement
            draws = optimum.drafted_trees(*how[1:])
            most = optimum.best_single_node(target(()), draws)
            assert abs(optimum.most_tokens(*how)[0] - 1 - float(most)) < 1e-9
            least[replacement] = mean_length(step_law(TOKENS, *how)) - 1
            assert least[replacement] <= most
        assert least[True] <= least[False]
        found = step_law(K_SEQUENTIAL, in_floats(target), in_floats(draft), (2,), True)
        share = mean_length(found) - 1
        assert float(least[True]) - 1e-9 <= share <= float(most) + 1e-9
        assert share >= (1 - (1 - 1 / 2) ** 2) * float(most) - 1e-9


def test_any_prices_prove_a_bound():
    target, draft = models(0)
    program = optimum.best_rule_program(target, draft, (2,))
    most = optimum.most_tokens(target, draft, (2,))[1]
    random = np.random.default_rng(0)
    for _ in range(20):
        prices = {text: Fraction(int(random.integers(-5, 6)), 4) for text in program.texts}
        assert optimum.proved_bound(program, target, prices) >= most
    assert optimum.proved_bound(program, target, {}) == 2  # a drafted token, and one more


# ---------------------------------------------------------------- drawn


def test_the_figure_has_a_mark_for_each_rule():
    bounds = {shape: Fraction(3) for shape, _, _ in SHAPES}
    figure = drawing.tokens_by_rule(TextModel(1), TextModel(2), bounds)
    marks = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    assert len(marks) == 4 + 4 + 3 + 4 + 3
    assert "matching 1.43, token by token 2.36, block 2.61, traversal 2.61" in figure.alt


def test_the_bars_are_what_is_tossed():
    figure = drawing.likeliest_tossed_for()
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    expected = [1 / 2, 3 / 10, 1 / 5, 5 / 6, 0, 1 / 6, 5 / 6, 1 / 6, 0]
    np.testing.assert_allclose(heights, expected)
    assert "5/6, 1/6, 0: token 0 comes much too often" in figure.alt


def test_what_the_command_prints():
    rows = table().splitlines()
    assert "a chain of three        block           in fractions      2.6059" in rows
    assert not [row for row in rows if " no " in row]
