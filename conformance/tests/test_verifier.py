"""check_verifier: lossless steps pass, ours included, and each planted fault is named."""

from fractions import Fraction

import numpy as np
import pytest

from treeattn_conformance import check_verifier, law, outcomes, run_step
from treeattn_conformance.__main__ import main
from treeattn_conformance.outcomes import OwnChance
from treeattn_conformance.steps import STEP_FAULTS, VERIFIER_CURES, Step, wrong

# ---------------------------------------------------------------- every way that chance can fall


def test_all_outcomes_of_numbers_that_are_compared():
    p = np.array([0.2, 0.3, 0.5])
    for pick in (
        lambda rng: int(np.searchsorted(np.cumsum(p), rng.random(), side="right")),
        lambda rng: int((np.cumsum(p) <= rng.random()).sum()),
        lambda rng: int(np.argmax(np.cumsum(2 * p) > 2 * rng.random())),
        lambda rng: int(np.searchsorted(np.cumsum(p), 1 - rng.random())),
        lambda rng: int((np.cumsum(p) < rng.uniform(0.0, 1.0)).sum()),
        lambda rng: int(rng.choice(3, p=p)),
        lambda rng: int(rng.at("key").choice(3, p=p)),
    ):
        found = law(pick)
        np.testing.assert_allclose([found[i] for i in range(3)], p, atol=1e-12)


def test_a_number_that_is_asked_twice_is_one_number():
    def questions(x):
        return x < 0.5, x < 0.25, 1 - x <= 0.6

    u = law(lambda rng: questions(rng.random()))
    assert u == pytest.approx(
        {
            (True, True, False): 0.25,
            (True, False, False): 0.15,
            (True, False, True): 0.1,
            (False, False, True): 0.5,
        }
    )
    vector = law(lambda rng: tuple((rng.random(2) < np.array([0.5, 0.1])).tolist()))
    assert vector[True, True] == pytest.approx(0.05)
    keyed = law(lambda rng: (rng.at(7).random() < 0.5, rng.at(7).random() < 0.25))
    assert keyed == {(True, True): 0.25, (True, False): 0.25, (False, False): 0.5}
    inside = law(lambda rng: (rng.at(7).random() < 0.5, rng.at(7).choice(2, p=[0.25, 0.75])))
    assert inside == {(True, 0): 0.25, (True, 1): 0.25, (False, 1): 0.5}


def test_fractions_stay_fractions():
    def run(rng):
        x = rng.choice(2, p=[Fraction(1, 3), Fraction(2, 3)])
        return x, bool(rng.random() < Fraction(1, 7))

    found = law(run)
    assert found[0, True] == Fraction(1, 21) and sum(found.values()) == 1


def test_what_cannot_be_enumerated_says_so():
    own = np.random.default_rng(0)
    for run, error, message in (
        (lambda rng: float(rng.random()), TypeError, "Compare it"),
        (lambda rng: np.log(rng.random()), TypeError, "Compare it"),
        (lambda rng: rng.random() < rng.random(), NotImplementedError, "with each other"),
        (lambda rng: rng.normal(), NotImplementedError, "rng.normal is not one of at, random"),
        (lambda rng: rng.choice(2, p=[0.5, 0.4]), ValueError, "add up to 1"),
        (lambda rng: rng.choice(2, p=[0.5, np.nan]), ValueError, "add up to 1"),
        (
            lambda rng: rng.choice(2, 2, replace=False, p=[0, 1]),
            ValueError,
            "above 0 for 2 choices",
        ),
    ):
        with pytest.raises(error, match=message):
            law(run)
    with pytest.raises(OwnChance):
        law(lambda rng: rng.random() < own.random())
    with pytest.raises(RuntimeError, match="more than 10 outcomes"):
        law(lambda rng: [rng.random() < 0.5 for _ in range(4)] and 0, most=10)


# ---------------------------------------------------------------- what passes


def test_the_right_step_passes_everything():
    report = check_verifier(run_step)
    assert not report.names("failed") and not report.names("skipped"), str(report)
    assert len(report.names("passed")) == 14


