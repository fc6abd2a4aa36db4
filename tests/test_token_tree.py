"""Token trees by parents: against walking up, and against the beams they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_trie import plain_mask, plain_trie

from treeattn import ancestor_mask, depths, pack
from treeattn_conformance import check_tree

mask_jit, depths_jit = jax.jit(ancestor_mask), jax.jit(depths)


def random_parents(rng, shape, roots=0.2):
    """A forest: each node below an earlier one, or a root."""
    nodes = np.arange(shape[-1])
    parents = rng.integers(0, np.maximum(nodes, 1), shape)
    return np.where((rng.random(shape) < roots) | (nodes == 0), -1, parents)


@pytest.mark.parametrize("size", [0, 1, 2, 9, 33])
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
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(mask[index], plain_mask(parents[index].tolist()))
        np.testing.assert_array_equal(depth[index], mask[index].sum(axis=1) - 1)


def test_the_suite_finds_nothing_wrong():
    """Masks and positions; who asks for links to children has to make them."""

    def build(parents, lengths):
        return {"mask": ancestor_mask(parents), "positions": lengths[:, None] + depths(parents)}

    report = check_tree(build)
    assert report.names("passed") == ["mask", "positions"], str(report)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.just(1), st.integers(1, 12), st.integers(1, 6)),
)
def test_a_beams_mask_is_that_of_its_tree(seed, shape):
    beam = np.random.default_rng(seed).integers(0, 3, shape)
    packed, parents = pack(beam), np.array(plain_trie(beam[0].tolist())[1])
    np.testing.assert_array_equal(ancestor_mask(parents), packed.attention_mask[0])
    np.testing.assert_array_equal(depths(parents), packed.position_offsets[0])


def test_the_documents_arrows():
    """Mars ← is ← a ← red, is ← reddish ← when, is ← dark ← red: each node's parent."""
    packed = pack(np.array([[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 3]]]))
    np.testing.assert_array_equal(packed.packed_beam[0], [0, 1, 2, 3, 4, 5, 6, 3])
    arrows = np.array([-1, 0, 1, 2, 1, 4, 1, 6])
    np.testing.assert_array_equal(ancestor_mask(arrows), packed.attention_mask[0])
    np.testing.assert_array_equal(depths(arrows), packed.position_offsets[0])


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
        (np.uint8([0, 0]), TypeError, ["parents", "signed", "uint8"]),
    ],
)
def test_bad_parents(function, module, parents, error, names):
    with pytest.raises(error) as raised:
        function(module.asarray(parents))
    assert all(name in str(raised.value) for name in names)


@pytest.mark.usefixtures("unchecked")
def test_lists_are_arrays():
    np.testing.assert_array_equal(depths([[-1, 0, 0], [-1, -1, 1]]), [[0, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(ancestor_mask([-1, 0, 0])[2], [True, False, True])


def test_traced_parents_out_of_range_are_clipped():
    """To a root or the node before: no cycle, whatever was given."""
    parents = np.array([5, 5, -9, 2], np.int8)
    np.testing.assert_array_equal(depths_jit(parents), depths(np.array([-1, 0, -1, 2])))
    with pytest.raises(TypeError, match="signed"):
        depths_jit(parents.astype(np.uint8))
