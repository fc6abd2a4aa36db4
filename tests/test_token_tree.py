"""Token trees by parents: against walking up, and against the beams they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_trie import plain_mask, plain_trie

from treeattn import (
    TokenTree,
    ancestor_mask,
    beam_from_tree,
    depths,
    pack,
    pack_tree,
    tree_from_beam,
    unpack,
)
from treeattn.trees.token_tree import leaf_paths


def random_parents(rng, shape, roots=0.2):
    """A forest: each node below an earlier one, or a root."""
    nodes = np.arange(shape[-1])
    parents = rng.integers(0, np.maximum(nodes, 1), shape)
    return np.where((rng.random(shape) < roots) | (nodes == 0), -1, parents)


mask_jit, depths_jit = jax.jit(ancestor_mask), jax.jit(depths)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 9, 33])
def test_mask_and_depths(size):
    rng = np.random.default_rng(size)
    for parents in (
        random_parents(rng, (size,)),
        np.arange(size) - 1,  # a chain, the deepest tree there is
        np.full(size, -1),
        np.minimum(np.arange(size), 1) - 1,  # a root and its children
    ):
        expected = np.array(plain_mask(parents.tolist()), bool).reshape(size, size)
        for do_mask, do_depths in (ancestor_mask, depths), (mask_jit, depths_jit):
            np.testing.assert_array_equal(do_mask(parents), expected)
            np.testing.assert_array_equal(do_depths(parents), expected.sum(axis=1) - 1)


@pytest.mark.parametrize("module,dtype", [(np, "int8"), (np, "int64"), (jnp, "int8")])
def test_mask_of_a_batch(module, dtype):
    parents = random_parents(np.random.default_rng(0), (2, 3, 11)).astype(dtype)
    mask, depth = ancestor_mask(module.asarray(parents)), depths(module.asarray(parents))
    assert mask.shape == (2, 3, 11, 11) and depth.dtype == np.int32
    assert isinstance(mask, np.ndarray if module is np else jax.Array)
    mask, depth = np.asarray(mask), np.asarray(depth)
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(mask[index], plain_mask(parents[index].tolist()))
        np.testing.assert_array_equal(depth[index], mask[index].sum(axis=1) - 1)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 6)),
    ragged=st.booleans(),
)
def test_a_beam_and_its_tree(seed, shape, ragged):
    """The mask is the ancestors' closure; the tree's own beam has the same tree."""
    rng = np.random.default_rng(seed)
    beam = rng.integers(0, 3, shape)
    lengths = rng.integers(0, shape[2] + 1, shape[:2]) if ragged else None
    packed, tree = pack(beam, lengths, pad_token=9), tree_from_beam(beam, lengths)
    for b, (parents, size) in enumerate(zip(tree.parents, tree.sizes, strict=True)):
        plain = plain_trie(beam[b].tolist(), lengths[b].tolist() if ragged else None)
        assert parents.tolist() == plain[1] + [-1] * (len(parents) - size)
    again = pack_tree(tree, pad_token=9)
    for a, b in zip(packed[:3], again[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    # One candidate a leaf: the different candidates, less those that others continue.
    leaves, ends = beam_from_tree(tree)
    for b in range(shape[0]):
        rows = beam[b].tolist() if lengths is None else map(cut, beam[b], lengths[b])
        rows = set(map(tuple, rows))
        rows = {r for r in rows if r and not any(r == o[: len(r)] for o in rows - {r})}
        assert sorted(rows) == sorted(
            cut(r, n) for r, n in zip(leaves[b], ends[b], strict=True) if n
        )
    if not ragged:  # then no candidate continues another, and the numbers stay too
        for a, b in zip(again, pack(leaves, ends, pad_token=9), strict=True):
            np.testing.assert_array_equal(a, b)


def cut(row, length):
    return tuple(row[:length].tolist())


def test_the_documents_arrows():
    """Mars ← is ← a ← red, is ← reddish ← when, is ← dark ← red: each node's parent."""
    mars = np.array([[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 3]]])
    tree = tree_from_beam(mars)
    np.testing.assert_array_equal(tree.tokens[0], [0, 1, 2, 3, 4, 5, 6, 3])
    np.testing.assert_array_equal(tree.parents[0], [-1, 0, 1, 2, 1, 4, 1, 6])
    np.testing.assert_array_equal(beam_from_tree(tree)[0], mars)  # "the exact same prefix tree"


