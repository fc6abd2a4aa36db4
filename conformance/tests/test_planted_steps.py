"""Faults of speculative steps, planted by the third reader.

A fault has a name that is its own or none, where the report says what is off.
"""

import numpy as np
import pytest

from treeattn_conformance import check_verifier

pytestmark = pytest.mark.slow


# Steps: a chain of two


def softmax(logits, temperature):
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / temperature)
    return p / p.sum()


def chain(fault=None):
    def step(target, draft, rng, *, temperature=1.0):
        drafted, q = (), []
        for _ in range(2):
            q.append(softmax(draft(drafted), temperature))
            drafted = (*drafted, int(rng.choice(len(q[-1]), p=q[-1])))
        kept = ()
        for x, of_draft in zip(drafted, q, strict=True):
            p = softmax(target(kept), temperature)
            chance = p[x] / of_draft[x]
            chance = chance * 0.9 if fault == "nine of ten" else chance
            chance = chance**0.5 if fault == "the root of the ratio" else chance
            if fault == "likely enough":
                accepted = p[x] > 0.3
            else:
                accepted = rng.random() < chance
            if accepted:
                kept = (*kept, x)
                continue
            rest = np.maximum(p - of_draft, 0)
            if fault == "either difference":
                rest = np.abs(p - of_draft)
            if fault == "a token later":
                rest = softmax(target((*kept, x)), temperature)
            if fault == "again from the draft":
                rest = of_draft
            if fault == "rejected and kept":
                kept = (*kept, x)
                rest = softmax(target(kept), temperature)
            if fault == "the likeliest of the rest":
                return [*kept, int(np.argmax(rest))]
            rest = rest if rest.any() else p
            return [*kept, int(rng.choice(len(rest), p=rest / rest.sum()))]
        last = softmax((draft if fault == "a bonus of the draft" else target)(kept), temperature)
        return [*kept, int(rng.choice(len(last), p=last))]

    return step


STEPS = {
    "nine of ten": set(),
    "the root of the ratio": set(),
    "likely enough": set(),
    "either difference": set(),
    "a token later": set(),
    "again from the draft": set(),
    "rejected and kept": set(),
    "the likeliest of the rest": {"argmax at a temperature"},
    "a bonus of the draft": set(),
}
PLANTED = [(check_verifier, f"step: {x}", chain(x), names) for x, names in STEPS.items()]


@pytest.mark.parametrize(
    ("ask", "f", "names"),
    [(ask, f, names) for ask, _, f, names in PLANTED],
    ids=[x for _, x, _, _ in PLANTED],
)
def test_a_third_readers_fault(ask, f, names):
    report = ask(f)
    assert report.names("failed"), str(report)
    assert report.fingerprints == names, str(report)


def test_without_a_fault_it_passes():
    report = check_verifier(chain())
    assert not report.names("failed"), str(report)
