"""Rows as prefix trees in depth-first order: against a plain trie, and against walking up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_trie import plain_trie

from labs.training import interval_mask, pack_rows
from treeattn_conformance.trees import tree_mask

TOKENS = np.iinfo(np.int32).max, 0, 255, 256  # their bytes sort in another order
some_rows = st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=6), max_size=12)


@given(some_rows)
def test_the_tree_of_rows(rows):
    """Sorted rows that begin alike are neighbours, so a plain trie is depth first."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    tokens, parents, depths, paths, _ = plain_trie([rows[i] for i in order])
    tree = pack_rows([np.array(row, np.uint32) if len(row) % 2 else tuple(row) for row in rows])
    assert all(x.dtype == np.int32 for x in tree)
    np.testing.assert_array_equal(tree.tokens, tokens)
    np.testing.assert_array_equal(tree.positions, depths)
    np.testing.assert_array_equal(tree.parents, parents)
    for number, path in zip(order, paths, strict=True):
        line = tree.row_map[number]
        np.testing.assert_array_equal(line, path + [-1] * (len(line) - len(path)))
    assert tree.row_tokens == sum(map(len, rows))
    numbers = np.arange(len(tokens)) + 1
    np.testing.assert_array_equal(tree.unpack(numbers), tree.row_map + 1)
    # The two integers agree with walking up.
    expected = tree_mask(np.array([parents], int))[0]
    np.testing.assert_array_equal(interval_mask(tree.ends), expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pack_rows([[1], []]), ValueError, r"rows\[1\]: expected at least one token"),
        (lambda: pack_rows([[1.5]]), TypeError, r"rows\[0\]: expected integers"),
        (lambda: pack_rows([3]), ValueError, r"rows\[0\]: expected one axis"),
        (lambda: pack_rows([[1, -1]]), ValueError, r"rows\[0\]: expected ids from 0"),
        (lambda: pack_rows([[2**31]]), ValueError, r"rows\[0\]: expected ids"),
        (lambda: pack_rows([[1]]).unpack(np.ones(2)), ValueError, "of_nodes: .* of 1 nodes"),
        (lambda: interval_mask(np.ones(1)), TypeError, "ends: expected integers"),
        (lambda: interval_mask(np.ones((1, 1), int)), ValueError, "ends: expected axes"),
        # Before its node, after the last, neither within one another nor apart.
        *(
            (lambda ends=ends: interval_mask(np.array(ends)), ValueError, "ends: .* depth-first")
            for ends in ([0], [2], [2, 3, 3], [4, 3, 4, 4])
        ),
    ],
)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
