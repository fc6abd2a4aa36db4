"""The papers' printed times, the bytes of their scripts, and bounds."""

from dataclasses import replace

import numpy as np
import pytest

from figures.printed import TABLE_1_H100, TABLE_1_MI300X, TABLE_2_RTX4090
from labs.cost.merges import merge_seconds
from labs.cost.models import MODELS
from labs.cost.network import collective_seconds
from labs.cost.papers import (
    H100_8B,
    MI300X_8B,
    RTX4090_1B,
    block_seconds,
    common_seconds,
    least_seconds,
)
from labs.cost.steps import DATA_SHEETS, attend_seconds
from labs.cost.topology import PRESETS, preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")
# 2024 §6.1, Figure 3: "close ×8 speedups when we use 128 GPUs on a sequence length of 5.12M".
FIGURE_3_DEVICES, FIGURE_3_CONTEXT, FIGURE_3_SPEEDUP = 128, 5_120_000, 8
BLOCK = Workload(FIGURE_3_CONTEXT)


def ring_and_tree(w, p=8, network=DGX):
    return [block_seconds(how, w, p, network) for how in ("ring", "tree")]


def test_the_printed_speedups_are_the_printed_times():
    """The ring's times are the longer ones; a ratio is printed rounded or cut. 2025 §7: 3 to 5."""
    for rows, least, most in (
        (TABLE_1_H100, 2.4, 4.3),
        (TABLE_1_MI300X, 2.3, 3.4),
        (TABLE_2_RTX4090, 4.1, 5.4),
    ):
        ratios = [row.ratio.mean for row in rows]
        for ratio, row in zip(ratios, rows, strict=True):
            assert row.speedup in (int(ratio), round(ratio))
        assert (round(min(ratios), 1), round(max(ratios), 1)) == (least, most)


def bandwidths(rows, setting):
    """The bytes that a device sends over the ring's extra seconds, a number for each row.

    Nine passes, in each layer p − 1 chunks, with a key head for every query head.
    """
    model, _, p = setting
    chunk = 2 * 2 * np.array([row.context for row in rows]) / p * model.heads * model.head_dim
    longer = np.array([row.ring.mean - row.tree.mean for row in rows])
    return 9 * model.layers * (p - 1) * chunk / longer


@pytest.mark.parametrize(
    ("rows", "setting", "bandwidth", "within"),
    [(TABLE_1_MI300X, MI300X_8B, 45e9, 0.02), (TABLE_2_RTX4090, RTX4090_1B, 4.4e9, 0.05)],
)
def test_the_printed_differences_are_bytes_over_one_bandwidth(rows, setting, bandwidth, within):
    assert bandwidths(rows, setting) == pytest.approx(bandwidth, rel=within)


def test_h100s_rows_are_not_one_machines():
    """At 256k the prefill alone, in contiguous pieces at the data sheet's peak, takes longer than
    the printed run, and no one bandwidth explains the others."""
    assert bandwidths(TABLE_1_H100, H100_8B) == pytest.approx([67e9, 79e9, 143e9, 199e9], rel=0.01)
    assert least_seconds(H100_8B, 256_000) == pytest.approx(4.56, abs=0.005)
    assert least_seconds(H100_8B, 256_000) > 1.5 * TABLE_1_H100[-1].tree.mean
    for rows, setting in ((TABLE_1_MI300X, MI300X_8B), (TABLE_2_RTX4090, RTX4090_1B)):
        assert all(least_seconds(setting, row.context) < 0.6 * row.tree.mean for row in rows)


LLAMA = MODELS["llama-3.1-8b"]
WEIGHTS = 2 * LLAMA.weights  # bytes that a step reads, on every device as in the script


