"""Drafts: what they propose, against plain ways to compute it."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import Llama, TokenTree, expand_tree
from treeattn_llama.speculation import (
    DrawnDraft,
    LlamaDraft,
    NGramDraft,
    RecyclingDraft,
    Seen,
    SuffixDraft,
    candidate_lengths,
    draft_candidate_tokens,
    first_layers,
)
from treeattn_llama.speculation.candidates import ranked
from treeattn_llama.speculation.lookup import SuffixTree

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


@pytest.fixture(scope="module")
def model():
    return Llama.load(SMALL, dtype=jnp.float64)


def candidates(draft, **options):
    """Each text's candidates as {path: log-probability of the whole path}, prefixes included."""
    beam, scores = draft_candidate_tokens(draft, **options)
    found = []
    for rows, logs, lengths in zip(beam, scores, candidate_lengths(scores), strict=True):
        paths = {}
        for row, log, length in zip(rows.tolist(), logs, lengths, strict=True):
            for n in range(1, length + 1):
                paths[tuple(row[:n])] = float(log[:n].sum())
        found.append(paths)
    return found


# From trees and beams to candidates


def random_tree(rng, nodes, batch=2):
    parents = np.array([[rng.integers(-1, i) if i else -1 for i in range(nodes)]] * batch)
    tokens = np.arange(nodes) + 10 * np.arange(1, batch + 1)[:, None]
    sizes = rng.integers(1, nodes + 1, batch)
    tree = TokenTree(*(x.astype(np.int32) for x in (tokens, parents, sizes)))
    return tree, np.log(rng.uniform(0.1, 1, tokens.shape))


def paths_of(tree, scores):
    found = []
    for tokens, parents, n, log in zip(*tree, scores, strict=True):
        paths = {-1: ((), 0.0)}
        for i in range(n):
            path, total = paths[int(parents[i])]
            paths[i] = (*path, int(tokens[i])), total + log[i]
        found.append(dict(list(paths.values())[1:]))
    return found


class Proposing:
    def __init__(self, *found):
        self.found = found

    def observe(self, texts, seen=None):
        pass

    def propose(self, budget):
        return self.found


@pytest.mark.parametrize("seed", range(10))
def test_the_most_probable_nodes_of_a_tree(seed):
    tree, scores = random_tree(np.random.default_rng(seed), 9)
    whole = paths_of(tree, scores)
    for budget in (1, 4, 9, 20):
        got = candidates(Proposing(tree, scores), budget=budget)
        for paths, want in zip(got, whole, strict=True):
            best = sorted(want, key=want.get, reverse=True)[:budget]
            assert paths == pytest.approx({path: want[path] for path in best})
    # The same as a beam.
    beam, log = draft_candidate_tokens(Proposing(tree, scores), budget=20)
    again = candidates(Proposing(beam, log), budget=20)
    assert all(a == pytest.approx(b) for a, b in zip(again, whole, strict=True))
    chances = ranked(beam, log)[1]
    for found, want in zip(chances, whole, strict=True):
        assert found[: len(want)] == pytest.approx(np.exp(sorted(want.values(), reverse=True)))


def test_a_certain_token_comes_first():
    tree, scores = random_tree(np.random.default_rng(0), 5)
    without = draft_candidate_tokens(Proposing(tree, scores))
    beam, log = draft_candidate_tokens(Proposing(tree, scores), certain=np.array([7, 8]))
    np.testing.assert_array_equal(beam[:, :, 1:], without[0])
    np.testing.assert_array_equal(log[:, :, 1:], without[1])
    assert beam[0, 0, 0] == 7 and beam[1, 0, 0] == 8 and (log[:, 0, 0] == 0).all()
    real = (without[1] > -np.inf).any(axis=2)
    real[:, 0] = True
    np.testing.assert_array_equal(log[..., 0] == 0, real)
    empty = Proposing(np.zeros((2, 0, 0), np.int32), np.zeros((2, 0, 0)))
    beam, log = draft_candidate_tokens(empty, certain=np.array([7, 8]))
    assert beam.tolist() == [[[7]], [[8]]] and log.tolist() == [[[0.0]], [[0.0]]]