def test_paths_of_a_ragged_batch():
    #   0 ── 1 ── 3      and a forest of two roots, 0 and 1 ── 2, with a pad
    #     └─ 2
    parents, sizes = np.array([[-1, 0, 0, 1], [-1, -1, 1, -1]]), np.array([4, 3])
    paths, lengths = leaf_paths(parents, sizes)
    np.testing.assert_array_equal(paths, [[[0, 2, -1], [0, 1, 3]], [[0, -1, -1], [1, 2, -1]]])
    np.testing.assert_array_equal(lengths, [[2, 3], [1, 2]])
    tokens = np.array([[5, 6, 7, 8], [5, 6, 7, 99]])
    beam, _ = beam_from_tree(TokenTree(tokens, parents, sizes))
    np.testing.assert_array_equal(beam, [[[5, 7, 0], [5, 6, 8]], [[5, 0, 0], [6, 7, 0]]])
    packed = pack_tree(TokenTree(tokens, parents, sizes), pad_token=-1)
    np.testing.assert_array_equal(packed.packed_beam[1], [5, 6, 7, -1])
    np.testing.assert_array_equal(packed.position_offsets, [[0, 1, 1, 2], [0, 0, 1, 0]])
    assert not packed.attention_mask[1, 3].any() and not packed.attention_mask[1, :, 3].any()


def test_random_trees_survive_the_way_there_and_back():
    """Numbering by candidates may differ from the tree's own, and nothing else does."""
    rng = np.random.default_rng(1)
    parents = random_parents(rng, (4, 15))
    tokens = np.arange(60).reshape(4, 15) * 7  # all different, so that paths are
    sizes = np.array([15, 1, 0, 9])
    tree = TokenTree(tokens, parents, sizes)
    own, packed = pack_tree(tree), pack(*beam_from_tree(tree))
    for b, size in enumerate(sizes):
        order = np.argsort(packed.packed_beam[b, :size])
        np.testing.assert_array_equal(packed.packed_beam[b, order], tokens[b, :size])
        np.testing.assert_array_equal(
            packed.position_offsets[b, order], own.position_offsets[b, :size]
        )
        np.testing.assert_array_equal(
            packed.attention_mask[b][np.ix_(order, order)], own.attention_mask[b, :size, :size]
        )
    np.testing.assert_array_equal(
        unpack(own.packed_beam, own.unpack_map)[0, 0], unpack(tokens, own.unpack_map)[0, 0]
    )


def test_tokens_may_be_traced():
    parents, sizes = np.array([[-1, 0, 0]]), np.array([3])
    run = jax.jit(lambda tokens: pack_tree(TokenTree(tokens, parents, sizes)))
    packed = run(jnp.array([[4, 5, 6]]))
    assert all(isinstance(x, jax.Array) for x in packed)
    np.testing.assert_array_equal(unpack(packed.packed_beam, packed.unpack_map), [[[4, 5], [4, 6]]])
    beam = jax.jit(lambda tokens: beam_from_tree(TokenTree(tokens, parents, sizes))[0])
    np.testing.assert_array_equal(beam(jnp.array([[4, 5, 6]])), [[[4, 5], [4, 6]]])


