"""The times in results/times.json, repeated by README and ledger. The notebook checks the bytes."""

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


def test_the_multiple_is_what_the_context_makes_it():
    """Below one with few keys, since gloo's Allreduce sends more messages; then it grows."""
    ratios = [ring / tree for ring, tree in zip(seconds("ring"), seconds("tree"), strict=True)]
    assert ratios[0] < 0.6 and ratios[-1] > 5
    assert all(x < y for x, y in itertools.pairwise(ratios))


def test_a_ring_takes_as_long_as_its_slowest_link_needs():
    """Without delays, faster links inside a node do not help a ring."""
    rings = [row for row in ROWS if row["method"] == "ring" and row["delay"] == 0]
    assert {row["intra"] / row["inter"] for row in rings} == {1, 16}
    for row in rings:
        ideal = 7 * row["keys"] / 8 * 4096 * 8 / row["inter"]
        assert 0.95 < row["seconds"] / ideal < 1.3
