"""The times in results/times.json, which README and ledger repeat. The notebook has the ratios."""

import itertools
import json

from labs.cluster.measure import FILE

ROWS = json.loads(FILE.read_text())["rows"]
SLOW_MOTION = {"p": 8, "nodes": 2, "inter": 100e6}


def seconds(method: str) -> list[float]:
    """The times in slow motion on two nodes of four, with 512, 2,048, 8,192 and 32,768 keys."""
    found = [x for x in ROWS if x | SLOW_MOTION == x and x["method"] == method]
    assert [row["keys"] for row in found] == [512, 2048, 8192, 32768]
    return [row["seconds"] for row in found]


def test_a_ring_takes_longer_with_the_context_and_the_others_do_not():
    ring = seconds("ring")
    assert all(2 * short < long for short, long in itertools.pairwise(ring[1:]))
    assert ring[0] < ring[1]
    for method, factor in (("tree", 1.2), ("butterfly", 2.0)):
        times = seconds(method)
        assert max(times) < factor * min(times)
