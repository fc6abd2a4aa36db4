"""Acceptance: the longest path of the model's own tokens, and rejection sampling by enumeration."""

import itertools

import jax
import numpy as np
import pytest

from treeattn import pack
from treeattn_llama.speculation import (
    accept_candidate_tokens,
    candidate_lengths,
    reject,
    rejection,
)
from treeattn_llama.speculation.accept import descend
from treeattn_llama.speculation.reject import KeyDice, rejection_judge

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
    # Where the first column is not certain, the same candidates after the model's own token.
    verified, verified_scores = verify(beam)
    own = np.array([int(beam[b, 0, 0]) for b in range(5)])
    late = accept_candidate_tokens(
        beam, scores, verified, verified_scores, next_token=np.where(own == 3, 2, own)
    )
    for b, tokens in enumerate(late):
        assert tokens == ([2] if own[b] == 3 else [own[b], *got[b]])


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
    assert accept_candidate_tokens(*empty, *empty, next_token=np.array([5, 6])) == [[5], [6]]
    beam = np.array([[[1, 2]], [[3, 4]]])
    scores = np.array([[[0.0, NEVER]], [[NEVER, NEVER]]])  # one text is over
    assert accept_candidate_tokens(beam, scores, beam + 1, np.zeros((2, 1, 2))) == [[2], []]


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_what_was_accepted_can_be_committed(seed, certain):
    """The nodes are a path of the tree: its tokens are the text's, each below the one before."""
    rng = np.random.default_rng(seed)
    beam = rng.integers(0, 3, (5, 6, 4))
    if certain:
        beam[:, :, 0] = beam[:, :1, 0]
    lengths = rng.integers(0, 5, (5, 6))
    lengths[4] = 0  # a text that is over
    scores = np.where(np.arange(4) < lengths[..., None], -1.0, NEVER)
    own = None if certain else rng.integers(0, 3, 5)
    verified, verified_scores = verify(beam)
    new = accept_candidate_tokens(beam, scores, verified, verified_scores, next_token=own)
    packed, mask, offsets, unpack_map = pack(beam, lengths)
    nodes = new.nodes(unpack_map, width=4)
    np.testing.assert_array_equal(new.nodes(unpack_map), nodes)
    assert nodes.shape == (5, 4) and new.counts[4] == 0 and new.counts.max() > 0
    for b, (path, count) in enumerate(zip(nodes, new.counts, strict=True)):
        path = path[:count]
        text = [beam[b, 0, 0], *new[b]] if certain else new[b]
        assert packed[b, path].tolist() == text[:count] and len(new[b]) == count + (not certain)
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
    with pytest.raises(ValueError, match="unpack_map: expected 1 texts, got 2"):
        new.nodes(np.zeros((2, 1, 2), np.int32))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": np.zeros((1, 2, 2))}, r"scores: expected a score for each token, \(1, 2, 3\)"),
        ({"scores": np.full((1, 2, 3), np.nan)}, "scores: expected logarithms .* got NaN"),
        ({"scores": np.full((1, 2, 3), 0.1)}, "scores: expected logarithms .* above 0"),
        ({"scores": np.array([[[0, NEVER, -1]] * 2])}, "scores: −∞ ends a candidate"),
        ({"verified_beam": np.zeros((1, 2, 2), int)}, "verified_beam: expected beam's shape"),
        ({"verified_scores": np.zeros((1, 3))}, "verified_scores: expected a score for each"),
        ({"verified_scores": np.full((1, 2, 3), NEVER)}, "verified_scores: expected finite"),
        ({"verified_scores": np.full((1, 2, 3), np.nan)}, "verified_scores: .* got NaN"),
        ({"next_token": np.zeros(2, int)}, r"next_token: expected shape \(1,\), got \(2,\)"),
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
    with pytest.raises(TypeError, match="beam: expected an array of integers"):
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


def one_node(p, q, width, replacement, claimed=None):
    """The distribution of the token that a node gives, over draws and throws."""
    total = np.zeros(len(p))
    for draws, chance in draws_and_chances(q, width, replacement):
        beam = np.array([[0, x] for x in draws])
        distributions = np.broadcast_to(q if claimed is None else claimed, (width, 2, len(q)))

        def run(dice, beam=beam, distributions=distributions):
            judge = rejection_judge(beam, distributions, lambda m, c: p, dice, replacement)
            return judge(0, 0, np.arange(width))

        for token, probability in outcomes(run):
            total[token] += chance * probability
    return total


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_node_gives_each_token_with_the_models_probability(width, replacement, unchecked):
    for p, q in itertools.product(np.array(P), np.array(Q)):
        width_ = width if replacement else min(width, int((q > 0).sum()))
        np.testing.assert_allclose(one_node(p, q, width_, replacement), p, atol=1e-9)


def trees(q, widths, replacement):
    """Each beam of two drawn columns after a certain token, and its probability.

    Without replacement: the draws of every node are ordered; a node's leaves lie together.
    """
    first, second = widths
    for draws, chance in draws_and_chances(q[()], first, replacement):
        ways = [list(draws_and_chances(q[(x,)], second, replacement)) for x in draws]
        for pick in itertools.product(*ways):
            rows = [[9, x, y] for x, (ys, _) in zip(draws, pick, strict=True) for y in ys]
            yield np.array(rows), chance * float(np.prod([c for _, c in pick]))


