"""What each way of merging sends and takes: by formulas of their own, and what follows."""

import pytest

from labs.cost.merges import MERGES, merge_messages, merge_seconds, sent_bytes
from labs.cost.network import collective_seconds
from labs.cost.steps import DATA_SHEETS, attend_seconds
from labs.cost.topology import preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")


@pytest.mark.parametrize("p", [8, 64])
def test_what_serving_systems_send(p):
    """By the formulas derived from their code, for 16 heads of 128, with f = (p − 1)/p."""
    b, h, d, f = 3, 16, 128, (p - 1) / p
    w = Workload(10_000, batch=b, heads=h, head_dim=d)
    queries = f * 2 * b * h * d  # what the gather of queries sends
    for merge, sent, gathered in (
        ("tree", 2 * f * b * h * (4 * d + 8), 0),
        ("tree-joined", 2 * f * b * h * (4 * d + 8), 0),
        ("butterfly", (p.bit_length() - 1) * b * h * (4 * d + 8), 0),
        ("gather", (p - 1) * b * h * (4 * d + 8), 0),
        ("one-shot", (p - 1) * b * h * (4 * d + 8), 0),
        ("hierarchical", (2 * 7 / 8 + (p // 8 - 1) / 8) * b * h * (4 * d + 8), 0),
        ("ag-rs", f * 2 * b * h * d + (p - 1) * 4 * b * h, queries),
        ("a2a", f * b * h * (2 * d + 4), queries),
        ("helix", f * b * h * (2 * d + 8), 0),
    ):
        for gather in (False, True):
            messages = merge_messages(merge, w, p, node_size=8, gather_queries=gather)
            expected = sent + (gathered if gather else 0)
            assert sent_bytes(messages, p, 8) == pytest.approx(expected), merge


def test_the_papers_own_workload():
    """16 heads of 128, one token, 8 devices: the numbers that the notebook prints."""
    w = Workload(640_000)
    found = {
        merge: round(sent_bytes(merge_messages(merge, w, 8, node_size=8), 8, 8)) for merge in MERGES
    }
    assert found["tree-joined"] == 14_560 and found["butterfly"] == 24_960
    assert found["gather"] == 58_240 and found["helix"] == 3_696
    assert merge_messages("tree", w, 1, node_size=8) == []


def test_states_may_be_merged_by_nodes():
    """One message of a share crosses; 12 devices on nodes of 8 merge in groups of four."""
    w = Workload(1)
    share = 2 * 4 * (128 + 2)  # two of 16 heads
    found = merge_messages("hierarchical", w, 16, node_size=8)
    assert [(x.kind, x.message_bytes, x.devices, x.stride) for x in found] == [
        ("all-to-all", 8 * share, 8, 1),
        ("all-gather", share, 2, 8),
        ("all-gather", share, 8, 1),
    ]
    assert [x.devices for x in merge_messages("hierarchical", w, 12, node_size=8)] == [4, 3, 4]
    assert [x.devices for x in merge_messages("hierarchical", w, 8, node_size=8)] == [8, 8]


def in_pieces(merge, w, p, topology, pieces):
    """Seconds of a layer whose heads are attended to, and merged, in so many pieces: a piece is
    merged while the next one is attended to."""
    part = Workload(w.context, batch=w.batch, heads=w.heads // pieces)
    attend = attend_seconds(part, part.keys_on(p), topology.device, DATA_SHEETS)
    send = merge_seconds(merge, part, p, topology)
    return attend + (pieces - 1) * max(attend, send) + send


def test_pieces_of_a_merge_save_little_and_cost_launches():
    """Head by head, the papers' block takes longer: what a merge waits for is not its bytes."""
    w = Workload(640_000)
    whole = in_pieces("tree", w, 8, DGX, 1)
    for pieces in (2, 4, 16):
        assert in_pieces("tree", w, 8, DGX, pieces) > 0.9 * whole
    assert in_pieces("tree", w, 8, DGX, 16) > 2 * whole
    # With bytes enough, pieces hide them: 4,096 sequences on 100 Gb/s Ethernet.
    many, slow = Workload(8_000, batch=4096), preset("ethernet")
    one, four = (in_pieces("tree", many, 16, slow, pieces) for pieces in (1, 4))
    assert four / one == pytest.approx(0.75, abs=0.03)


def even_at(w):
    """New tokens for which a tree's queries and states are as many bytes as a ring's keys."""
    per_token = (w.query_bytes + w.state_bytes) / w.queries
    return w.cache_bytes() / per_token


def test_where_ring_and_tree_send_as_much_in_a_prefill():
    """Few new tokens are the tree's, all new the ring's, where key heads are shared."""
    for kv_heads, share in ((32, 0.66), (8, 0.16), (1, 0.02)):
        w = Workload(2**20, heads=32, kv_heads=kv_heads)
        assert even_at(w) / w.context == pytest.approx(share, abs=0.005)


def test_a_prefills_ring_hides_in_a_node_and_not_beyond():
    """All of 2^20 tokens new, causal: multiplying against sending, on 8 and on 128 H100s."""
    w = Workload(2**20, heads=32, kv_heads=8, queries=2**20)
    for p, hidden in ((8, True), (128, False)):
        multiplying = w.flops(w.context) / 2 / p / DGX.device.flops
        sending = collective_seconds("ring", p, w.cache_bytes(p), DGX)
        assert (sending < multiplying) == hidden


def test_wrong_workloads_are_named():
    for field in ("context", "batch", "heads", "head_dim", "queries"):
        for value, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError)):
            with pytest.raises(error, match=f"{field}: expected"):
                Workload(**{"context": 10, field: value})
    with pytest.raises(ValueError, match="kv_heads: expected a divisor of 16 heads, got 3"):
        Workload(10, kv_heads=3)
    with pytest.raises(ValueError, match=r"cache_dtype: expected one of .*, int4, got 'int3'"):
        Workload(10, cache_dtype="int3")
    with pytest.raises(ValueError, match=r"merge: expected one of tree, .* got 'star'"):
        merge_messages("star", Workload(10), 8, node_size=8)
