"""Rows as prefix trees in depth-first order: against a plain trie, and against walking up."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_trie import plain_mask, plain_trie

from labs.training import interval_mask, pack_rows
from treeattn import ancestor_mask, pack

tokens = st.integers(0, 3)
some_rows = st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=12)


def depth_first_trie(rows):
    """(tokens, parents, offsets, ends, paths), by recursion over rows that share a prefix."""
    nodes = []
    paths = [[] for _ in rows]

    def visit(numbers, depth, parent):
        for token in sorted({rows[number][depth] for number in numbers}):
            node = len(nodes)
            here = [number for number in numbers if rows[number][depth] == token]
            nodes.append([token, parent, depth, None])
            for number in here:
                paths[number].append(node)
            visit([number for number in here if len(rows[number]) > depth + 1], depth + 1, node)
            nodes[node][3] = len(nodes)

    visit(range(len(rows)), 0, -1)
    return *([node[field] for node in nodes] for field in range(4)), paths


@given(some_rows)
def test_one_tree(rows):
    trees = pack_rows(rows)
    assert len(trees) == (1 if rows else 0)
    for tree in trees:
        found_tokens, parents, offsets, ends, paths = depth_first_trie(rows)
        np.testing.assert_array_equal(tree.tokens, found_tokens)
        np.testing.assert_array_equal(tree.positions, offsets)
        np.testing.assert_array_equal(tree.ends, ends)
        np.testing.assert_array_equal(tree.rows, range(len(rows)))
        for line, path in zip(tree.row_map, paths, strict=True):
            np.testing.assert_array_equal(line, path + [-1] * (len(line) - len(path)))
        assert tree.row_map.shape[1] == max(map(len, rows))
        assert tree.row_tokens == sum(map(len, rows))
        # The two integers say what walking up says.
        np.testing.assert_array_equal(interval_mask(tree.ends), plain_mask(parents))
        np.testing.assert_array_equal(interval_mask(tree.ends), ancestor_mask(np.array(parents)))


@given(some_rows, st.integers(6, 20))
def test_trees_of_a_bounded_number_of_tokens(rows, max_tokens):
    trees = pack_rows(rows, max_tokens=max_tokens)
    assert sorted(n for tree in trees for n in tree.rows.tolist()) == list(range(len(rows)))
    for tree in trees:
        mine = [rows[number] for number in tree.rows]
        assert len(tree.tokens) <= max_tokens
        (alone,) = pack_rows(mine)
        for field in "tokens", "positions", "ends", "row_map":
            np.testing.assert_array_equal(getattr(tree, field), getattr(alone, field))
        for row, line in zip(mine, tree.row_map, strict=True):
            np.testing.assert_array_equal(tree.tokens[line[line >= 0]], row)


def test_a_group_that_fits_is_not_cut():
    """Two prompts of 90 tokens with 5 answers of 10 each: 140 nodes a prompt, in a tree each."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 100, (2, 90))
    prompts[:, 0] = [1, 2]
    answers = rng.permutation(500).reshape(2, 5, 50)[..., :10]
    rows = [np.concatenate([prompts[i % 2], answers[i % 2, i // 2]]) for i in range(10)]
    small = pack_rows(rows, max_tokens=140)
    assert [len(tree.tokens) for tree in small] == [140, 140]
    assert [tree.rows.tolist() for tree in small] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert [len(tree.tokens) for tree in pack_rows(rows, max_tokens=280)] == [280]
    # Cut once more, the prompt is computed once more: 90 + 40, and 90 + 10; 100 fit with nothing.
    assert [len(tree.tokens) for tree in pack_rows(rows, max_tokens=130)] == [130, 130, 100, 100]
    # The two short runs share a tree as soon as there is room for both.
    assert [len(tree.tokens) for tree in pack_rows(rows[:9], max_tokens=139)] == [130, 130, 100]


def test_the_order_of_rows_changes_nothing():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, rng.integers(1, 9)) for _ in range(50)]
    shuffled = rng.permutation(50)
    (tree,) = pack_rows(rows)
    (other,) = pack_rows([rows[number] for number in shuffled])
    np.testing.assert_array_equal(tree.tokens, other.tokens)
    np.testing.assert_array_equal(tree.ends, other.ends)
    np.testing.assert_array_equal(tree.row_map[shuffled], other.row_map)


def test_in_another_order_a_subtree_is_no_interval():
    """Breadth first, or as `pack` numbers candidates that begin alike and stand apart."""
    rows = [[1, 2], [3, 4], [1, 5]]
    packed = pack(np.array([rows]))
    mask = np.array(packed.attention_mask[0])
    first_and_last = [(row.nonzero()[0].min(), row.nonzero()[0].max()) for row in mask.T]
    counted = mask.sum(axis=0)
    assert [last - first + 1 for first, last in first_and_last] != counted.tolist()  # node 0: 0 … 4
    _, parents, *_ = plain_trie(sorted(rows))  # neighbours: `pack` is depth first, too
    (tree,) = pack_rows(rows)
    np.testing.assert_array_equal(plain_mask(parents), interval_mask(tree.ends))
    np.testing.assert_array_equal(
        pack(np.array([sorted(rows)])).attention_mask[0], interval_mask(tree.ends)
    )


def test_rows_of_any_kind():
    expected = pack_rows([[1, 2], [1, 3, 4]])[0]
    for rows in (
        (np.array([1, 2], np.uint16), np.array([1, 3, 4])),
        [jnp.array([1, 2]), [1, 3, 4]],
        ((1, 2), [np.int64(1), 3, 4]),
    ):
        for a, b in zip(pack_rows(rows)[0], expected, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == np.int32
    assert pack_rows([]) == [] and pack_rows([], max_tokens=3) == []
    assert interval_mask(np.zeros(0, np.int32)).shape == (0, 0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "rows,options,error,named",
    [
        ([[1], []], {}, ValueError, r"rows\[1\]: expected at least one token"),
        ([[1.5]], {}, TypeError, r"rows\[0\]: expected integers"),
        ([[True]], {}, TypeError, r"rows\[0\]"),
        ([[[1]]], {}, ValueError, r"rows\[0\]: expected one axis"),
        ([3], {}, ValueError, r"rows\[0\]: expected one axis"),
        ([[1, -1]], {}, ValueError, r"rows\[0\]: expected ids from 0"),
        ([[2**31]], {}, ValueError, r"rows\[0\]: expected ids"),
        ([[1], [1, 2, 3]], {"max_tokens": 2}, ValueError, r"rows\[1\]: .* max_tokens = 2 .* got 3"),
        ([[1]], {"max_tokens": 0}, ValueError, "max_tokens"),
    ],
)
def test_wrong_rows(rows, options, error, named):
    with pytest.raises(error, match=named):
        pack_rows(rows, **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "ends,error",
    [
        ([1.0], TypeError),
        ([0], ValueError),  # before its node
        ([2], ValueError),  # after the last
        ([2, 3, 3], ValueError),  # neither within one another nor apart
        ([4, 3, 4, 4], ValueError),
    ],
)
def test_ends_that_are_no_depth_first_order(ends, error):
    with pytest.raises(error, match="ends: expected"):
        interval_mask(np.array(ends))
