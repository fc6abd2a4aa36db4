"""Nodes dealt over devices: every node once, as many blocks each, and the work that was counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.training import DEALINGS, blocks_by_device, deal_tree, dealing, interval_mask

BLOCK = 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(dealing, "BLOCK", BLOCK)


@st.composite
def forests(draw):
    """Ends of a forest of up to 200 nodes in depth-first order."""
    n = draw(st.integers(0, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    branching = draw(st.sampled_from([0.0, 0.1, 0.5]))
    path = []
    ends = np.full(n, n)
    for node in range(n):
        if rng.random() < branching:
            keep = rng.integers(0, len(path) + 1)
            ends[path[keep:]] = node
            path = path[:keep]
        path.append(node)
    return ends


def count_by_the_mask(ends, nodes, devices):
    """Blocks [r, s] that hold a visible pair: what has to be computed, at least."""
    mask = interval_mask(ends)
    shard = len(nodes) // devices
    size = max(min(BLOCK, shard), 1)
    parts = [
        [places[i : i + size] for i in range(0, shard, size)]
        for places in nodes.reshape(devices, shard)
    ]
    found = np.zeros((devices, devices), int)
    for r, queries in enumerate(parts):
        for s, keys in enumerate(parts):
            pairs = [(q[q >= 0], k[k >= 0]) for q in queries for k in keys]
            found[r, s] = sum(mask[np.ix_(q, k)].any() for q, k in pairs)
    return found


@given(forests(), st.integers(1, 8), st.sampled_from(DEALINGS))
def test_every_node_once_and_the_work_as_counted(ends, devices, dealing):
    nodes = deal_tree(ends, devices, dealing=dealing)
    assert len(nodes) % devices == 0
    np.testing.assert_array_equal(np.sort(nodes[nodes >= 0]), np.arange(len(ends)))
    work = blocks_by_device(ends, nodes, devices)
    # A visited block may hold no visible pair: if the subtree that ends last begins after the
    # queries that are there, say.
    assert (work >= count_by_the_mask(ends, nodes, devices)).all()
    in_order = deal_tree(ends, devices, dealing="contiguous")
    assert work.sum() == blocks_by_device(ends, in_order, devices).sum()


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_text_is_dealt_evenly(devices):
    """Of one path, block i visits i + 1 blocks: 1 + 2 + … + b, and every device gets its share."""
    ends = np.full(devices * 6 * BLOCK, devices * 6 * BLOCK)
    blocks = 6 * devices
    by_dealing = {
        dealing: blocks_by_device(ends, deal_tree(ends, devices, dealing=dealing), devices)
        for dealing in DEALINGS
    }
    for work in by_dealing.values():
        assert work.sum() == blocks * (blocks + 1) // 2
    mean = blocks * (blocks + 1) / 2 / devices
    most = {dealing: work.sum(axis=1).max() / mean for dealing, work in by_dealing.items()}
    assert most["contiguous"] > most["striped"] > most["balanced"]
    assert most["balanced"] < 1.01


def test_what_is_known():
    """Two texts of two blocks each, on two devices: by hand."""
    ends = np.repeat([16, 32], 16)
    nodes = deal_tree(ends, 2, dealing="striped")
    np.testing.assert_array_equal(nodes, [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)])
    np.testing.assert_array_equal(blocks_by_device(ends, nodes, 2), [[2, 0], [2, 2]])
    nodes = deal_tree(ends, 2, dealing="contiguous")
    np.testing.assert_array_equal(nodes, np.arange(32))
    np.testing.assert_array_equal(blocks_by_device(ends, nodes, 2), [[3, 0], [0, 3]])
    np.testing.assert_array_equal(deal_tree(np.array([2, 2, 3]), 2), [0, 1, 2, -1])
    assert deal_tree(np.zeros(0, int), 3).shape == (0,)
    assert not blocks_by_device(np.zeros(0, int), np.zeros(0, int), 3).any()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: deal_tree(np.ones(3), 2), TypeError, "ends: "),
        (lambda: deal_tree(np.ones((1, 1), int), 2), ValueError, "ends: "),
        (lambda: deal_tree(np.array([2, 3, 3]), 2), ValueError, "ends: expected depth-first order"),
        (lambda: deal_tree(np.array([1]), 0), ValueError, "devices: "),
        (lambda: deal_tree(np.array([1]), 1, dealing="zigzag"), ValueError, "dealing: "),
        (
            lambda: blocks_by_device(np.array([1]), np.array([0, 0]), 2),
            ValueError,
            "nodes: ",
        ),
        (lambda: blocks_by_device(np.array([1]), np.array([0, -1]), 3), ValueError, "nodes: "),
        (lambda: blocks_by_device(np.array([1]), np.array([0, -2]), 2), ValueError, "nodes: "),
        (lambda: blocks_by_device(np.array([1]), np.array([0.0]), 1), ValueError, "nodes: "),
        (lambda: blocks_by_device(np.array([1]), np.array([[0]]), 1), ValueError, "nodes: "),
    ],
)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