# ---------------------------------------------------------------- what fails, and how it is named


FORMS = [(name, form) for name, (_, *forms) in STEP_FAULTS.items() for form in forms]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_each_fault_is_named(name, form):
    def step(target, draft, rng, *, widths, **options):
        if name.startswith("noise") and max(widths) > 1:
            raise NotImplementedError("chains only")
        return form(target, draft, rng, widths, **options).run()

    report = check_verifier(step)
    assert report.names("failed") and report.fingerprints == {name}, str(report)


def chain(fault=None, dtype=np.float64, top_k=4):
    """A chain of two, written independently of `Step`, with a fault or none."""

    def step(target, draft, rng, *, temperature=1.0, top_p=1.0):
        def probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p):
            early = fault == "top-p before temperature"
            p = np.exp(((logits - logits.max()) / (1 if early else temperature)).astype(dtype))
            order = np.argsort(-p)
            enough = 1 + (np.cumsum(p[order]) < top_p * p.sum()).sum()
            p[order[min(top_k, enough) :]] = 0
            p = p ** (1 / temperature) if early else p
            return p / p.sum()

        def drawn(p, rng=rng):
            return int(rng.choice(n, p=p / p.sum()))

        n = len(target(()))
        shared = fault == "noise shared by draft and residual"
        own = np.random.default_rng(0) if fault == "drafts ignore the key" else rng
        drafted, q = (), []
        for i in range(2):
            q.append(probabilities(draft(drafted)))
            drafted = (*drafted, drawn(q[i], rng.at(i) if shared else own))
        p = [probabilities(target(drafted[:i])) for i in range(3)]
        if fault == "q before temperature":
            q = [probabilities(draft(drafted[:i]), 1.0) for i in range(2)]
        if fault == "q before top-k":
            q = [probabilities(draft(drafted[:i]), top_k=4) for i in range(2)]
        if fault == "q before top-p":
            q = [probabilities(draft(drafted[:i]), top_p=1.0) for i in range(2)]
        for i, x in enumerate(drafted):
            chance = {
                "first token unchecked": p[i][x] / q[i][x] if i else 1.0,
                "q said one-hot, but sampled": p[i][x],
                "nine of ten": 0.9 * p[i][x] / q[i][x],
                "the root of the ratio": (p[i][x] / q[i][x]) ** 0.5,
                "likely enough": float(p[i][x] > 0.3),
                "a sure draft is believed": 1.0 if q[i][x] > 0.99 else p[i][x] / q[i][x],
            }.get(fault, p[i][x] / q[i][x])
            if rng.random() < chance:
                continue
            rest = np.maximum(p[i] - q[i], 0)
            rest = rest if rest.any() else p[i]
            if fault in ("argmax at a temperature", "the likeliest of the rest"):
                return [*drafted[:i], int(np.argmax(rest))]
            if fault == "residual not renormalized":
                u = np.searchsorted(np.cumsum(rest), rng.random(), side="right")
                return [*drafted[:i], min(int(u), n - 1)]
            kept = i + (fault == "rejected and kept")
            rest = {
                "residual is the target": p[i],
                "either difference": np.abs(p[i] - q[i]),
                "again from the draft": q[i],
                "a token later": p[i + 1],
                "rejected and kept": p[i + 1],
            }.get(fault, rest)
            rest = rest if rest.any() else p[i]
            return [*drafted[:kept], drawn(rest, rng.at(i) if shared else rng)]
        last = p[1] if fault == "bonus of other logits" else p[2]
        return [
            *drafted,
            drawn(probabilities(draft(drafted)) if fault == "a bonus of the draft" else last),
        ]

    return step