def whole_walk(p, q, widths, replacement, n, claimed=None):
    """The distribution of three tokens: a drawn tree's, then the model's."""
    claimed = claimed or q
    total = np.zeros((n, n, n))
    for beam, chance in trees(q, widths, replacement):
        distributions = np.zeros((*beam.shape, n))
        distributions[:, 1] = claimed[()]
        for m, row in enumerate(beam.tolist()):
            distributions[m, 2] = claimed[(row[1],)]

        def run(dice, beam=beam, distributions=distributions):
            model = lambda i, c: p[tuple(beam[i, 1 : c + 1].tolist())]  # noqa: E731
            judge = rejection_judge(beam, distributions, model, dice, replacement)
            tokens = descend(beam, np.full(len(beam), 3), judge)[2]
            while len(tokens) < 3:
                tokens.append(dice.pick(p[tuple(tokens)]))
            return tuple(tokens)

        for tokens, probability in outcomes(run):
            total[tokens] += chance * probability
    return total


def tables(seed, n, zeros):
    """Random probabilities after each path of up to two tokens."""
    rng = np.random.default_rng(seed)
    table = {}
    for path in [(), *itertools.product(range(n)), *itertools.product(range(n), repeat=2)]:
        p = rng.dirichlet(np.full(n, 0.5))
        if zeros:
            p[rng.integers(n)] = 0
        table[path] = p / p.sum()
    return table


CASES = [((2, 1), True), ((2, 1), False), ((2, 2), False), ((1, 2), False)]


@pytest.mark.parametrize("widths, replacement", CASES)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_tree_gives_each_text_with_the_models_probability(widths, replacement, zeros, unchecked):
    p, q = tables(0, 3, zeros), tables(100, 3, zeros)
    want = np.zeros((3, 3, 3))
    for s in np.ndindex(want.shape):
        want[s] = p[()][s[0]] * p[s[:1]][s[1]] * p[s[:2]][s[2]]
    got = whole_walk(p, q, widths, replacement, 3)
    np.testing.assert_allclose(got, want, atol=1e-9)


def with_q_of_1(p, q, draws, replacement=False):
    return np.minimum(1, p[draws] / 1), p


def without_the_residual(p, q, draws, replacement=False):
    return rejection(p, q, draws, replacement)[0], p


def with_the_most_likely(p, q, draws, replacement=False):
    return rejection(p, q, draws, replacement)[0], np.eye(len(p))[p.argmax()]


def as_if_independent(p, q, draws, replacement=False):
    return rejection(p, q, draws, not replacement)


@pytest.mark.parametrize(
    "mistake", [with_q_of_1, without_the_residual, with_the_most_likely, as_if_independent]
)
def test_mistakes_are_seen(mistake, monkeypatch, unchecked):
    """The classic ones change the distribution by far more than the tests allow."""
    p, q = np.array([0.35, 0.25, 0.1, 0.3]), np.array([0.3, 0.1, 0.5, 0.1])
    np.testing.assert_allclose(one_node(p, q, 2, False), p, atol=1e-9)
    monkeypatch.setattr(reject, "rejection", mistake)
    assert np.abs(one_node(p, q, 2, False) - p).max() > 0.01


def test_wrong_claims_are_seen(unchecked):
    """Draws are not from what their draft says they are from."""
    p, q = np.array(P[0]), np.array(Q[1])
    assert np.abs(one_node(p, q, 2, False, claimed=np.ones(4) / 4) - p).max() > 0.05
    tree_p, tree_q = tables(0, 3, False), tables(100, 3, False)
    wrong = {path: np.full(3, 1 / 3) for path in tree_q}
    right = whole_walk(tree_p, tree_q, (2, 1), True, 3)
    assert np.abs(whole_walk(tree_p, tree_q, (2, 1), True, 3, claimed=wrong) - right).max() > 0.01


def test_duplicates_are_not_draws_without_replacement(unchecked):
    """Candidates that share a token, drawn once, must not be thrown for twice."""
    p, q = np.array(P[1]), np.array(Q[1])
    total = np.zeros(4)
    for draws, chance in draws_and_chances(q, 2, False):
        beam = np.array([[0, x] for x in draws for _ in range(2)])  # two leaves below each
        distributions = np.broadcast_to(q, (4, 2, 4))

        def run(dice, beam=beam, distributions=distributions):
            judge = rejection_judge(beam, distributions, lambda m, c: p, dice, False)
            return judge(0, 0, np.arange(4))

        for token, probability in outcomes(run):
            total[token] += chance * probability
    np.testing.assert_allclose(total, p, atol=1e-9)


def test_a_draw_that_cannot_have_been_one():
    """q gives it probability 0: it is never accepted, and the text is the model's all the same."""
    p, q = np.array(P[3]), np.array([0.5, 0.5, 0.0, 0.0])
    chances, rest = rejection(p, q, np.array([2]))
    assert chances.tolist() == [0.0]
    np.testing.assert_allclose(rest, p)


def test_dice_have_the_probabilities_they_say():
    dice = KeyDice(jax.random.key(0))
    p = np.array([0.0, 0.2, 0.0, 0.8, 0.0])
    drawn = np.bincount([dice.pick(p) for _ in range(20_000)], minlength=5) / 20_000
    np.testing.assert_allclose(drawn, p, atol=0.01)
    assert drawn[[0, 2, 4]].sum() == 0
    assert np.mean([dice.happens(0.3) for _ in range(20_000)]) == pytest.approx(0.3, abs=0.01)
    assert not dice.happens(0.0) and dice.happens(1.0)
    again = [KeyDice(jax.random.key(1)).pick(np.full(99, 1 / 99)) for _ in range(2)]
    assert again[0] == again[1]
