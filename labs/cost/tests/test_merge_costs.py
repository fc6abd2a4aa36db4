"""The bytes of each merge, by formulas of their own. The notebook has their consequences."""

import pytest

from labs.cost.merges import merge_messages, sent_bytes
from labs.cost.network import collective_seconds, simulate
from labs.cost.observed import forecast
from labs.cost.steps import DATA_SHEETS
from labs.cost.topology import preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")
ROW = {"kind": "decode", "devices": 8, "keys": 1024}


@pytest.mark.parametrize("p", [8, 64])
def test_what_serving_systems_send(p):
    """By the formulas derived from their code, for 16 heads of 128, with f = (p − 1)/p."""
    b, h, d, f = 3, 16, 128, (p - 1) / p
    w = Workload(10_000, batch=b, heads=h, head_dim=d)
    queries = f * 2 * b * h * d  # bytes that the gather of queries sends
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


def test_twelve_devices_on_nodes_of_eight_merge_in_groups_of_four():
    found = merge_messages("hierarchical", Workload(1), 12, node_size=8)
    assert [(x.kind, x.devices, x.stride) for x in found] == [
        ("all-to-all", 4, 1),
        ("all-gather", 3, 4),
        ("all-gather", 4, 1),
    ]


def test_a_prefills_ring_hides_in_a_node_and_not_beyond():
    """All of 2^20 tokens new, causal: multiplying against sending, on 8 and on 128 H100s."""
    w = Workload(2**20, heads=32, kv_heads=8, queries=2**20)
    for p, hidden in ((8, True), (128, False)):
        multiplying = w.flops(w.context) / 2 / p / DGX.device.flops
        sending = collective_seconds("ring", p, w.cache_bytes(p), DGX)
        assert (sending < multiplying) == hidden


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Workload(0), ValueError, "context: expected at least 1, got 0"),
        (lambda: Workload(9, batch=1.5), TypeError, "batch: expected a whole number, got 1.5"),
        (lambda: Workload(9, kv_heads=3), ValueError, "kv_heads: expected a divisor of 16 heads"),
        (lambda: Workload(9, cache_dtype="int3"), ValueError, "cache_dtype: expected one of"),
        (lambda: merge_messages("star", Workload(9), 8, node_size=8), ValueError, "merge: .*tree"),
        (lambda: preset("dgx"), ValueError, "topology: expected one of dgx-h100"),
        (lambda: collective_seconds("star", 4, 1.0, DGX), ValueError, "kind: expected one of ring"),
        (lambda: simulate([], 5000, DGX), ValueError, "devices: dgx-h100 joins at most 4096"),
        (lambda: forecast(DATA_SHEETS, ROW), ValueError, "kind: expected step, attend, .*decode"),
    ],
)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
