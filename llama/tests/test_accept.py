"""Acceptance: the longest path of the model's own tokens."""

import numpy as np
import pytest

from treeattn import pack
from treeattn_llama import accept_candidate_tokens

NEVER = -np.inf


def model_token(path):
    """A made-up model: the token after a path, by a rule that candidates often happen to follow."""
    return (3 * len(path) + sum(path)) % 4


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
    prefixes = [beam[b, m, : c + 1].tolist() for b, m, c in np.ndindex(beam.shape)]
    verified = np.reshape([model_token(prefix) for prefix in prefixes], beam.shape)
    new = accept_candidate_tokens(ended, scores, verified, np.full(beam.shape, -0.5))
    packed, mask, offsets, unpack_map = pack(beam, lengths)
    nodes = new.nodes(unpack_map)
    assert nodes.shape == (5, 4) and new.counts[4] == 0 and new[4] == []
    for b in range(4):
        text = [int(beam[b, 0, 0])]  # goes on as long as some candidate agrees so far
        candidates = [row[:n].tolist() for row, n in zip(beam[b], lengths[b], strict=True)]
        while any(text == candidate[: len(text)] for candidate in candidates):
            text.append(model_token(text))
        assert new[b] == text[1:]
        count = new.counts[b]
        path = nodes[b, :count]
        assert packed[b, path].tolist() == text[:count] and len(new[b]) == count
        assert offsets[b, path].tolist() == list(range(count))
        assert mask[b][np.ix_(path, path)].tolist() == np.tri(count, dtype=bool).tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": np.zeros((1, 2, 2))}, r"scores: expected a score for each token, \(1, 2, 3\)"),
        ({"scores": np.array([[[0, NEVER, -1]] * 2])}, "scores: −∞ ends a candidate"),
        ({"verified_beam": np.zeros((1, 2, 2), int)}, r"verified_beam: expected .* \(1, 2, 3\)"),
        ({"verified_scores": np.zeros((1, 3))}, r"verified_scores: expected shape \(1, 2, 3\)"),
        ({"beam": np.zeros((1, 2, 3))}, "beam: expected integers"),
        ({}, r"unpack_map: expected integers \(1, any, any\)"),
    ],
)
def test_bad_input(unchecked, change, message):
    tokens, scores = np.zeros((1, 2, 3), int), np.zeros((1, 2, 3))
    call = {"beam": tokens, "scores": scores, "verified_beam": tokens, "verified_scores": scores}
    with pytest.raises(ValueError, match=message):
        accept_candidate_tokens(**call | change).nodes(np.zeros((2, 1, 2), np.int32))
