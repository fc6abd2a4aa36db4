"""check_verifier: what is lossless passes, ours included, and each planted fault is named."""

import itertools
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from treeattn_conformance import (
    VERIFIER_FINGERPRINTS,
    OwnChance,
    check_verifier,
    law,
    outcomes,
    run_step,
    verifying,
)
from treeattn_conformance.__main__ import main
from treeattn_conformance.noise import _both
from treeattn_conformance.steps import Settings
from treeattn_conformance.wrong_steps import WRONG_STEPS
from treeattn_llama.speculation import (
    DrawnDraft,
    DrawnTree,
    candidate_lengths,
    drawn_candidates,
    reject,
)
from treeattn_llama.speculation.accept import descend
from treeattn_llama.speculation.verify import probabilities_after

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
        lambda rng: int(np.argmax(np.log(p) + rng.gumbel(size=3))),
        lambda rng: int(np.argmax(p / rng.exponential(size=3))),
        lambda rng: int((rng.standard_exponential(3) / p).argmin()),
        lambda rng: int(np.argsort(-(np.log(p) + rng.gumbel(size=(1, 3))))[0, 0]),
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


def test_two_races_with_the_same_noise():
    """Against samples; and the chances of all pairs of winners add up to those of one race."""
    w, v = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.0, 0.7])
    both = np.array([[_both(w, a, v, b) if v[b] else 0 for b in range(4)] for a in range(4)])
    np.testing.assert_allclose(both.sum(1), w, atol=1e-12)
    np.testing.assert_allclose(both.sum(0), v, atol=1e-12)
    e = np.random.default_rng(0).exponential(size=(200_000, 4))
    pairs = np.argmax(w / e, 1) * 4 + np.argmax(v / e, 1)
    shares = np.bincount(pairs, minlength=16).reshape(4, 4) / len(e)
    np.testing.assert_allclose(shares, both, atol=5e-3)


def test_what_cannot_be_enumerated_says_so():
    own = np.random.default_rng(0)
    for run, error, message in (
        (lambda rng: float(rng.random()), TypeError, "Compare it"),
        (lambda rng: np.log(rng.random()), TypeError, "Compare it"),
        (lambda rng: rng.random() < rng.random(), NotImplementedError, "with each other"),
        (lambda rng: rng.normal(), NotImplementedError, "rng.normal is not one of at, random"),
        (lambda rng: rng.choice(2, p=[0.5, 0.4]), ValueError, "add up to 1"),
        (lambda rng: rng.choice(2, p=[0.5, np.nan]), ValueError, "add up to 1"),
        (lambda rng: np.sqrt(rng.gumbel(size=3)), NotImplementedError, "of gumbel noise"),
        (lambda rng: np.argmin(rng.gumbel(size=3) + np.zeros(3)), NotImplementedError, "the last"),
    ):
        with pytest.raises(error, match=message):
            law(run)
    with pytest.raises(OwnChance):
        law(lambda rng: rng.random() < own.random())
    with pytest.raises(RuntimeError, match="more than 10 outcomes"):
        list(outcomes(lambda rng: [rng.random() < 0.5 for _ in range(4)], most=10))


# ---------------------------------------------------------------- what passes


def test_the_right_step_passes_everything(unchecked):
    report = check_verifier(run_step)
    assert not report.names("failed") and not report.names("skipped"), str(report)
    assert len(report.names("passed")) == 15


class OurDraft(DrawnDraft):
    """`DrawnDraft`, whose model is a table."""

    def __init__(self, logits, rng, **options):
        vocabulary = SimpleNamespace(vocabulary=len(logits(())))
        super().__init__(SimpleNamespace(config=vocabulary), **options)
        self.logits = logits
        self._random = rng
        self._texts = [[]]

    def _after(self, beam):
        return np.array([[self.logits(path) for path in text] for text in beam.tolist()])


class Dice(reject.KeyDice):
    """`KeyDice`, whose numbers are those of rng."""

    def __init__(self, rng):
        self._random = rng


def our_step(target, draft, rng, *, widths, replacement, temperature, top_p):
    """What `generate` does with drawn candidates: `propose`, `rejection_judge`, `descend`."""
    if temperature == 0 or (replacement and max(widths[1:]) > 1):
        raise NotImplementedError("drawn candidates are for temperatures above 0")
    options = {"widths": widths, "replacement": replacement, "temperature": temperature}
    drawn = OurDraft(draft, rng, **options).propose(100)
    beam = np.pad(drawn.beam[0], [(0, 0), (1, 0)])  # the certain token
    distributions = np.pad(drawn.distributions[0], [(0, 0), (1, 0), (0, 0)])

    def p(m, c):
        return plain_probabilities(target(beam[m, 1 : c + 1]), temperature, top_p)

    judge = reject.rejection_judge(beam, distributions, p, Dice(rng), replacement)
    return descend(beam, candidate_lengths(drawn.scores)[0] + 1, judge)[2]


def test_ours_is_lossless(monkeypatch, unchecked):
    """The code that `generate` runs; only its random numbers are undecided."""
    report = check_verifier(our_step)
    assert not report.names("failed"), str(report)
    assert report.names("skipped") == ["temperature 0", "top-k", "top-k, siblings"]

    def mistaken(p, q, draws, replacement=False):
        return right(p, q, draws, not replacement)

    right = reject.rejection
    monkeypatch.setattr(reject, "rejection", mistaken)
    assert check_verifier(our_step).fingerprints == {"siblings by the first q"}


