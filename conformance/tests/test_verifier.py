"""check_verifier: what is lossless passes, ours included, and each planted fault is named."""

from fractions import Fraction

import numpy as np
import pytest

import treeattn_conformance.outcomes as outcomes_module
from treeattn_conformance import check_verifier, law, run_step
from treeattn_conformance.__main__ import main
from treeattn_conformance.outcomes import OwnChance, outcomes
from treeattn_conformance.steps import Settings
from treeattn_conformance.wrong_steps import VERIFIER_CURES, WRONG_STEPS

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
    ):
        with pytest.raises(error, match=message):
            law(run)
    with pytest.raises(OwnChance):
        law(lambda rng: rng.random() < own.random())
    with pytest.raises(RuntimeError, match="more than 10 outcomes"):
        list(outcomes(lambda rng: [rng.random() < 0.5 for _ in range(4)], most=10))


# ---------------------------------------------------------------- what passes


def test_the_right_step_passes_everything():
    report = check_verifier(run_step)
    assert not report.names("failed") and not report.names("skipped"), str(report)
    assert len(report.names("passed")) == 17


# ---------------------------------------------------------------- what fails, and how it is named


@pytest.mark.parametrize("name, wrong", WRONG_STEPS, ids=lambda x: getattr(x, "__name__", ""))
def test_each_planted_fault_is_named(name, wrong):
    def step(target, draft, rng, *, widths, replacement, temperature, top_k, top_p):
        settings = Settings(len(target(())), widths, replacement, temperature, top_k, top_p)
        if not wrong.applies(settings):
            raise NotImplementedError("it is made for other trees")
        return wrong(target, draft, rng, settings).run()

    report = check_verifier(step)
    assert report.fingerprints == {name}, str(report)
    assert report.names("failed")


def softmax(x, dtype=np.float64, top_k=9):
    p = np.exp((x - x.max()).astype(dtype))
    p[np.argsort(-p)[top_k:]] = 0
    return p / p.sum()


def strangers_step(fault=None, dtype=np.float64):
    """A chain of two as somebody else would write it, with top-k alone, and a fault or none."""

    def step(target, draft, rng, *, top_k=9):
        n = len(target(()))
        own = np.random.default_rng(0) if fault == "drafts ignore the key" else rng
        tokens, q = [], []
        with np.errstate(divide="ignore", invalid="ignore"):
            for i in range(2):
                q.append(softmax(draft(tokens), dtype, top_k))
                if fault == "noise shared by draft and residual":
                    tokens.append(int(rng.at(i).choice(n, p=q[-1])))
                else:
                    tokens.append(int(own.choice(n, p=q[-1])))
            p = [softmax(target(tokens[:i]), dtype, top_k) for i in range(3)]
            if fault == "q before temperature, top-k, top-p":
                q = [softmax(draft(tokens[:i]), dtype) for i in range(2)]
            for i, x in enumerate(tokens):
                unchecked = fault == "first token unchecked" and i == 0
                said = 1 if fault == "q said one-hot, but sampled" else q[i][x]
                if unchecked or rng.random() < p[i][x] / said:
                    continue
                rest = np.maximum(p[i] - q[i], 0)
                if fault == "noise shared by draft and residual":
                    return [*tokens[:i], int(rng.at(i).choice(n, p=rest / rest.sum()))]
                if fault == "argmax at a temperature":
                    return [*tokens[:i], int(np.argmax(rest))]
                if fault == "residual not renormalized":
                    u = np.searchsorted(np.cumsum(rest), rng.random(), side="right")
                    return [*tokens[:i], min(int(u), n - 1)]
                if fault == "residual is the target":
                    rest = p[i]
                return [*tokens[:i], int(rng.choice(n, p=rest / rest.sum()))]
        bonus = p[1] if fault == "bonus from the wrong position" else p[2]
        return [*tokens, int(rng.choice(n, p=bonus))]

    return step


PLANTED = (
    "drafts ignore the key",
    "noise shared by draft and residual",
    "first token unchecked",
    "argmax at a temperature",
    "residual not renormalized",
    "residual is the target",
    "bonus from the wrong position",
    "q before temperature, top-k, top-p",
    "q said one-hot, but sampled",
)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_strangers_fault_is_named(fault):
    report = check_verifier(strangers_step(fault))
    assert report.fingerprints == {fault}, str(report)
    assert VERIFIER_CURES[fault] in str(report)


def test_a_stranger_without_faults_passes():
    for dtype in (np.float64, np.float32):
        report = check_verifier(strangers_step(dtype=dtype))
        assert report.names("failed") == [], str(report)
    assert len(report.names("passed")) == 6
    assert "it has no option widths" in str(report)
    shaped = check_verifier(strangers_step("first token unchecked"), widths=(1, 1))
    assert shaped.fingerprints == {"first token unchecked"}


def count_runs(monkeypatch) -> list[int]:
    """A list whose one number grows with every run that is followed, of any step."""
    runs = [0]

    class Counted(outcomes_module.Answers):
        def __init__(self, prescribed):
            runs[0] += 1
            super().__init__(prescribed)

    monkeypatch.setattr(outcomes_module, "Answers", Counted)
    return runs


def unknown(target, draft, rng, *, temperature=1.0):
    """A chain of two whose drafts are accepted by a rule of nobody's: if they are likely."""
    kept: tuple = ()
    drafted = []
    for _ in range(2):
        q = softmax(draft(tuple(drafted)) / (temperature or 1e-3))
        drafted.append(int(rng.choice(len(q), p=q)))
    for x in drafted:
        p = softmax(target(kept) / (temperature or 1e-3))
        if p[x] < 0.3:
            break
        kept = (*kept, x)
    p = softmax(target(kept) / (temperature or 1e-3))
    return [*kept, int(rng.choice(len(p), p=p))]


def test_a_wrong_step_fails_soon(monkeypatch):
    """A fault without a name is looked for in one case, and among the shapes that it can have."""
    runs = count_runs(monkeypatch)
    report = check_verifier(unknown)
    assert report.names("failed") and report.fingerprints == set()
    assert runs[0] < 1_000
    runs[0] = 0
    assert check_verifier(strangers_step("residual is the target")).fingerprints
    assert runs[0] < 3_000
    runs[0] = 0
    assert not check_verifier(run_step).names("failed")
    assert runs[0] < 1_000


def test_where_the_draft_is_asked_says_what_was_drafted():
    """A tree of two and one after each, without an option for it."""

    def step(target, draft, rng):
        settings = Settings(3, (2, 1))
        return dict(WRONG_STEPS)["accepts all drafts"](target, draft, rng, settings).run()

    assert check_verifier(step).fingerprints == {"accepts all drafts"}


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
