"""Stripes, candidates and scans in the conformance suite: right ones pass, mistakes are named."""

import hashlib
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn_conformance import (
    SCAN_FINGERPRINTS,
    STRIPE_FINGERPRINTS,
    TOP_K_FINGERPRINTS,
    check_local_lengths,
    check_scan,
    check_top_k,
    export,
    local_lengths,
    merge_cases,
    stripe_questions,
    top_k,
    top_k_questions,
    vectors,
)
from treeattn_conformance.__main__ import main
from treeattn_conformance.scans import Joined

# The questions and answers of version 1. Whoever changes them makes version 2.
VECTORS_1 = "541d4fe11aa15a73d18df3915f5d1faaffb536f725c035f548d00b95ba71239b"


def count(lengths, devices, rank, interleave):
    """Key by key."""
    owners = [t // interleave % devices for t in range(lengths.max())]
    return np.array([[owners[:length].count(rank) for length in row] for row in lengths])


def sorted_candidates(shards, k):
    """With dictionaries: a position has one score."""
    rows = []
    for r in range(len(shards[0][0])):
        known = {}
        for scores, positions in shards:
            known |= dict(zip(positions[r].tolist(), scores[r].tolist(), strict=True))
        known = {p: s for p, s in known.items() if p >= 0 and s != -np.inf}
        best = sorted(known, key=lambda p, known=known: (-known[p], p))[:k]
        empty = k - len(best)
        rows.append(([known[p] for p in best] + [-np.inf] * empty, best + [-1] * empty))
    scores, positions = zip(*rows, strict=True)
    return np.array(scores), np.array(positions)


def passes(report):
    assert set(report.names("passed")) == {result.case for result in report.results}, str(report)
    assert not report.fingerprints


def test_counting_key_by_key_passes():
    passes(check_local_lengths(count))


def test_candidates_in_dictionaries_pass():
    passes(check_top_k(sorted_candidates))


def test_jax_top_k_of_sorted_positions_passes():
    """`jax.lax.top_k` prefers the lower index: the earlier position, once positions are sorted."""

    def ours(shards, k):
        scores, positions = (jnp.concatenate(x, axis=1) for x in zip(*shards, strict=True))
        order = jnp.argsort(positions, axis=1)
        scores, positions = (jnp.take_along_axis(x, order, 1) for x in (scores, positions))
        again = jnp.pad(positions[:, 1:] == positions[:, :-1], ((0, 0), (1, 0)))
        best, at = jax.lax.top_k(jnp.where(again | (positions < 0), -jnp.inf, scores), k)
        return best, jnp.where(best == -jnp.inf, -1, jnp.take_along_axis(positions, at, 1))

    passes(check_top_k(ours))


def test_candidates_merge_in_any_order():
    """top_k(A ∪ B) = top_k(top_k(A) ∪ top_k(B)), of any cut, and twice the same is the same."""
    rng = np.random.default_rng(0)
    for question in top_k_questions():
        shards, k = question.arguments
        for _ in range(5):
            states = [top_k([shards[i]], k) for i in rng.permutation(len(shards))]
            states.append(states[0])
            while len(states) > 1:
                at = int(rng.integers(len(states) - 1))
                states[at : at + 2] = [top_k(states[at : at + 2], k)]
            np.testing.assert_equal(states[0], question.expected)


def part_of(lengths, devices, rank, _):
    part = -(-lengths // devices)
    return np.clip(lengths - rank * part, 0, part)


def last_round(change):
    """`change`(keys in the last round, keys before this device's stripe, interleave)."""

    def wrong(lengths, devices, rank, interleave):
        full, rest = np.divmod(lengths, devices * interleave)
        return full * interleave + change(rest, rank * interleave, interleave)

    return wrong


def of_lengths(change):
    return lambda lengths, *options: local_lengths(change(lengths), *options)


WRONG_LENGTHS = [
    ("contiguous shards", part_of),
    ("stripes of one key", lambda l, devices, rank, _: l // devices + (rank < l % devices)),
    ("only full rounds", last_round(lambda rest, before, interleave: 0 * rest)),
    ("the last round for all", last_round(lambda rest, before, i: np.minimum(rest, i))),
    ("the last round shared evenly", lambda l, devices, rank, _: -(-l // devices)),
    ("the last round not bounded", last_round(lambda rest, before, _: rest - before)),
    ("the last round not bounded", last_round(lambda r, before, i: np.maximum(r - before, 0))),
    (
        "ranks from 1",
        lambda l, d, r, i: l // (d * i) * i + np.clip(l % (d * i) - (r + 1) * i, 0, i),
    ),
    ("all keys", lambda lengths, *_: lengths),
    ("one bound for all queries", of_lengths(lambda l: np.broadcast_to(l[:, -1:], l.shape))),
    ("one row's length for all", of_lengths(lambda l: np.broadcast_to(l[:1], l.shape))),
    ("a query does not see itself", of_lengths(lambda l: np.maximum(l - 1, 0))),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG_LENGTHS)
def test_a_planted_mistake_of_stripes_has_its_own_fingerprint(name, wrong):
    report = check_local_lengths(wrong)
    assert report.fingerprints == {name}, str(report)
    assert STRIPE_FINGERPRINTS[name] in str(report)


def test_what_knows_no_stripes_of_several_keys_is_not_asked():
    def ones(lengths, devices, rank, interleave):
        if interleave > 1 and devices > 1:
            raise NotImplementedError("stripes of one key")
        return count(lengths, devices, rank, interleave)

    report = check_local_lengths(ones)
    assert set(report.names("passed")) == {"one device", "stripes of one"}
    assert not report.names("failed")


def sorted_by(key, shards, k, once=True):
    """Candidates by `key`, in the order of shards where it is equal."""
    b = len(shards[0][0])
    answer = np.full((b, k), -np.inf), np.full((b, k), -1)
    for r in range(b):
        offered = [
            (float(s), int(p)) for s_, p_ in shards for s, p in zip(s_[r], p_[r], strict=True)
        ]
        offered = [x for x in offered if x[0] > -np.inf and x[1] >= 0]
        offered = list(dict.fromkeys(offered)) if once else offered
        for i, (s, p) in enumerate(sorted(offered, key=lambda x: key(*x))[:k]):
            answer[0][r, i] = s
            answer[1][r, i] = p
    return answer


def hidden_chosen(shards, k):
    lowest = float(np.finfo(np.float32).min)
    return sorted_candidates([(np.maximum(s, lowest), p) for s, p in shards], k)


def few_candidates(shards, k):
    few = math.ceil(k / len(shards))
    return sorted_candidates([sorted_candidates([shard], few) for shard in shards], k)


def sorted_positions(scores, positions):
    return scores, np.sort(positions, axis=1)


def local_indices(shards, k):
    """All candidates by their index on their device."""
    local = [(s, np.broadcast_to(np.arange(s.shape[1]), s.shape)) for s, _ in shards]
    return sorted_by(lambda s, p: -s, local, k, once=False)


WRONG_CANDIDATES = [
    ("local indices", local_indices),
    ("ties by shard", lambda shards, k: sorted_by(lambda s, p: -s, shards, k)),
    ("ties to the last", lambda shards, k: sorted_by(lambda s, p: (-s, -p), shards, k)),
    (
        "a key counted twice",
        lambda shards, k: sorted_by(lambda s, p: (-s, p), shards, k, once=False),
    ),
    ("too few from each shard", few_candidates),
    ("one shard's best", lambda shards, k: sorted_candidates(shards[:1], k)),
    ("hidden keys chosen", hidden_chosen),
    ("best last", lambda shards, k: tuple(x[:, ::-1] for x in sorted_candidates(shards, k))),
    ("scores alone sorted", lambda shards, k: sorted_positions(*sorted_candidates(shards, k))),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG_CANDIDATES)
def test_a_planted_mistake_of_candidates_has_its_own_fingerprint(name, wrong):
    report = check_top_k(wrong)
    assert report.fingerprints == {name}, str(report)
    assert TOP_K_FINGERPRINTS[name] in str(report)


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
    assert {name for name, _ in WRONG_LENGTHS} == set(STRIPE_FINGERPRINTS)
    assert {name for name, _ in WRONG_CANDIDATES} == set(TOP_K_FINGERPRINTS)


def test_answers_of_another_shape_or_kind_say_so():
    report = check_local_lengths(lambda lengths, *_: lengths[:, 0])
    assert "the array of shape (3,), expected (3, 1)" in str(report)
    assert "2 arrays" not in str(report)
    assert "1 arrays, expected 2" in str(check_top_k(lambda shards, k: [shards[0][0]]))
    assert "ZeroDivisionError" in str(check_local_lengths(lambda *_: 1 // 0))


# The vectors as files


def test_the_vectors_are_those_of_their_version():
    """Questions bit for bit; answers, which exp and log of another library may round otherwise."""
    found = hashlib.sha256()
    for name, x in sorted(vectors().items()):
        exact = x if "expected" not in name or x.dtype.kind != "f" else x.astype(np.float32)
        found.update(f"{name} {exact.dtype} {exact.shape}".encode())
        found.update(np.ascontiguousarray(exact).tobytes())
    assert found.hexdigest() == VECTORS_1


def test_vectors_are_read_back_from_both_files(tmp_path, capsys):
    assert main(["--export", str(tmp_path / "new")]) == 0
    npz, as_json = capsys.readouterr().out.split()
    read = json.loads(open(as_json, encoding="utf-8").read())
    assert read["version"] == 1
    with np.load(npz) as found:
        assert int(found["version"]) == 1
        assert set(found) - {"version"} == set(read["arrays"]) == set(vectors())
        for name, x in vectors().items():
            np.testing.assert_array_equal(found[name], x)
            entry = read["arrays"][name]
            again = np.array(entry["data"], dtype=entry["dtype"]).reshape(entry["shape"])
            np.testing.assert_array_equal(again, x)


def test_a_merge_passes_the_vectors_of_the_file(tmp_path):
    npz, _ = export(tmp_path)
    with np.load(npz) as found:
        for case in merge_cases():
            outs, lses = found[f"merge/{case.name}/outs"], found[f"merge/{case.name}/lses"]
            np.testing.assert_array_equal(outs, [out for out, _ in case.arguments[0]])
            np.testing.assert_array_equal(lses, [lse for _, lse in case.arguments[0]])
            np.testing.assert_array_equal(found[f"merge/{case.name}/expected/out"], case.out)


def test_vectors_load_in_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    npz, _ = export(tmp_path)
    with np.load(npz) as found:
        for x in found.values():
            np.testing.assert_array_equal(
                torch.from_numpy(np.atleast_1d(x)).numpy().reshape(x.shape), x
            )


def test_a_shell_asks_for_a_function_or_a_folder(capsys):
    with pytest.raises(SystemExit):
        main(["merge"])
    assert "or --export FOLDER" in capsys.readouterr().err


def test_questions_are_the_same_at_every_call():
    for questions in (stripe_questions, top_k_questions):
        for one, other in zip(questions(), questions(), strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)
