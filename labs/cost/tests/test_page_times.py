"""The clock of the site's first page is this lab's, for a ring and a butterfly."""

import json
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, chromium

from labs.cost.network import simulate
from labs.cost.schedules import schedule
from labs.cost.topology import DEVICES, Level, Topology, preset

PAGE = Path(__file__).parents[3] / "site" / "one_page.html"


@pytest.mark.slow
def test_the_pages_clock(tmp_path):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    rng = np.random.default_rng(0)
    browser = Browser(tmp_path)
    browser.open(PAGE.as_uri(), prefers_reduced_motion="reduce")
    near, far = preset("dgx-h100").levels
    h100 = DEVICES["H100"]
    for _ in range(40):
        p, g, gigabytes = (
            rng.integers(2, 17),
            rng.choice([1, 2, 4, 8, 16]),
            rng.choice([1, 12.5, 450]),
        )
        context, queries = 2 ** rng.integers(4, 21), 2 ** rng.integers(0, 21)
        settings = {
            "devices": p,
            "pernode": g,
            "between": gigabytes,
            "context": context,
            "queries": queries,
        }
        settings = json.dumps(settings, default=lambda x: x.item())
        wires, all_of_it = browser.run(
            f"[false, true].map((costs) => race({{...now, ...{settings}, costs}}))"
        )
        outer = Level("between", 512, far.latency, gigabytes * 1e9)
        inner = Level("within", int(g), near.latency, near.bandwidth)
        topology = Topology("page", h100, (inner, outer) if g > 1 else (outer,), gap=0.0)
        for name, kind in (("tree", "butterfly"), ("ring", "ring")):
            size = wires[name]["bytes"]
            rounds = list(schedule(kind, int(p), size, int(g)))
            seconds = simulate(rounds, int(p), topology, pipelined=False)
            assert wires[name]["end"] == pytest.approx(seconds, rel=1e-9)
            reads = wires["ring"]["bytes"] / h100.memory_bandwidth * (p if name == "ring" else 1)
            whole = seconds + reads + len(rounds) * topology.launch
            assert all_of_it[name]["end"] == pytest.approx(whole, rel=1e-9)
    browser.close()
    assert browser.errors == []
