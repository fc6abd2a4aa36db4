"""Acceptance: the longest path of the model's own tokens, and rejection sampling by enumeration."""

import itertools

import numpy as np
import pytest

from treeattn import pack
from treeattn_llama import accept_candidate_tokens, candidate_lengths, rejection
from treeattn_llama.rejection import accept_drawn

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
    rng = np.random.default_rng(seed)
    beam = rng.integers(0, 4, (5, 6, 4))
    beam[:, :, 0] = beam[:, :1, 0]  # the certain token
    lengths = rng.integers(1, 5, (5, 6))
    scores = np.where(np.arange(4) < lengths[..., None], -1.0, NEVER)
    got = accept_candidate_tokens(beam, scores, *verify(beam))
    for b, tokens in enumerate(got):
        candidates = [beam[b, m, :n].tolist() for m, n in enumerate(lengths[b])]
        assert tokens == plain_walk(int(beam[b, 0, 0]), candidates)


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


@pytest.mark.parametrize("seed", range(10))
def test_what_was_accepted_can_be_committed(seed):
    """The nodes are a path of the tree: its tokens are the text's, each below the one before."""
    rng = np.random.default_rng(seed)
    beam = rng.integers(0, 3, (5, 6, 4))
    beam[:, :, 0] = beam[:, :1, 0]
    lengths = rng.integers(0, 5, (5, 6))
    lengths[4] = 0  # a text that is over
    scores = np.where(np.arange(4) < lengths[..., None], -1.0, NEVER)
    verified, verified_scores = verify(beam)
    new = accept_candidate_tokens(beam, scores, verified, verified_scores)
    packed, mask, offsets, unpack_map = pack(beam, lengths)
    nodes = new.nodes(unpack_map, width=4)
    np.testing.assert_array_equal(new.nodes(unpack_map), nodes)
    assert nodes.shape == (5, 4) and new.counts[4] == 0 and new.counts.max() > 0
    for b, (path, count) in enumerate(zip(nodes, new.counts, strict=True)):
        path = path[:count]
        text = [beam[b, 0, 0], *new[b]]
        assert packed[b, path].tolist() == text[:count] and len(new[b]) == count
        assert offsets[b, path].tolist() == list(range(count))
        assert mask[b][np.ix_(path, path)].tolist() == np.tri(count, dtype=bool).tolist()


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


def test_bad_nodes():
    beam, scores = np.array([[[5, 6]]]), np.zeros((1, 1, 2))
    new = accept_candidate_tokens(beam, scores, beam + 1, scores)
    with pytest.raises(ValueError, match="width: expected an integer of at least 2, got 1"):
        new.nodes(np.zeros((1, 1, 2), np.int32), width=1)
    with pytest.raises(ValueError, match=r"unpack_map: expected integers \(1, any, any\)"):
        new.nodes(np.zeros((2, 1, 2), np.int32))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": np.zeros((1, 2, 2))}, r"scores: expected a score for each token, \(1, 2, 3\)"),
        ({"scores": np.full((1, 2, 3), np.nan)}, "scores: expected logarithms .* got NaN"),
        ({"scores": np.full((1, 2, 3), 0.1)}, "scores: expected logarithms .* above 0"),
        ({"scores": np.array([[[0, NEVER, -1]] * 2])}, "scores: −∞ ends a candidate"),
        (
            {"verified_beam": np.zeros((1, 2, 2), int)},
            r"verified_beam: expected integers \(1, 2, 3\)",
        ),
        ({"verified_scores": np.zeros((1, 3))}, "verified_scores: expected a score for each"),
        ({"verified_scores": np.full((1, 2, 3), NEVER)}, "verified_scores: expected finite"),
        ({"verified_scores": np.full((1, 2, 3), np.nan)}, "verified_scores: .* got NaN"),
    ],
)
def test_bad_input(unchecked, change, message):
    call = {
        "beam": np.zeros((1, 2, 3), int),
        "scores": np.zeros((1, 2, 3)),
        "verified_beam": np.zeros((1, 2, 3), int),
        "verified_scores": np.zeros((1, 2, 3)),
    } | change
    with pytest.raises(ValueError, match=message):
        accept_candidate_tokens(**call)
    with pytest.raises(ValueError, match="beam: expected integers"):
        accept_candidate_tokens(**(call | {"beam": np.zeros((1, 2, 3))}))