def test_bad_arguments(unchecked):
    tree, scores = random_tree(np.random.default_rng(0), 5)
    draft = Proposing(tree, scores)
    with pytest.raises(ValueError, match=r"certain: expected shape \(2,\), one a text, got \(3,\)"):
        draft_candidate_tokens(draft, certain=np.zeros(3, int))
    with pytest.raises(ValueError, match="beam: expected tokens from 0 to 9, got 10"):
        draft_candidate_tokens(draft, vocabulary=10)
    with pytest.raises(TypeError, match="scores: expected a floating-point array"):
        draft_candidate_tokens(Proposing(tree, np.zeros((2, 5), int)))


# Suffix decoding


def repeating(seed, n=120, letters=4):
    """A text in which pieces come again."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, letters, 20).tolist()
    while len(text) < n:
        start = rng.integers(0, len(text) - 8)
        text += text[start : start + rng.integers(3, 8)] + rng.integers(0, letters, 2).tolist()
    return text[:n]


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_tree_counts_what_followed(seed):
    text, depth = repeating(seed), 6
    tree = SuffixTree(depth)
    for token in text:
        tree.add(token)
    for order, node in enumerate(tree.suffixes()):
        suffix = text[len(text) - order :]
        follow = [
            text[i + order] for i in range(len(text) - order) if text[i : i + order] == suffix
        ]
        assert {t: child.count for t, child in node.children.items()} == {
            t: follow.count(t) for t in follow
        }
    longest = max(
        n
        for n in range(depth)
        if any(text[i : i + n] == text[len(text) - n :] for i in range(len(text) - n))
    )
    assert len(tree.suffixes()) == longest + 1


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_drafts_probabilities_are_probabilities(seed):
    tree = SuffixTree(8)
    for token in repeating(seed):
        tree.add(token)
    found = list(tree.continuations(tree.suffixes()))
    tokens, chances = zip(*found, strict=True)
    assert len(set(tokens)) == len(tokens)
    assert 0 < min(chances) and sum(chances) <= 1 + 1e-12
    # A path's state is what the tree has after reading the path.
    state = tree.after(tree.suffixes(), tokens[0])
    text = [*tree.tokens, tokens[0]]
    for order, node in enumerate(state):
        if order:
            suffix = text[len(text) - order :]
            follow = [
                text[i + order]
                for i in range(len(tree.tokens) - order)
                if text[i : i + order] == suffix
            ]
            assert {t: c.count for t, c in node.children.items()} == {
                t: follow.count(t) for t in follow
            }


@pytest.mark.parametrize("seed", range(5))
def test_a_suffix_tree_that_is_read_while_it_grows(seed):
    """Reading writes out what a sequence that occurred once is followed by: it changes nothing."""
    rng = np.random.default_rng(seed)
    read, unread = SuffixTree(6), SuffixTree(6)
    for token in repeating(seed):
        read.add(token)
        unread.add(token)
        suffixes = read.suffixes()
        for guess in rng.integers(0, 4, 5).tolist():
            list(read.continuations(suffixes))
            suffixes = read.after(suffixes, guess)
    found = list(read.continuations(read.suffixes()))
    assert found == list(unread.continuations(unread.suffixes()))


def test_a_suffix_tree_writes_out_only_what_came_again():
    def size(tree, node):
        return 1 + sum(size(tree, child) for child in (node.children or {}).values())

    tree = SuffixTree(25)
    for token in range(500):
        tree.add(token)
    assert size(tree, tree.root) == 501
    tree.add(0)  # followed once, by 1
    assert size(tree, tree.root) == 502


@pytest.mark.slow
def test_the_suffix_draft_is_calibrated():
    """Over many texts, tokens that it gives 80 % come about as often."""
    hopes, times = [], []
    for seed in range(6):
        text, draft = repeating(seed, 160, letters=12), SuffixDraft()
        for n in range(60, 160):
            draft.observe([text[:n]])
            for path, log in candidates(draft, budget=8)[0].items():
                if len(path) == 1:
                    hopes.append(np.exp(log))
                    times.append(path[0] == text[n])
    hopes, times = np.array(hopes), np.array(times)
    for low, high in ((0.05, 0.3), (0.3, 0.6), (0.6, 0.85)):
        among = (hopes >= low) & (hopes < high)
        assert among.sum() > 30
        assert times[among].mean() == pytest.approx(hopes[among].mean(), abs=0.12)


def test_the_suffix_draft_proposes_what_is_to_come():
    period = [5, 9, 2, 7, 1, 1, 3]
    draft = SuffixDraft()
    draft.observe([period * 4, [1, 2, 3]])
    beam, scores = draft_candidate_tokens(draft, budget=7)
    lengths = candidate_lengths(scores)
    assert beam[0, lengths[0].argmax(), : lengths[0].max()].tolist() == period[: lengths[0].max()]
    assert lengths[0].max() >= 5 and lengths[1].max() == 0


def test_drafts_follow_texts_and_notice_new_ones():
    draft, fresh = SuffixDraft(), SuffixDraft()
    for text in (repeating(0)[:50], repeating(0)[:60], repeating(1)[:60], repeating(1)[:40]):
        fresh = SuffixDraft()
        fresh.observe([text])
        draft.observe([text])
        if text == repeating(0)[:50]:
            first = candidates(draft)
        assert candidates(draft)[0].keys() == candidates(fresh)[0].keys()
    draft.observe([repeating(0)[:50], repeating(2)])
    assert candidates(draft)[0].keys() == first[0].keys() and len(candidates(draft)) == 2


# Prompt lookup


@pytest.mark.parametrize("seed", range(5))
def test_prompt_lookup_copies_what_followed_the_latest_occurrences(seed):
    text = repeating(seed, letters=8)
    draft = NGramDraft(longest=3, length=5, rows=2)
    draft.observe([text])
    beam, scores = draft.propose(100)
    for n in (3, 2, 1):
        ends = [i + n for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :]]
        if ends:
            break
    want = [text[end : end + 5] for end in ends[::-1][:2]]
    lengths = candidate_lengths(scores)[0]
    got = [row[:length].tolist() for row, length in zip(beam[0], lengths, strict=True) if length]
    assert got == want


def test_prompt_lookup_without_an_occurrence():
    draft = NGramDraft()
    draft.observe([[1, 2, 3], [4]])
    assert candidate_lengths(draft.propose(9)[1]).max() == 0


# Token recycling


def test_recycling_proposes_what_the_model_thought_last():
    draft = RecyclingDraft(likely=2, depth=3)
    draft.observe([[7, 1]])
    assert candidates(draft) == [{}]
    tokens = np.array([[1, 2, 3, 0]], np.int32)
    real = np.array([[True, True, True, False]])
    likely = np.array([[[2, 3], [3, 4], [1, 2], [9, 9]]], np.int32)
    draft.observe([[7, 1]], Seen(tokens, real, likely))
    paths = set(candidates(draft, budget=100)[0])
    after = {1: (2, 3), 2: (3, 4), 3: (1, 2)}
    want, frontier = set(), [(1,)]
    for _ in range(3):
        frontier = [(*p, t) for p in frontier for t in after.get(p[-1], ())]
        want |= {p[1:] for p in frontier}
    assert paths == want
    # What was thought first turns out likeliest again and again: its probability grows.
    before = candidates(draft)[0][(2,)]
    for _ in range(10):
        draft.observe([[7, 1]], Seen(tokens, real, likely))
    assert candidates(draft)[0][(2,)] > before


# Models


def log_probs(model, text):
    """`expand_tree`'s draft: full passes after `text`."""

    def after(paths):
        rows = np.zeros((9, 16), int)  # one shape
        for row, path in zip(rows, paths[0].tolist(), strict=False):
            row[: len(text) + len(path)] = [*text, *path]
        logits = model.logits(rows)[: paths.shape[1], len(text) + paths.shape[2] - 1]
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))[None]

    return after


