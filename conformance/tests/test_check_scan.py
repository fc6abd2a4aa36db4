"""check_scan: scans in few rounds pass, and planted mistakes are named."""

import itertools

import pytest

from puzzles.scans import SCAN_FINGERPRINTS, Joined, check_scan


def passes(report):
    assert not report.names("failed") and not report.names("skipped"), str(report)


def doubling(merge, states):
    """Over distances 1, 2, 4, …, each round from the one before."""
    distance = 1
    while distance < len(states):
        later = [merge(a, b) for a, b in zip(states, states[distance:], strict=False)]
        states = states[:distance] + later
        distance *= 2
    return states


def chain(merge, states):
    return list(itertools.accumulate(states, merge))


def in_place(merge, states):
    distance = 1
    while distance < len(states):
        for i in range(distance, len(states)):
            states[i] = merge(states[i - distance], states[i])
        distance *= 2
    return states


def one_round(merge, states):
    return states[:1] + [merge(a, b) for a, b in itertools.pairwise(states)]


WRONG_SCANS = [
    ("a chain", chain),
    ("itself left out", lambda merge, states: [Joined(()), *doubling(merge, states)[:-1]]),
    ("a key counted twice", in_place),
    ("one round only", one_round),
    ("merged backwards", lambda merge, states: doubling(lambda a, b: merge(b, a), states)),
    ("suffixes", lambda merge, s: doubling(lambda a, b: merge(b, a), s[::-1])[::-1]),
    ("the whole for all", lambda merge, states: doubling(merge, states)[-1:] * len(states)),
]


def test_scans_in_few_rounds_pass():
    passes(check_scan(doubling))
    passes(check_scan(lambda merge, states: divide_and_conquer(merge, states)))


def divide_and_conquer(merge, states):
    half = len(states) // 2
    if not half:
        return states
    left = divide_and_conquer(merge, states[:-half])
    right = divide_and_conquer(merge, states[-half:])
    return left + [merge(left[-1], x) for x in right]


@pytest.mark.parametrize(("name", "wrong"), WRONG_SCANS)
def test_a_planted_mistake_of_a_scan_has_its_own_fingerprint(name, wrong):
    report = check_scan(wrong)
    assert report.fingerprints == {name}, str(report)
    assert SCAN_FINGERPRINTS[name] in str(report)


def test_every_fingerprint_is_planted():
    assert {name for name, _ in WRONG_SCANS} == set(SCAN_FINGERPRINTS)


def test_answers_of_another_kind_say_so():
    assert "ZeroDivisionError" in str(check_scan(lambda *_: 1 // 0))