def drawn_step(widths=None, tokens=None):
    """The same, of candidates that are drawn a depth at a time. tokens: in what order the draft
    has them, all or a few."""

    def step(target, draft, rng, *, widths, temperature, top_p):
        if temperature == 0:
            raise NotImplementedError("drawn candidates are for temperatures above 0")
        names = np.arange(len(target(()))) if tokens is None else np.array(tokens)
        tree = DrawnTree(Dice(rng))
        paths = [()]
        for width in widths:
            logits = [draft(path)[names] for path in paths]
            tree.grow(np.array([plain_probabilities(x, temperature, 1.0) for x in logits]), width)
            paths = [(*paths[path], names[token]) for path, token in tree.depths[-1]]
        drawn = drawn_candidates([tree], None if tokens is None else names)
        beam = np.pad(drawn.beam[0], [(0, 0), (1, 0)])
        distributions = np.pad(drawn.distributions[0], [(0, 0), (1, 0), (0, 0)])

        def p(m, c):
            return plain_probabilities(target(beam[m, 1 : c + 1]), temperature, top_p)

        how = distributions, p, Dice(rng), drawn.replacement, drawn.tokens
        judge = reject.rejection_judge(beam, *how)
        return descend(beam, candidate_lengths(drawn.scores)[0] + 1, judge)[2]

    if widths is None:
        return step
    return lambda target, draft, rng: step(
        target, draft, rng, widths=widths, temperature=1.0, top_p=1.0
    )


def test_a_tree_that_is_drawn_a_depth_at_a_time_is_lossless(monkeypatch, unchecked):
    """How many of a node's continuations there are depends on draws; acceptance does not mind."""
    report = check_verifier(drawn_step())
    assert not report.names("failed"), str(report)
    assert len(report.names("passed")) >= 10
    for step in (drawn_step((2, 2)), drawn_step((2, 1), tokens=(2, 0))):
        report = check_verifier(step)
        assert not report.names("failed"), str(report)

    def backwards(tree):
        return right(tree)[::-1]

    right = DrawnTree.candidates
    monkeypatch.setattr(DrawnTree, "candidates", backwards)
    assert "siblings" in check_verifier(drawn_step()).names("failed")


def test_paths_come_as_if_whole_texts_were_drawn():
    """Of 9 texts of 2 tokens one after the other, until two beginnings have come."""
    model = verifying.Model(7, "any", 3)
    q = {path: np.exp(model(path)) for path in [(), (0,), (1,), (2,)]}
    texts = [(a, b) for a in range(3) for b in range(3)]
    chances = [q[()][a] * q[(a,)][b] for a, b in texts]

    def texts_drawn(rng):
        left, order, firsts = np.array(chances), [], []
        while len(firsts) < 2:
            i = rng.choice(9, p=left / left.sum())
            left[i] = 0
            order.append(texts[i])
            firsts = list(dict.fromkeys(a for a, _ in order))
        return tuple(firsts), tuple(order[:2])

    def drawn(rng):
        tree = DrawnTree(Dice(rng))
        tree.grow(q[()][None], 2)
        firsts = tuple(token for _, token in tree.depths[0])
        tree.grow(np.array([q[(a,)] for a in firsts]), 2)
        return firsts, tuple((firsts[path], token) for path, token in tree.depths[1])

    assert law(drawn) == pytest.approx(law(texts_drawn), abs=1e-12)


def plain_probabilities(logits, temperature, top_p):
    """`probabilities_after`, which is compiled, for thousands of calls."""
    return Settings(len(logits), temperature=temperature, top_p=top_p).of(np.asarray(logits))


def test_plain_probabilities_are_those_of_the_package():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 5)))
    for node, (t, top_p) in itertools.product(range(6), [(1.0, 1.0), (0.5, 0.7), (2.0, 0.4)]):
        ours = probabilities_after(logits, 0, node, t, top_p, cut=top_p < 1)
        np.testing.assert_allclose(ours, plain_probabilities(logits[0, node], t, top_p), atol=1e-12)


# ---------------------------------------------------------------- what fails, and how it is named


@pytest.mark.parametrize("name, wrong", WRONG_STEPS, ids=lambda x: getattr(x, "__name__", ""))
def test_each_planted_fault_is_named(name, wrong, unchecked):
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
        noise = [rng.gumbel(size=n) for _ in range(2)]
        tokens, q = [], []
        with np.errstate(divide="ignore", invalid="ignore"):
            for i in range(2):
                q.append(softmax(draft(tokens), dtype, top_k))
                if fault == "noise shared by draft and residual":
                    tokens.append(int(np.argmax(np.log(q[-1]) + noise[i])))
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
                    return [*tokens[:i], int(np.argmax(np.log(rest) + noise[i]))]
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
def test_a_strangers_fault_is_named(fault, unchecked):
    report = check_verifier(strangers_step(fault))
    assert report.fingerprints == {fault}, str(report)
    assert VERIFIER_FINGERPRINTS[fault] in str(report)


def test_a_stranger_without_faults_passes(unchecked):
    for dtype in (np.float64, np.float32):
        report = check_verifier(strangers_step(dtype=dtype))
        assert report.names("failed") == [], str(report)
    assert len(report.names("passed")) == 6
    assert "it has no option widths" in str(report)
    shaped = check_verifier(strangers_step("first token unchecked"), widths=(1, 1))
    assert shaped.fingerprints == {"first token unchecked"}


def test_what_is_not_a_step(unchecked):
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


def test_the_page_names_every_fault():
    page = (Path(__file__).parent.parent / "CONFORMANCE.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"(?m)^\| ([^|]*) \|", page))
    assert [name for name in VERIFIER_FINGERPRINTS if name not in rows] == []
