"""What the papers print, and what it implies together with the model."""

import pytest

from treeattn.cost.formulas import Workload
from treeattn.cost.papers import (
    FIGURE_3_CONTEXT,
    FIGURE_3_DEVICES,
    FIGURE_3_SPEEDUP,
    H100_8B,
    MI300X_8B,
    RTX4090_1B,
    TABLE_1_H100,
    TABLE_1_MI300X,
    TABLE_2_RTX4090,
    Fit,
    Measured,
    Row,
    Setting,
    common_seconds,
    fit_step,
    table_steps,
)
from treeattn.cost.strategies import decode_cost
from treeattn.cost.topology import preset

DGX = preset("dgx-h100")
BLOCK = Workload(FIGURE_3_CONTEXT)


def test_the_printed_speedups_are_the_printed_times():
    """Rounded down, but for Table 2's first and 64k's MI300X, which round either way."""
    for row in (*TABLE_1_H100, *TABLE_1_MI300X, *TABLE_2_RTX4090):
        assert abs(row.ring.mean / row.tree.mean - row.speedup) < 0.9


def test_table_steps():
    """Llama 3.1 8B at 32k on 8 devices: 7 steps x 32 layers x 10 tokens of 4,000 keys."""
    steps = table_steps(H100_8B, 32_000)
    assert steps.steps == 7 * 32 * 10
    assert steps.step_bytes == 2 * 4000 * 32 * 128 * 2
    assert table_steps(H100_8B, 32_000, repeated=False).step_bytes == steps.step_bytes // 4


def test_the_fit_finds_what_made_the_data():
    made = Fit(123e9, 45e-6)
    setting = Setting(heads=8, kv_heads=2, head_dim=64, layers=3, devices=4)
    rows = [
        Row(n, Measured(1.0, 0.1), Measured(1.0 + made.seconds(table_steps(setting, n)), 0.2), 1)
        for n in (10_000, 50_000, 70_000)
    ]
    assert fit_step(rows, setting, fixed=True) == pytest.approx(made)
    alone = [
        row._replace(ring=Measured(1 + Fit(123e9, 0).seconds(table_steps(setting, row.context)), 0))
        for row in rows
    ]
    assert fit_step(alone, setting, fixed=False) == pytest.approx(Fit(123e9, 0.0))


def test_mi300x_moves_its_repeated_cache_over_one_link():
    """Fitted to one row, a bandwidth alone says the other three within 2 %: 50 GB/s, xGMI's."""
    fit = fit_step(TABLE_1_MI300X[:1], MI300X_8B, fixed=False)
    assert fit.bandwidth == pytest.approx(50e9, rel=0.01)
    link = preset("mi300x").levels[0]
    assert link.bandwidth < fit.bandwidth < 64e9  # usable, and nominal
    for row in TABLE_1_MI300X[1:]:
        assert fit.seconds(table_steps(MI300X_8B, row.context)) == pytest.approx(
            row.gap.mean, rel=0.02
        )


def test_rtx4090_moves_its_repeated_cache_at_five_gigabytes_a_second():
    """As before, within 7 %: a sixth of what PCIe 4.0 x16 could carry."""
    fit = fit_step(TABLE_2_RTX4090[:1], RTX4090_1B, fixed=False)
    assert fit.bandwidth == pytest.approx(5.04e9, rel=0.01)
    for row in TABLE_2_RTX4090[1:]:
        assert fit.seconds(table_steps(RTX4090_1B, row.context)) == pytest.approx(
            row.gap.mean, rel=0.07
        )


def test_h100_needs_a_fixed_cost_for_each_step():
    """A bandwidth alone misses a row by three standard errors; with a cost a step, none by two."""

    def misses(fixed):
        fit = fit_step(TABLE_1_H100, H100_8B, fixed=fixed)
        found = [
            (fit.seconds(table_steps(H100_8B, r.context)) - r.gap.mean) / r.gap.error
            for r in TABLE_1_H100
        ]
        return max(map(abs, found))

    assert misses(fixed=False) > 2.5
    assert misses(fixed=True) < 2
    fit = fit_step(TABLE_1_H100, H100_8B, fixed=True)
    assert fit.bandwidth < DGX.levels[0].bandwidth
    assert 0.5e-3 < fit.step_seconds < 1.2e-3


def test_common_seconds_gives_the_printed_ratio():
    c = common_seconds(BLOCK, FIGURE_3_DEVICES, DGX, FIGURE_3_SPEEDUP)
    ring, tree = (
        decode_cost(s, BLOCK, FIGURE_3_DEVICES, DGX).seconds for s in ("ring", "tree-allreduce")
    )
    assert (ring + c) / (tree + c) == pytest.approx(FIGURE_3_SPEEDUP)
    assert c == pytest.approx(0.121, rel=0.01)


def test_figure_3_and_table_1_cannot_both_be_reconciled():
    """What either measurement needs, the other one refutes."""
    c = common_seconds(BLOCK, FIGURE_3_DEVICES, DGX, FIGURE_3_SPEEDUP)
    calls = 32 * 10  # of attention, in each run of Table 1
    assert calls * c > 60 * TABLE_1_H100[0].tree.mean
    fit = fit_step(TABLE_1_H100, H100_8B, fixed=True)
    ring = decode_cost("ring", BLOCK, FIGURE_3_DEVICES, DGX)
    tree = decode_cost("tree-allreduce", BLOCK, FIGURE_3_DEVICES, DGX)
    predicted = (ring.seconds + 127 * fit.step_seconds) / (tree.seconds + 2 * fit.step_seconds)
    assert predicted > 50 * FIGURE_3_SPEEDUP


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    with pytest.raises(ValueError, match="rows: expected at least 2 to fit, got 1"):
        fit_step(TABLE_1_H100[:1], H100_8B, fixed=True)
    with pytest.raises(ValueError, match="rows: expected at least 1 to fit, got 0"):
        fit_step([], H100_8B, fixed=False)
