"""Acceptance: the longest path of the model's own tokens."""

import numpy as np
import pytest

from treeattn import pack
from treeattn_llama import accept_candidate_tokens, candidate_lengths

NEVER = -np.inf


def model_token(path):
    """A made-up model: the token after a path, by a rule that candidates often happen to follow."""
    return (3 * len(path) + sum(path)) % 4


def plain_walk(first, candidates):
    """The text after `first`, a token at a time, as long as some candidate agrees so far."""
    path = [first]
    while True:
        path.append(model_token(path))
        if not any(list(c[: len(path)]) == path for c in candidates):
            return path[1:]


def verify(beam):
    """The model's token after each prefix of each candidate, and a score for it."""
    verified = np.zeros(beam.shape, np.int64)
    for b, m, c in np.ndindex(beam.shape):
        verified[b, m, c] = model_token(beam[b, m, : c + 1].tolist())
    return verified, np.full(beam.shape, -0.5)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_path_of_the_models_own_tokens(seed):
    """It can be committed: the nodes are a path of the tree, each below the one before."""
    rng = np.random.default_rng(seed)
    beam = rng.integers(0, 4, (5, 6, 4))
    beam[:, :, 0] = beam[:, :1, 0]  # the certain token
    lengths = rng.integers(0, 5, (5, 6))
    lengths[:, 0] = rng.integers(1, 5, 5)
    lengths[4] = 0  # a text that is over
    scores = np.where(np.arange(4) < lengths[..., None], -1.0, NEVER)
    ended = np.where(scores > NEVER, beam, -1)  # no token at all stands after an end
    new = accept_candidate_tokens(ended, scores, *verify(beam))
    packed, mask, offsets, unpack_map = pack(beam, lengths)
    nodes = new.nodes(unpack_map)
    assert nodes.shape == (5, 4) and new.counts[4] == 0 and new[4] == []
    for b in range(4):
        candidates = [beam[b, m, :n].tolist() for m, n in enumerate(lengths[b]) if n]
        assert new[b] == plain_walk(int(beam[b, 0, 0]), candidates)
        count = new.counts[b]
        path = nodes[b, :count]
        text = [beam[b, 0, 0], *new[b]]
        assert packed[b, path].tolist() == text[:count] and len(new[b]) == count
        assert offsets[b, path].tolist() == list(range(count))
        assert mask[b][np.ix_(path, path)].tolist() == np.tri(count, dtype=bool).tolist()


def test_the_documents_beam():
    """Mars is [a red | reddish when | dark red]: the model goes on "is dark blue"."""
    mars, is_, a, red, reddish, when, dark, blue = range(8)
    beam = np.array([[[mars, is_, a, red], [mars, is_, reddish, when], [mars, is_, dark, red]]])
    after = {mars: is_, is_: dark, dark: blue}
    verified = np.vectorize(lambda t: after.get(t, 0))(beam)
    scores = np.zeros(beam.shape)
    assert accept_candidate_tokens(beam, scores, verified, scores) == [[is_, dark, blue]]


def test_nothing_to_accept():
    empty = np.zeros((2, 0, 3), int), np.zeros((2, 0, 3))
    assert accept_candidate_tokens(*empty, *empty) == [[], []]
    beam = np.array([[[1, 2]], [[3, 4]]])
    scores = np.array([[[0.0, NEVER]], [[NEVER, NEVER]]])  # one text is over
    assert accept_candidate_tokens(beam, scores, beam + 1, np.zeros((2, 1, 2))) == [[2], []]


def test_a_candidate_that_has_ended_is_not_what_was_accepted():
    """[c x] is filled up with the 0 that [c x 0 y] goes on with; its last place is no node."""
    c, x, y, z = 5, 6, 7, 8
    beam = np.array([[[c, x, 0, 0], [c, x, 0, y]]])
    scores = np.array([[[0.0, -1, NEVER, NEVER], [0, -1, -1, -1]]])
    after = {c: x, x: 0, 0: z}
    verified = np.vectorize(lambda t: after.get(t, 1))(beam)
    new = accept_candidate_tokens(beam, scores, verified, np.full(beam.shape, -0.5))
    unpack_map = pack(beam, candidate_lengths(scores)).unpack_map
    assert new == [[x, 0, z]] and new.candidates.tolist() == [1]
    assert new.nodes(unpack_map)[:, : new.counts[0]].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": np.zeros((1, 2, 2))}, r"scores: expected a score for each token, \(1, 2, 3\)"),
        ({"scores": np.array([[[0, NEVER, -1]] * 2])}, "scores: −∞ ends a candidate"),
        (
            {"verified_beam": np.zeros((1, 2, 2), int)},
            r"verified_beam: expected integers \(1, 2, 3\)",
        ),
        ({"verified_scores": np.zeros((1, 3))}, "verified_scores: expected a score for each"),
        ({"beam": np.zeros((1, 2, 3))}, "beam: expected integers"),
    ],
)
def test_bad_input(unchecked, change, message):
    tokens, scores = np.zeros((1, 2, 3), int), np.zeros((1, 2, 3))
    call = {"beam": tokens, "scores": scores, "verified_beam": tokens, "verified_scores": scores}
    with pytest.raises(ValueError, match=r"unpack_map: expected integers \(1, any, any\)"):
        accept_candidate_tokens(**call).nodes(np.zeros((2, 1, 2), np.int32))
    call |= change
    with pytest.raises(ValueError, match=message):
        accept_candidate_tokens(**call)