def test_a_blocks_speedup_is_not_a_models():
    """2024 and 2025 §6, "transfer seamlessly": a token of Llama 3.1 8B also reads the weights."""
    reading = WEIGHTS / DGX.device.memory_bandwidth
    for context, block, whole in ((32_000, 8.6, 3.1), (128_000, 22.3, 7.9), (10**6, 55.0, 32.8)):
        w = Workload(context, heads=LLAMA.heads, kv_heads=LLAMA.kv_heads)
        ring, tree = (LLAMA.layers * seconds for seconds in ring_and_tree(w))
        assert ring / tree == pytest.approx(block, rel=0.01)
        assert (ring + reading) / (tree + reading) == pytest.approx(whole, rel=0.01)


def test_when_a_cache_outweighs_the_weights():
    """2024 and 2025 §1, "largely determines": attention's part of the bytes that a step reads."""
    for context, part in ((8_000, 0.07), (32_000, 0.28), (128_000, 1.12), (10**6, 8.73)):
        w = Workload(context, kv_heads=LLAMA.kv_heads, heads=LLAMA.heads)
        assert LLAMA.layers * w.cache_bytes() / WEIGHTS == pytest.approx(part, abs=0.005)
    many = Workload(8_000, batch=32, kv_heads=LLAMA.kv_heads, heads=LLAMA.heads)
    assert LLAMA.layers * many.cache_bytes() / WEIGHTS == pytest.approx(2.2, abs=0.05)


def test_the_ratios_dip_is_no_run_variance_by_the_printed_errors():
    """From 64k to 128k the H100s' ratio falls by 2.8 errors; the rise after it is 0.6 of one."""
    ratios = [row.ratio for row in TABLE_1_H100]

    def apart(a, b):
        return (a.mean - b.mean) / (a.error**2 + b.error**2) ** 0.5

    assert apart(ratios[1], ratios[2]) == pytest.approx(2.8, abs=0.1)
    assert apart(ratios[3], ratios[2]) == pytest.approx(0.6, abs=0.1)


def test_the_trees_time_becomes_flatter():
    """2025 §6.1, from 80,000 keys to 5.12 million. The merge takes as long at any length, so
    reading the keys comes to dominate. 2025 §5.3 says communication, which dominates only as the
    devices become more."""
    parts = []
    for p, growth in ((8, 22.3), (64, 2.36), (128, 1.57)):
        few, many = (block_seconds("tree", Workload(n), p, DGX) for n in (80_000, FIGURE_3_CONTEXT))
        assert many / few == pytest.approx(growth, rel=0.01)
        merge = merge_seconds("tree", Workload(1), p, DGX)
        assert many - merge > 15 * (few - merge)
        parts.append(merge / many)
    assert parts == sorted(parts) and merge == pytest.approx(166e-6, rel=0.01)
    longer = block_seconds("tree", Workload(4 * FIGURE_3_CONTEXT), 128, DGX)
    assert longer - merge > 2 * merge


def test_eight_times_is_no_asymptote():
    """The explainer calls it one; in the model the ratio goes on growing with the context."""
    ratios = []
    for times in (1, 4, 16):
        w = Workload(times * FIGURE_3_CONTEXT)
        ring, tree = ring_and_tree(w, FIGURE_3_DEVICES)
        ratios.append(ring / tree)
    assert ratios[0] > 100 * FIGURE_3_SPEEDUP and ratios == sorted(ratios)


def test_four_mi300x_rather_than_eight():
    """2025 §6 says 8, §6.4 and Table 1 say 4: with 8 a link would carry more than its 48 GB/s."""
    four, eight = (bandwidths(TABLE_1_MI300X, MI300X_8B._replace(devices=p)) for p in (4, 8))
    assert max(four) < 48e9 and min(eight) > 50e9 and eight == pytest.approx(53e9, rel=0.03)


def test_common_seconds_gives_the_printed_ratio():
    c = common_seconds(BLOCK, FIGURE_3_DEVICES, DGX, FIGURE_3_SPEEDUP)
    ring, tree = ring_and_tree(BLOCK, FIGURE_3_DEVICES)
    assert (ring + c) / (tree + c) == pytest.approx(FIGURE_3_SPEEDUP)
    assert c == pytest.approx(0.126, rel=0.01)


