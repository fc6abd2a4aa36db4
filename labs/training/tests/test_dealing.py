"""Nodes dealt over devices: every node once, as many blocks each, and the work that was counted."""

import functools

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
    """Blocks [r, s] that hold a visible pair: the least that has to be computed."""
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
    # A visited block may hold no visible pair, such as when the subtree that ends last begins
    # after the queries.
    assert (work >= count_by_the_mask(ends, nodes, devices)).all()
    in_order = deal_tree(ends, devices, dealing="contiguous")
    assert work.sum() == blocks_by_device(ends, in_order, devices).sum()


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_text_is_dealt_evenly(devices):
    """In one path, block i visits i + 1 blocks: 1 + 2 + … + b, and every device gets its share."""
    blocks = 6 * devices
    ends = np.full(blocks * BLOCK, blocks * BLOCK)
    most = []
    for name in DEALINGS:
        work = blocks_by_device(ends, deal_tree(ends, devices, dealing=name), devices)
        assert work.sum() == blocks * (blocks + 1) // 2
        most.append(work.sum(axis=1).max() * devices / work.sum())
    contiguous, striped, balanced = most
    assert contiguous > striped > balanced and balanced < 1.01


def test_two_texts_by_hand():
    """Two blocks each, on two devices."""
    ends = np.repeat([16, 32], 16)
    nodes = deal_tree(ends, 2, dealing="striped")
    np.testing.assert_array_equal(nodes, [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)])
    np.testing.assert_array_equal(blocks_by_device(ends, nodes, 2), [[2, 0], [2, 2]])
    np.testing.assert_array_equal(blocks_by_device(ends, np.arange(32), 2), [[3, 0], [0, 3]])
    np.testing.assert_array_equal(deal_tree(np.array([2, 2, 3]), 2), [0, 1, 2, -1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (deal_tree, ([2, 3, 3], 2), "ends: expected depth-first order"),
        (deal_tree, ([1], 0), "devices: expected at least 1, got 0"),
        (functools.partial(deal_tree, dealing="zigzag"), ([1], 1), "dealing: expected one of"),
        (blocks_by_device, ([1], [0, 0], 2), "nodes: expected each of 1 nodes at one place"),
        (blocks_by_device, ([1], [0, -1], 3), "nodes: expected a multiple of 3 places, got 2"),
        (blocks_by_device, ([1], [0.0], 1), "nodes: expected integers"),
    ],
)
def test_what_is_wrong_is_named(function, arguments, message):
    ends, *others, devices = arguments
    with pytest.raises(ValueError, match=message):
        function(*map(np.array, (ends, *others)), devices)