# Rejection sampling: every outcome and its probability


class Traced:
    """Dice that follow a list of choices, then always the first possible one; `probability` is that
    of everything chosen, `open` the choices that were not taken."""

    def __init__(self, choices):
        self.choices, self.at, self.probability, self.open = choices, 0, 1.0, []

    def _choose(self, probabilities):
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if self.at == len(self.choices):
            self.open += [[*self.choices, i] for i in possible[1:]]
            self.choices = [*self.choices, possible[0]]
        found = self.choices[self.at]
        self.at += 1
        self.probability *= probabilities[found]
        return found

    def happens(self, probability):
        return self._choose([1 - probability, probability]) == 1

    def pick(self, probabilities):
        return self._choose(probabilities.tolist())


def outcomes(run):
    """(result, probability) for each way that the dice can fall in `run(dice)`."""
    waiting = [[]]
    while waiting:
        dice = Traced(waiting.pop())
        yield run(dice), dice.probability
        waiting += dice.open


def draws_and_chances(q, width, replacement):
    """Each sequence of `width` draws from q, and its probability."""
    for draws in itertools.product(range(len(q)), repeat=width):
        left, chance = np.array(q), 1.0
        for x in draws:
            chance *= left[x] / left.sum() if left.sum() > 0 else 0
            if not replacement:
                left = np.where(np.arange(len(q)) == x, 0, left)
        if chance > 0:
            yield list(draws), chance


P = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [1.0, 0, 0, 0], [0.25] * 4, [0, 0.5, 0.5, 0]]
Q = [[0.5, 0.3, 0.2, 0.0], [0.7, 0.1, 0.1, 0.1], [0, 0, 0.01, 0.99], [0, 1.0, 0, 0], [0.25] * 4]


def accepted(p, q, draws, replacement, claimed=None):
    """The distribution of the token that a node gives after these draws, over throws."""
    beam = np.array([[0, x] for x in draws])
    lengths = np.full(len(draws), 2)
    claimed = q if claimed is None else claimed
    total = np.zeros(len(p))

    def run(dice):
        model, draft = lambda m, c: p, lambda m, c: claimed
        return accept_drawn(beam, lengths, model, draft, dice, replacement)

    for tokens, probability in outcomes(run):
        total[tokens[0]] += probability
    return total


def one_node(p, q, width, replacement, claimed=None):
    """The same over draws."""
    pairs = draws_and_chances(q, width, replacement)
    return sum(chance * accepted(p, q, draws, replacement, claimed) for draws, chance in pairs)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_node_gives_each_token_with_the_models_probability(width, replacement):
    for p, q in itertools.product(np.array(P), np.array(Q)):
        if not replacement and (q > 0).sum() < width:
            continue  # there are no such draws
        np.testing.assert_allclose(one_node(p, q, width, replacement), p, atol=1e-12)


def test_a_path_gives_each_text_with_the_models_probability():
    """Chains of two draws: all texts of two tokens, at the least."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(3), (2, 4))  # after each path: (), 0, 1 and 2
    total = np.zeros((3, 3))
    for x, y in itertools.product(range(3), repeat=2):
        beam = np.array([[0, x, y]])

        def run(dice, beam=beam):
            at = lambda table: lambda m, c: table[0 if c == 0 else 1 + beam[m, 1]]  # noqa: E731
            return accept_drawn(beam, np.array([3]), at(p), at(q), dice)

        for tokens, probability in outcomes(run):
            chance = q[0, x] * q[1 + x, y] * probability
            if len(tokens) > 1:
                total[tokens[0], tokens[1]] += chance
            else:  # the text goes on as the model says
                total[tokens[0]] += chance * p[1 + tokens[0]]
    np.testing.assert_allclose(total, p[0][:, None] * p[1:], atol=1e-12)


def test_wrong_claims_are_seen():
    p, q = np.array(P[1]), np.array(Q[1])
    assert np.abs(one_node(p, q, 2, False, claimed=np.full(4, 0.25)) - p).max() > 0.01


def test_a_draw_that_cannot_have_been_one():
    chances, rest = rejection(np.array([0.5, 0.5]), np.array([1.0, 0.0]), np.array([1]))
    assert chances.tolist() == [0.0] and rest.tolist() == [0.5, 0.5]
