"""Whole decode steps, forecast and measured: the misses, each repair, the held-out rows."""

import pytest

from labs.cost.observed import (
    forecast,
    observed_steps,
    over_measured,
    repairs,
)
from labs.cost.steps import DATA_SHEETS, REPAIRED

ROWS = observed_steps()


def ratios(rates) -> list[float]:
    return [over_measured(rates, row) for row in ROWS]


def test_forecasts_before_anybody_looked():
    """Half of the measured times, a seventh between nodes, and the wrong sign beyond 16 GPUs."""
    expected = [0.54, 0.535, 0.42, 0.59, 0.59, 0.54, 0.14, 0.16, 0.31, 0.33]
    assert ratios(DATA_SHEETS) == pytest.approx(expected, abs=0.006)
    calculated = [forecast(DATA_SHEETS, row) for row in ROWS[:3]]
    measured = [row["microseconds"] for row in ROWS[:3]]
    assert calculated[2] < calculated[1] < calculated[0]
    assert measured[2] > measured[0] > measured[1]


def test_each_repair():
    """The steps' ratios after each repair, of which one fits TP8 and none the others."""
    expected = [
        (0.54, 0.535, 0.42),
        (0.82, 0.725, 0.52),  # reading, as the attention kernel was measured
        (0.82, 0.865, 0.69),  # Allreduces between nodes as others measured them
        (1.00, 1.08, 0.87),  # a layer's other kernels, so that TP8 is right
        (1.00, 1.08, 0.87),
    ]
    for rates, these in zip(repairs(ROWS).values(), expected, strict=True):
        assert ratios(rates)[:3] == pytest.approx(these, abs=0.006)


def test_what_was_held_out():
    """TP16 and TP32 within 13 %, a layer's attending and pass-Q within 4 %."""
    rates = list(repairs(ROWS).values())[-1]
    found = dict(zip((row["row"] for row in ROWS), ratios(rates), strict=True))
    held = [found[row["row"]] for row in ROWS if row["use"] == "held out"]
    assert held == pytest.approx([1.08, 0.87, 1.035, 1.015, 0.98], abs=0.006)
    fitted = [found[row["row"]] for row in ROWS if row["use"] == "fit"]
    assert fitted == pytest.approx([1.0] * 5)
    # Still missed: from 16 to 32 GPUs the measured step gets slower, the forecast does not.
    assert found["TP32, time per token"] * 47.3 < found["TP16, time per token"] * 39.52


def test_the_advice_rests_on_these_repairs():
    assert tuple(REPAIRED) == pytest.approx(tuple(list(repairs(ROWS).values())[-1]), rel=0.006)


def test_no_repair_has_seen_a_row_that_is_held_out():
    """Changing those rows leaves the rates the same."""
    changed = [row | {"microseconds": 1.0} if row["use"] == "held out" else row for row in ROWS]
    assert repairs(changed) == repairs(ROWS)