def test_a_batch_without_nodes():
    tree = TokenTree(np.zeros((2, 3), int), np.full((2, 3), -1), np.zeros(2, int))
    packed = pack_tree(tree)
    assert packed.unpack_map.shape == (2, 0, 0) and not packed.attention_mask.any()
    assert beam_from_tree(tree)[0].shape == (2, 0, 0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("function", [ancestor_mask, depths])
@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize(
    "parents,error,names",
    [
        ([-1, 0, 1.0], TypeError, ["parents", "float"]),
        ([-1, 2, 0], ValueError, ["parents", "got 2 at (1,)"]),  # forward
        ([-1, 1], ValueError, ["parents", "got 1 at (1,)"]),  # its own parent
        ([1, 0], ValueError, ["parents", "got 1 at (0,)"]),  # a cycle of two
        ([-1, 0, 3], ValueError, ["parents", "got 3 at (2,)"]),  # beyond the end
        ([[-1, 0], [-1, -2]], ValueError, ["parents", "got -2 at (1, 1)"]),
        (-1, ValueError, ["parents", "scalar"]),
    ],
)
def test_bad_parents(function, module, parents, error, names):
    with pytest.raises(error) as raised:
        function(module.asarray(parents))
    assert all(name in str(raised.value) for name in names)


TREE = TokenTree(np.zeros((2, 3), int), np.full((2, 3), -1), np.array([3, 2]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("function", [pack_tree, beam_from_tree])
@pytest.mark.parametrize(
    "wrong,error,names",
    [
        ({"tokens": TREE.tokens * 1.0}, TypeError, ["tokens", "float64"]),
        ({"tokens": TREE.tokens[:1]}, ValueError, ["tokens", "(2, 3)", "(1, 3)"]),
        ({"parents": TREE.parents[0]}, ValueError, ["parents", "(3,)"]),
        ({"parents": TREE.parents + 1}, ValueError, ["parents", "(0, 0)"]),
        ({"sizes": np.array([3])}, ValueError, ["sizes", "2 numbers"]),
        ({"sizes": np.array([3, 4])}, ValueError, ["sizes", "got 4 at (1,)"]),
        ({"sizes": np.array([3, -1])}, ValueError, ["sizes", "-1"]),
        ({"sizes": np.array([3.0, 1.0])}, TypeError, ["sizes", "float64"]),
        ({"tokens": [[1], []]}, TypeError, ["tokens", "list"]),
        ({"tokens": [[1]]}, ValueError, ["tokens", "(1, 1)"]),
    ],
)
def test_bad_trees(function, wrong, error, names):
    with pytest.raises(error) as raised:
        function(TREE._replace(**wrong))
    assert all(name in str(raised.value) for name in names)


def test_a_pad_token_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"pad_token .*int8.* got 300"):
        pack_tree(TREE._replace(tokens=TREE.tokens.astype(np.int8)), pad_token=300)


@pytest.mark.usefixtures("unchecked")
def test_lists_are_arrays():
    parents, sizes = [[-1, 0, 0], [-1, -1, 1]], [3, 3]
    tree = TokenTree([[4, 5, 6], [7, 8, 9]], parents, sizes)
    for came, expected in zip(
        pack_tree(tree), pack_tree(TokenTree(*map(np.array, tree))), strict=True
    ):
        np.testing.assert_array_equal(came, expected)
    np.testing.assert_array_equal(beam_from_tree(tree)[0][0], [[4, 5], [4, 6]])
    np.testing.assert_array_equal(depths(parents), [[0, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(ancestor_mask(parents[0])[2], [True, False, True])


def test_traced_parents_out_of_range_are_clipped():
    """To a root or the node before: no cycle, whatever was given."""
    parents = np.array([5, 5, -9, 2], np.int8)
    np.testing.assert_array_equal(jax.jit(depths)(parents), depths(np.array([-1, 0, -1, 2])))


def test_traced_parents_are_refused():
    with pytest.raises(TypeError, match=r"parents.*traced"):
        jax.jit(lambda p: pack_tree(TREE._replace(parents=p)))(TREE.parents)
