"""Draft trees: fixed choices against a published tree, expansion against brute force."""

import itertools

import jax
import numpy as np
import pytest
from plain_trie import plain_mask

from treeattn import beam_from_tree, beam_search, choice_tree, expand_tree, pack, pack_tree, unpack

# A short list in the style of Medusa's: two heads' best tokens, and a third below the best.
CHOICES = [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 1)]
CANDIDATES = np.arange(2 * 3 * 3).reshape(2, 3, 3) + 100  # (batch, heads, top)


def test_choices_without_a_root():
    tree = choice_tree(CHOICES, CANDIDATES)
    # (0) (1) (2) (0,0) (0,1) (1,0) (0,0,0) (0,0,1)
    np.testing.assert_array_equal(tree.parents[0], [-1, -1, -1, 0, 0, 1, 3, 3])
    np.testing.assert_array_equal(tree.tokens[0], [100, 101, 102, 103, 104, 103, 106, 107])
    np.testing.assert_array_equal(tree.tokens[1], tree.tokens[0] + 9)
    np.testing.assert_array_equal(tree.parents[1], tree.parents[0])


def test_choices_below_a_root():
    """Four tensors, as Medusa's buffers have them: the root is node 0 and every path's start."""
    packed = pack_tree(choice_tree(CHOICES, CANDIDATES, root=np.array([7, 8])))
    np.testing.assert_array_equal(
        packed.packed_beam[1], [8, 109, 110, 111, 112, 113, 112, 115, 116]
    )
    np.testing.assert_array_equal(packed.position_offsets[0], [0, 1, 1, 1, 2, 2, 2, 3, 3])
    np.testing.assert_array_equal(packed.unpack_map[0, :, 0], [0, 0, 0, 0, 0])
    paths = unpack(packed.packed_beam, packed.unpack_map)[0].tolist()
    assert paths == [
        [7, 102, 7, 7],  # beyond a path's end: node 0
        [7, 100, 104, 7],
        [7, 101, 103, 7],
        [7, 100, 103, 106],
        [7, 100, 103, 107],
    ]
    for b in range(2):
        np.testing.assert_array_equal(
            packed.attention_mask[b], plain_mask([-1, 0, 0, 0, 1, 1, 2, 4, 4])
        )