@pytest.mark.slow
@pytest.mark.parametrize("depth, width", [(3, 3)])
def test_beam_search_by_a_model(model, depth, width):
    """Against `expand_tree` with full passes, as the texts grow by one or several tokens."""
    draft = LlamaDraft(model, depth=depth, width=width)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    for more in ([], [8], [2, 8, 1]):
        texts = [text + more for text in texts]
        draft.observe(texts)
        got = candidates(draft, budget=9)
        for text, paths in zip(texts, got, strict=True):
            tree, scores = expand_tree(log_probs(model, text), depth=depth, width=width, budget=9)
            nodes = paths_of(tree, np.zeros(scores.shape))[0]
            want = dict(zip(nodes, scores[0].tolist(), strict=True))
            assert paths.keys() == want.keys()
            assert [paths[p] for p in want] == pytest.approx(list(want.values()), abs=1e-9)


def test_the_first_layers(model):
    """Of a model of one layer all are first; of two, the logits are those of a shorter model."""
    one = first_layers(model, 1)
    assert one.config.layers == 1 and len(one.weights.layers) == 1
    assert one.weights.embedding is model.weights.embedding
    ids = np.array([[3, 1, 4]])
    np.testing.assert_array_equal(first_layers(model, 2).logits(ids), model.logits(ids))
    assert np.abs(one.logits(ids) - model.logits(ids)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("widths, replacement", [((3, 2), False), ((3, 1), True)])
def test_drawn_candidates_are_drawn_from_what_they_say(model, widths, replacement):
    draft = DrawnDraft(model, widths=widths, temperature=0.5, replacement=replacement)
    draft.begin(jax.random.key(0))
    text = [3, 1, 4]
    draft.observe([text, [2, 7, 1, 8]])
    beam, scores, distributions, *_ = draft.propose(100)
    rows = int(np.prod(widths))
    assert beam.shape == scores.shape == (2, rows, 2) and distributions.shape == (2, rows, 2, 96)
    np.testing.assert_allclose(distributions.sum(-1), 1)
    for m, (a, b) in enumerate(beam[0].tolist()):
        q = np.asarray(jax.nn.softmax(model.logits(np.array([text]))[0, -1] / 0.5))
        np.testing.assert_allclose(distributions[0, m, 0], q, atol=1e-9)
        q = np.asarray(jax.nn.softmax(model.logits(np.array([[*text, a]]))[0, -1] / 0.5))
        np.testing.assert_allclose(distributions[0, m, 1], q, atol=1e-9)
        assert scores[0, m, 1] == pytest.approx(np.log(q[b]))
    if not replacement:  # siblings differ
        assert all(len(set(map(tuple, rows))) == len(rows) for rows in beam.tolist())
    counts = np.zeros(96)
    for _ in range(300):
        counts += np.bincount(draft.propose(100).beam[0, :1, 0], minlength=96)
    q = distributions[0, 0, 0]
    np.testing.assert_allclose(counts / 300, q, atol=4 * np.sqrt(0.25 / 300))
    assert draft._widths(0) == () and draft._widths(100) == widths


def test_draws_without_replacement_come_in_order(model):
    """The second of two draws has q's probabilities without the first."""
    draft = DrawnDraft(model, widths=(2,))
    draft.begin(jax.random.key(0))
    q = np.array([0.5, 0.3, 0.2, 0.0])
    seen = np.zeros((4, 4))
    tokens, logs = draft._draw_children(np.broadcast_to(q, (1, 20_000, 4)), 2)
    for a, b in tokens[0]:
        seen[a, b] += 1 / 20_000
    for a, b in itertools.permutations(range(4), 2):
        assert seen[a, b] == pytest.approx(q[a] * q[b] / (1 - q[a]), abs=0.02)
    tokens, logs = draft._draw_children(np.array([[[1.0, 0, 0, 0]]]), 6)  # one is possible
    assert tokens[0, 0, 0] == 0 and logs[0, 0].tolist() == [0.0] + [-np.inf] * 5
