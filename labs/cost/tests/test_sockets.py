"""gloo's rendezvous by hand, and forecasts against the times that labs/cluster measured."""

import json

import pytest

from labs.cost.network import simulate
from labs.cost.schedules import around
from labs.cost.sockets import RESULTS, fit, forecast
from labs.cost.topology import DEVICES, Level, Topology

HOP = 10.0


def nodes_of(g: int) -> Topology:
    """Nodes of g devices: no hops inside, hops of 10 s between, and bytes that cost nothing."""
    levels = Level("node", g, 0.0, 1e12), Level("uplink", 8 // g, HOP, 1e12)
    return Topology("by hand", DEVICES["H100"], levels, gap=0.0)


def seconds(rounds, g: int) -> float:
    return simulate(rounds, 8, nodes_of(g), pipelined=False, rendezvous=True)


@pytest.mark.parametrize("g", [1, 2, 4])
def test_a_ring_over_two_levels_takes_as_many_round_trips_as_over_one(g):
    """Each round waits for the device that receives from another node: fast links do not help.
    Without rendezvous a chunk crosses few of the slow links on its way."""
    assert seconds(around(8, 1.0, 14), g) == pytest.approx(14 * 2 * HOP)
    alone = simulate(around(8, 1.0, 14), 8, nodes_of(g), pipelined=False)
    assert alone <= (14 / g + 1) * HOP


if not (RESULTS / "times.json").exists():
    pytest.skip("labs/cluster is not here, nor what it measured", allow_module_level=True)

ROWS = json.loads((RESULTS / "times.json").read_text())["rows"]
FORECASTS = json.loads((RESULTS / "forecasts.json").read_text())
NUMBERS = FORECASTS["launch, hop, share"]


def test_stored_forecasts_are_those_of_the_model():
    again = [forecast(row, *NUMBERS) for row in ROWS]
    assert FORECASTS["seconds"] == pytest.approx(again, rel=1e-9)
    fitted = [row for row, use in zip(ROWS, FORECASTS["fitted"], strict=True) if use]
    assert fit(fitted) == pytest.approx(NUMBERS, rel=1e-2)
    assert len(ROWS) / 2 <= len(fitted) < 0.6 * len(ROWS)


@pytest.mark.parametrize("methods", [("tree", "gather"), ("ring",)], ids=" ".join)
def test_forecasts_of_what_was_not_fitted_come_within_a_quarter(methods):
    """Without rendezvous the forecast of a flat Allreduce was 0.37 of the measured time."""
    ratios = [
        seconds / row["seconds"]
        for row, seconds, use in zip(ROWS, FORECASTS["seconds"], FORECASTS["fitted"], strict=True)
        if row["method"] in methods and not use
    ]
    assert len(ratios) >= 4
    assert 0.8 < min(ratios) and max(ratios) < 1.25