def test_choices_inside_jit():
    run = jax.jit(lambda c, r: pack_tree(choice_tree(CHOICES, c, root=r)))
    root = np.array([7, 8])
    outside = pack_tree(choice_tree(CHOICES, CANDIDATES, root=root))
    for a, b in zip(run(CANDIDATES, root), outside, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_root_keeps_its_value():
    """However narrow the candidates' dtype."""
    tree = choice_tree([(0,)], CANDIDATES.astype(np.int16), root=np.array([70000, 8]))
    assert tree.tokens[:, 0].tolist() == [70000, 8]


@pytest.mark.usefixtures("unchecked")
def test_lists_are_arrays():
    tree = choice_tree(CHOICES, CANDIDATES.tolist(), root=[7, 8])
    for came, expected in zip(
        tree, choice_tree(CHOICES, CANDIDATES, root=np.array([7, 8])), strict=True
    ):
        np.testing.assert_array_equal(came, expected)


@pytest.mark.parametrize("seed", range(3))
def test_choices_pack_as_their_beam(seed):
    """A head's tokens differ, so the tree's candidates packed as a beam are the same tree."""
    rng = np.random.default_rng(seed)
    full = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    chosen = {p[:d] for p in rng.permutation(len(full))[:6] for p in [full[p]] for d in (1, 2, 3)}
    tree = choice_tree(list(chosen), CANDIDATES)
    own, beam = pack_tree(tree), pack(*beam_from_tree(tree))
    assert own.packed_beam.shape == beam.packed_beam.shape
    where = {}  # the tree's node -> the beam's node
    _, lengths = beam_from_tree(tree)
    for m, end in enumerate(lengths[0]):
        for c in range(end):
            where[int(own.unpack_map[0, m, c])] = int(beam.unpack_map[0, m, c])
    order = [where[i] for i in range(len(where))]
    assert sorted(order) == list(range(tree.parents.shape[1]))
    np.testing.assert_array_equal(beam.packed_beam[:, order], own.packed_beam)
    np.testing.assert_array_equal(beam.position_offsets[:, order], own.position_offsets)
    np.testing.assert_array_equal(beam.attention_mask[:, order][:, :, order], own.attention_mask)


def random_draft(seed, letters):
    """log p(next | path) for any path, from a seeded table; the same for every call."""
    table = {}

    def log_probs(path):
        if path not in table:
            rng = np.random.default_rng([seed, *path])
            table[path] = np.log(rng.dirichlet(np.full(letters, 0.4)))
        return table[path]

    def batched(paths):
        assert paths.dtype == np.int32
        return np.array(
            [[log_probs((b, *path)) for path in rows] for b, rows in enumerate(paths.tolist())]
        )

    return log_probs, batched


@pytest.mark.parametrize("letters,depth,budget", [(3, 4, 10), (4, 3, 84), (2, 5, 17), (3, 1, 2)])
def test_expansion_is_the_best_of_all_paths(letters, depth, budget):
    """With a width of the budget: the most probable paths of all, found one by one."""
    log_probs, draft = random_draft(budget, letters)
    tree, scores = expand_tree(draft, depth=depth, width=budget, budget=budget, batch=2)
    for b in range(2):
        total = {(): 0.0}
        for path in (
            p for d in range(1, depth + 1) for p in itertools.product(range(letters), repeat=d)
        ):
            total[path] = total[path[:-1]] + log_probs((b, *path[:-1]))[path[-1]]
        del total[()]
        best = sorted(total, key=total.get, reverse=True)[:budget]
        nodes = []
        for token, up in zip(tree.tokens[b].tolist(), tree.parents[b].tolist(), strict=True):
            nodes.append((nodes[up] if up >= 0 else ()) + (token,))
        assert nodes == best
        np.testing.assert_allclose(scores[b], [total[p] for p in best], rtol=1e-12)
    assert (tree.sizes == len(best)).all()


def test_beam_search():
    """Wide enough: all sequences, in order; else the best of the best prefixes."""
    log_probs, draft = random_draft(9, 3)
    every = list(itertools.product(range(3), repeat=3))
    for b, (beam, scores) in enumerate(
        zip(*beam_search(draft, width=99, length=3, batch=2), strict=True)
    ):
        total = {p: sum(log_probs((b, *p[:i]))[p[i]] for i in range(3)) for p in every}
        best = sorted(total, key=total.get, reverse=True)
        assert [tuple(row) for row in beam.tolist()] == best
        np.testing.assert_allclose(scores, [total[p] for p in best], rtol=1e-12)
    kept = [((), 0.0)]
    for _ in range(3):
        longer = [((*p, t), s + log_probs((0, *p))[t]) for p, s in kept for t in range(3)]
        kept = sorted(longer, key=lambda item: -item[1])[:4]
    beam, scores = beam_search(draft, width=4, length=3)
    assert [tuple(row) for row in beam[0].tolist()] == [p for p, _ in kept]
    np.testing.assert_allclose(scores[0], [s for _, s in kept], rtol=1e-12)


def test_token_scores_add_up_to_the_beams():
    """A score for each token (B, M, C): unpacked log-probabilities, shifted by one, from what
    follows the context. Every node is asked once, and the sums are the search's own scores."""
    log_probs, draft = random_draft(11, 4)
    beam, scores = beam_search(draft, width=6, length=3, batch=2)
    packed = pack(beam)
    nodes = np.zeros((*packed.packed_beam.shape, 4))  # what a model says after each node
    for b, m, c in np.ndindex(beam.shape):
        nodes[b, packed.unpack_map[b, m, c]] = log_probs((b, *beam[b, m, : c + 1].tolist()))
    after = unpack(nodes, packed.unpack_map)  # (B, M, C, V)
    context = np.stack([log_probs((b,)) for b in range(2)])[:, None, None]
    before = np.concatenate([np.broadcast_to(context, after[:, :, :1].shape), after[:, :, :-1]], 2)
    token_scores = np.take_along_axis(before, beam[..., None], axis=3)[..., 0]
    assert token_scores.shape == beam.shape and packed.packed_beam.size < beam.size
    np.testing.assert_allclose(token_scores.sum(axis=2), scores, rtol=1e-12)
    unshifted = np.take_along_axis(after, beam[..., None], axis=3)[..., 0]
    assert not np.allclose(unshifted.sum(axis=2), scores)


def test_expansion_stops_at_its_width():
    """Two nodes of each depth are expanded, into two tokens each."""
    log_probs, draft = random_draft(3, 6)
    asked = []

    def watched(paths):
        asked.append(paths)
        return draft(paths)

    tree, scores = expand_tree(watched, depth=3, width=2, budget=99)
    assert [a.shape for a in asked] == [(1, 1, 0), (1, 2, 1), (1, 2, 2)]
    assert tree.sizes.tolist() == [2 + 4 + 4]
    assert (np.diff(scores) <= 0).all()
    best = np.argsort(-log_probs((0,)))[:2]
    np.testing.assert_array_equal(asked[1][0, :, 0], best)
    children = {
        (int(t), int(u)): log_probs((0,))[t] + log_probs((0, t))[u]
        for t in best
        for u in np.argsort(-log_probs((0, int(t))))[:2]
    }
    second = sorted(children, key=children.get, reverse=True)[:2]
    assert asked[2][0].tolist() == [list(p) for p in second]


def test_expansion_packs_as_its_beam():
    _, draft = random_draft(4, 5)
    tree, _ = expand_tree(draft, depth=4, width=3, budget=12, batch=3)
    own, beam = pack_tree(tree), pack(*beam_from_tree(tree))
    assert own.packed_beam.shape == beam.packed_beam.shape == (3, 12)
    assert (own.attention_mask.sum((1, 2)) == beam.attention_mask.sum((1, 2))).all()
    np.testing.assert_array_equal(
        np.sort(own.position_offsets, axis=1), np.sort(beam.position_offsets, axis=1)
    )
    _, ends = beam_from_tree(tree)
    real = np.arange(own.unpack_map.shape[2]) < ends[..., None]
    np.testing.assert_array_equal(
        unpack(own.packed_beam, own.unpack_map)[real],
        unpack(beam.packed_beam, beam.unpack_map)[real],
    )


def test_impossible_tokens_are_left_out():
    log_half = np.log(0.5)
    table = np.array([log_half, log_half, -np.inf, -np.inf])
    draft = lambda paths: np.tile(table, (*paths.shape[:2], 1))  # noqa: E731
    tree, scores = expand_tree(draft, depth=2, width=3, budget=9)
    assert tree.sizes.tolist() == [6] and (scores[0, 6:] == -np.inf).all()
    assert set(tree.tokens[0, :6]) == {0, 1}
    packed = pack_tree(tree)
    assert not packed.attention_mask[0, 6:].any()
    paths = unpack(packed.packed_beam, packed.unpack_map)[0].tolist()
    assert sorted(paths) == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call,error,names",
    [
        (lambda: choice_tree([(0,), (0,)], CANDIDATES), ValueError, ["choices", "twice"]),
        (lambda: choice_tree([()], CANDIDATES), ValueError, ["choices", "()"]),
        (lambda: choice_tree([0, 1], CANDIDATES), TypeError, ["choices", "int"]),
        (lambda: choice_tree([(0.5,)], CANDIDATES), TypeError, ["choices", "float"]),
        (lambda: choice_tree([(0, 1)], CANDIDATES), ValueError, ["choices", "(0, 1)", "(0,)"]),
        (lambda: choice_tree([(3,)], CANDIDATES), ValueError, ["choices", "(3,)", "below 3"]),
        (lambda: choice_tree([(-1,)], CANDIDATES), ValueError, ["choices", "(-1,)"]),
        (lambda: choice_tree([(0,) * 4], CANDIDATES), ValueError, ["choices", "1 to 3 ranks"]),
        (lambda: choice_tree([(0,)], CANDIDATES[0]), ValueError, ["candidates", "(3, 3)"]),
        (lambda: choice_tree([(0,)], CANDIDATES / 2), TypeError, ["candidates", "float64"]),
        (
            lambda: choice_tree([(0,)], CANDIDATES, root=np.zeros(3, int)),
            ValueError,
            ["root", "(2,)", "(3,)"],
        ),
        (
            lambda: expand_tree(lambda p: np.zeros((1, 1)), depth=1, width=1, budget=1),
            ValueError,
            ["log_probs", "(1, 1)"],
        ),
        (
            lambda: expand_tree(lambda p: np.full((1, 1, 3), np.nan), depth=1, width=1, budget=1),
            ValueError,
            ["log_probs", "NaN"],
        ),
        (
            lambda: expand_tree(lambda p: np.full((1, 1, 3), 0.3), depth=1, width=1, budget=1),
            ValueError,
            ["log_probs", "above 0"],
        ),
        (lambda: expand_tree(None, depth=0, width=1, budget=1), ValueError, ["depth", "0"]),
        (lambda: expand_tree(None, depth=1, width=0, budget=1), ValueError, ["width", "0"]),
        (lambda: expand_tree(None, depth=1, width=1, budget=-1), ValueError, ["budget", "-1"]),
        (lambda: expand_tree(None, depth=1.5, width=1, budget=1), TypeError, ["depth", "1.5"]),
        (lambda: beam_search(None, width=0, length=1), ValueError, ["width", "0"]),
        (lambda: beam_search(None, width=1, length=0), ValueError, ["length", "0"]),
        (
            lambda: expand_tree(None, depth=1, width=1, budget=1, batch=0),
            ValueError,
            ["batch", "0"],
        ),
    ],
)
def test_bad_arguments(call, error, names):
    with pytest.raises(error) as raised:
        call()
    assert all(name in str(raised.value) for name in names)