def test_the_gap_widens_with_context_and_with_devices():
    """2024 §6.1, in the model: the ring's time over the tree's grows; 3,298 where 8 is printed, and
    4,157 by the two Allreduces that XLA makes of three."""

    def ratio(context, p, network=DGX):
        ring, tree = ring_and_tree(Workload(context), p, network)
        return ring / tree

    by_context = [ratio(context, 128) for context in (80_000, 640_000, 5_120_000)]
    by_devices = [ratio(5_120_000, p) for p in (8, 64, 128)]
    assert by_context == sorted(by_context) and by_devices == sorted(by_devices)
    assert by_context[-1] == pytest.approx(3298, rel=0.001)
    ring, joined = (block_seconds(s, BLOCK, 128, DGX) for s in ("ring", "tree-joined"))
    assert ring / joined == pytest.approx(4157, rel=0.001)
    assert merge_seconds("tree-joined", BLOCK, 128, DGX) == pytest.approx(111e-6, rel=0.01)
    assert ratio(5_120_000, 128, DGX.scaled(latency=2.2)) == pytest.approx(1880, rel=0.01)


def test_overlap_hides_the_shorter_of_attending_and_sending():
    w = Workload(640_000)
    attend = attend_seconds(w, 80_000, DGX.device, DATA_SHEETS)
    sending = collective_seconds("ring", 8, w.cache_bytes(8), DGX)
    assert block_seconds("ring", w, 8, DGX) == pytest.approx(8 * attend + sending)
    # Sending takes longer, so with overlap only one chunk's attending is added.
    assert block_seconds("ring", w, 8, DGX, overlap=True) == pytest.approx(attend + sending)
    many = Workload(640_000, queries=64_000)  # in a prefill, attending does
    attend = attend_seconds(many, 80_000, DGX.device, DATA_SHEETS)
    assert block_seconds("ring", many, 8, DGX, overlap=True) == pytest.approx(8 * attend)
    tree = [block_seconds("butterfly", w, 8, DGX, overlap=o) for o in (False, True)]
    assert tree[0] == tree[1]


@pytest.mark.parametrize("name", PRESETS)
def test_no_ring_decodes_one_token_faster(name):
    """2024 and 2025 §5.3, of Allreduces. A butterfly wins even over a link of 1 ms and 1 TB/s.

    There three Allreduces lose, because they wait for three times as many messages.
    """
    topology = preset(name)
    links = replace(topology.levels[0], latency=1e-3, bandwidth=1e12)
    slow = replace(topology, levels=(links, *topology.levels[1:]), protocols=())
    w = Workload(640_000)
    for p in (2, 8, 64):
        ring = block_seconds("ring", w, p, topology)
        for allreduce in ("tree", "tree-joined", "butterfly"):
            assert ring > 10 * block_seconds(allreduce, w, p, topology)
        ring, butterfly = (block_seconds(s, w, p, slow) for s in ("ring", "butterfly"))
        assert ring > 2 * butterfly
    if name == "dgx-h100":
        times = [block_seconds(s, w, 8, slow) for s in ("tree", "ring", "butterfly")]
        assert times[0] / times[1] == pytest.approx(3.2, abs=0.05)
        assert times[1] / times[2] == pytest.approx(4.1, abs=0.05)


def test_a_ring_loses_less_on_a_torus():
    """2025 §6.4, of TPU pods. 64 chips of a v5p, links of 100 GB/s, by hand: each
    message of a ring has its own link, and every round of a tree may cross 24 hops of 1 µs."""
    w, p = Workload(5_120_000), 64
    attend = w.cache_bytes(p) / 2.765e12
    ring = p * attend + (p - 1) * (1e-6 + w.cache_bytes(p) / 100e9)
    tree = attend + 3 * 2 * 6 * 24e-6  # three Allreduces, log2(64) rounds up and down
    on_h100 = block_seconds("ring", w, p, DGX) / block_seconds("tree", w, p, DGX)
    assert 300 < ring / tree < 0.2 * on_h100 and on_h100 == pytest.approx(2600, rel=0.02)
