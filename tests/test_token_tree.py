"""Token trees by parents, against the conformance suite's plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import ancestor_mask, depths
from treeattn_conformance.trees import tree_mask

mask_jit, depths_jit = jax.jit(ancestor_mask), jax.jit(depths)


def random_parents(size):
    """A forest: each node below an earlier one, or a root."""
    rng, nodes = np.random.default_rng(size), np.arange(size)
    parents = rng.integers(0, np.maximum(nodes, 1))
    return np.where((rng.random(size) < 0.2) | (nodes == 0), -1, parents)


@pytest.mark.parametrize("size", [0, 1, 2, 9, 33])
def test_mask_and_depths(size):
    trees = np.stack(
        [
            random_parents(size),
            np.arange(size) - 1,  # a chain, the deepest tree there is
            np.full(size, -1),
            np.minimum(np.arange(size), 1) - 1,  # a root and its children
        ]
    )
    masks = tree_mask(trees)
    for dtype in "int8", "int64":
        parents = trees.astype(dtype).reshape(2, 2, size)
        for xp, do_mask, do_depths in (np, ancestor_mask, depths), (jnp, mask_jit, depths_jit):
            mask, depth = do_mask(parents), do_depths(parents)
            assert isinstance(mask, xp.ndarray) and depth.dtype == np.int32
            np.testing.assert_array_equal(mask, masks.reshape(2, 2, size, size))
            np.testing.assert_array_equal(depth, mask.sum(axis=-1) - 1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("function", [ancestor_mask, depths])
@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize(
    "parents,error,words",
    [
        ([-1, 0, 1.0], TypeError, "float"),
        ([-1, 2, 0], ValueError, r"got 2 at \(1,\)"),  # forward
        ([-1, 1], ValueError, r"got 1 at \(1,\)"),  # its own parent
        ([1, 0], ValueError, r"got 1 at \(0,\)"),  # a cycle of two
        ([-1, 0, 3], ValueError, r"got 3 at \(2,\)"),  # beyond the end
        ([[-1, 0], [-1, -2]], ValueError, r"got -2 at \(1, 1\)"),
        (-1, ValueError, "scalar"),
        (np.uint8([0, 0]), TypeError, "signed.*uint8"),
    ],
)
def test_bad_parents(function, module, parents, error, words):
    with pytest.raises(error, match=f"^parents: .*{words}"):
        function(module.asarray(parents))


def test_traced_parents_out_of_range_are_clipped():
    """To a root or the node before: no cycle, whatever was given."""
    parents = np.array([5, 5, -9, 2], np.int8)
    np.testing.assert_array_equal(depths_jit(parents), depths(np.array([-1, 0, -1, 2])))