OF_THE_SUITE = (
    "noise shared by draft and residual",
    "first token unchecked",
    "argmax at a temperature",
    "residual not renormalized",
    "residual is the target",
    "bonus of other logits",
    "q said one-hot, but sampled",
)
# Planted by a reader who did not know the names
PLANTED = {
    "nine of ten": set(),
    "the root of the ratio": set(),
    "likely enough": set(),
    "either difference": set(),
    "a token later": set(),
    "again from the draft": set(),
    "rejected and kept": set(),
    "the likeliest of the rest": {"argmax at a temperature"},
    "a bonus of the draft": {"bonus of other logits"},
}
OTHERS = {
    "drafts ignore the key": set(),
    "top-p before temperature": set(),
    "q before temperature": {"q before temperature or top-p"},
    "q before top-p": {"q before temperature or top-p"},
    "a sure draft is believed": set(),
}


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        *((x, {x}) for x in OF_THE_SUITE),
        *OTHERS.items(),
        *PLANTED.items(),
    ],
)
def test_a_strangers_fault_is_named_or_seen(fault, names):
    report = check_verifier(chain(fault))
    assert report.names("failed") and report.fingerprints == names, str(report)
    assert all(VERIFIER_CURES[name] in str(report) for name in names)


def test_a_stranger_without_faults_passes():
    for dtype in (np.float64, np.float32):
        report = check_verifier(chain(dtype=dtype))
        assert report.names("failed") == [], str(report)
    assert len(report.names("passed")) == 8
    assert "it has no option widths" in str(report)


@pytest.mark.parametrize(("fault", "status"), [(None, "passed"), ("q before top-k", "failed")])
def test_a_cut_is_asked_by_a_token_that_it_cuts_off(fault, status):
    def with_rest(model):
        return lambda path: np.maximum(model(path), -4.5)

    def step(target, draft, rng):
        return chain(fault, top_k=2)(with_rest(target), with_rest(draft), rng)

    report = check_verifier(step, only=["other tokens"])
    assert report.names(status) == ["other tokens"], str(report)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("a sure draft is believed", {"a sure draft", "temperature and top-p"}),
        ("top-p before temperature", {"temperature and top-p"}),
        ("q before top-p", {"top-p", "temperature and top-p"}),
    ],
)
def test_these_questions_alone_see_it(fault, seen):
    assert set(check_verifier(chain(fault)).names("failed")) == seen


def test_siblings_that_are_accepted_by_the_first_q_get_no_wrong_name():
    """They are drawn by what is left of q, so their law is that of no fault with a name."""
    by_first_q = wrong(accepts=lambda s, at, p, q, x: Step.accepts(s, at, p, s.q(at), x))

    def step(target, draft, rng, *, widths, replacement):
        return by_first_q(target, draft, rng, widths, replacement).run()

    report = check_verifier(step)
    assert report.names("failed") and not report.fingerprints, str(report)


def test_a_wrong_step_fails_soon(monkeypatch):
    """A fault without a name is searched in one question."""
    runs = []
    answers = outcomes.Answers
    monkeypatch.setattr(outcomes, "Answers", lambda told: runs.append(told) or answers(told))
    for step, most in ((chain("likely enough"), 3_000), (run_step, 1_000)):
        runs.clear()
        assert check_verifier(step).fingerprints == set()
        assert len(runs) < most


@pytest.mark.parametrize(("drafted", "widths"), [((2, 1), (2, 1)), ((1, 1, 1), None)])
def test_a_draft_without_options_has_the_widths_that_are_given_or_is_a_chain(drafted, widths):
    def step(target, draft, rng):
        return STEP_FAULTS["accepts all drafts"][1](target, draft, rng, drafted).run()

    assert check_verifier(step, widths=widths).fingerprints == {"accepts all drafts"}


def test_what_is_not_a_step():
    with pytest.raises(TypeError, match="step: expected a function, got 3"):
        check_verifier(3)
    nothing = check_verifier(lambda target, draft, rng: [])
    assert "expected tokens from 0 to 2" in str(nothing) and not nothing.names("passed")
    random = np.random.default_rng(0)
    own = check_verifier(lambda target, draft, rng: [int(rng.random() < random.random())])
    assert own.fingerprints == {"chance of its own"}


def test_asked_from_a_shell(capsys):
    assert main(["verifier", "treeattn_conformance:run_step"]) == 0
    assert "a tree, later            passed" in capsys.readouterr().out
