"""Collectives on a topology: the simulation by hand, and against closed formulas."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn.cost.network import (
    collective_rounds,
    collective_seconds,
    collective_sent_bytes,
    message_seconds,
    run,
    simulate,
    torus_coordinates,
)
from treeattn.cost.schedules import SCHEDULES, Round, schedule
from treeattn.cost.topology import H100, PRESETS, Device, Level, Topology, preset

# Three levels, and links to share: each device of a group of 4 has half a link out of it, and
# the 16 devices of a rack share one.
THREE_LEVELS = Topology(
    "three-levels",
    H100,
    (
        Level("near", 4, 1e-6, 1e11),
        Level("far", 4, 3e-6, 3e10, links=2),
        Level("farther", 8, 9e-6, 1e10, links=1),
    ),
    1e-6,
)
# One torus; and units and links that are no powers of two.
TORUS = preset("tpu-v5p")
SIX = replace(
    TORUS, name="six", levels=(Level("six to a node", 6, 1e-6, 1e9), Level("all", 8, 1e-5, 1e8))
)
THREE_PORTS = replace(
    preset("ethernet"),
    name="three-ports",
    levels=(preset("ethernet").levels[0], replace(preset("ethernet").levels[1], links=3)),
)


# ----------------------------------------------------------------------- closed formulas
#
# (seconds, rounds, bytes from the device that sends most): latency plus bytes over bandwidth,
# round by round, for switches and meshes whose units' sizes and links are powers of two.


class Formulas:
    """The formulas for p devices and messages of m bytes."""

    def __init__(self, p, m, topology):
        self.p, self.m, self.topology = p, m, topology
        self.sizes = [1, *np.cumprod([x.size for x in topology.levels[:-1]]).tolist()]
        self.core = 1 << (p.bit_length() - 1)
        self.depth = (p - 1).bit_length()  # ⌈log₂ p⌉

    def step(self, stride, m, senders=1):
        """Latency + bytes / bandwidth over the link to a device so far away.

        senders: devices of a unit, from its first, that send at once and may share links.
        """
        level = max(i for i, size in enumerate(self.sizes) if size <= stride)
        link = self.topology.levels[level]
        share = min(senders, -(-self.sizes[level] // link.links)) if link.links else 1
        return link.latency + share * m / link.bandwidth

    def ring(self):
        """p − 1 times the slowest link's step: every round waits for it."""
        rounds = self.p - 1
        return rounds * self.slowest(self.m), rounds, rounds * self.m

    def slowest(self, m):
        return max(self.step(size, m) for size in self.sizes if size < self.p)

    def round_trip(self):
        return self.p * self.slowest(self.m), self.p, self.p * self.m

    def ring_allreduce(self):
        rounds = 2 * (self.p - 1)
        return rounds * self.slowest(self.m / self.p), rounds, rounds * self.m / self.p

    def tree_allreduce(self):
        """Up and down; from a node, only the first device sends: nobody shares its link."""
        up = sum(self.step(1 << k, self.m) for k in range(self.depth))
        return 2 * up, 2 * self.depth, self.depth * self.m

    def butterfly(self):
        """All of a node's devices share the links out of it; two rounds more beyond the core."""
        p, m, core = self.p, self.m, self.core
        swaps = core.bit_length() - 1
        seconds = sum(self.step(1 << k, m, core) for k in range(swaps))
        if p == core:
            return seconds, swaps, swaps * m
        return seconds + 2 * self.step(core, m, p - core), swaps + 2, (swaps + 1) * m

    def hierarchical_allreduce(self):
        """Rings in nodes of g devices, a tree between them, each with 1/g of the message."""
        g = min(self.p, self.topology.node_size)
        if self.p % g:
            return self.tree_allreduce()
        part, depth = self.m / g, (self.p // g - 1).bit_length()
        within = (g - 1) * self.step(1, part)
        across = sum(self.step(g << k, part, g) for k in range(depth))
        return 2 * (within + across), 2 * (g - 1 + depth), (2 * (g - 1) + depth) * part


FORMULAS = {
    "ring": Formulas.ring,
    "round-trip": Formulas.round_trip,
    "all-gather": Formulas.ring,
    "ring-allreduce": Formulas.ring_allreduce,
    "tree-allreduce": Formulas.tree_allreduce,
    "hierarchical-allreduce": Formulas.hierarchical_allreduce,
    "butterfly": Formulas.butterfly,
}
# The H200's links are the H100's.
HIERARCHIES = [preset(n) for n in ("dgx-h100", "mi300x", "rtx4090", "ethernet")] + [THREE_LEVELS]


@pytest.mark.parametrize("topology", HIERARCHIES, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_closed_formulas(kind, topology):
    """Times, rounds and bytes, for devices that fill nodes and racks, or do not."""
    g = topology.node_size
    for p in (*range(2, 34), 47, 48, 63, 64):
        for m in (8320, 1e8):
            seconds, rounds, sent = FORMULAS[kind](Formulas(p, m, topology))
            assert collective_seconds(kind, p, m, topology) == pytest.approx(seconds), (p, m)
            assert collective_rounds(kind, p, g) == rounds
            assert collective_sent_bytes(kind, p, m, g) == pytest.approx(sent)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("topology", [*HIERARCHIES, TORUS, SIX, THREE_PORTS], ids=lambda t: t.name)
def test_every_round_run_gives_the_same(kind, topology):
    """`simulate` skips rounds that only repeat, and `collective_seconds` reuses what it knows."""
    for p, m in ((2, 1e6), (7, 1e6), (12, 0), (24, 1e6), (40, 1e6)):
        rounds = list(schedule(kind, p, m, topology))
        arrivals = [sent.arrival.max() for sent in run(rounds, p, topology)]
        found = simulate(rounds, p, topology)
        assert found.seconds == pytest.approx(max(arrivals))
        assert collective_seconds(kind, p, m, topology) == pytest.approx(found.seconds)
        sent = sum(np.bincount(x.source, minlength=p) * x.message_bytes for x in rounds)
        np.testing.assert_allclose(found.sent_bytes, sent)
        assert found.rounds == len(rounds)


def test_on_one_node_a_hierarchical_allreduce_is_a_ring():
    """To the last bit, so that neither is ever the faster one."""
    for p in range(2, 9):
        for m in np.logspace(3, 9, 7):
            ring, nodes = (
                collective_seconds(f"{kind}-allreduce", p, float(m), preset("dgx-h100"))
                for kind in ("ring", "hierarchical")
            )
            assert ring == nodes


@pytest.mark.parametrize("p", [*range(1, 18), 24, 31, 32])
@pytest.mark.parametrize("kind", ["ring", "round-trip", "all-gather"])
def test_what_is_passed_on_visits_everybody(kind, p):
    held = [i for i in range(p)]
    seen = [{i} for i in range(p)]
    for this in schedule(kind, p, 1, preset("dgx-h100")):
        before = list(held)
        for a, b in zip(this.source, this.target, strict=True):
            held[b] = before[a]
            seen[b].add(before[a])
    assert seen == [set(range(p))] * p
    if kind == "round-trip":
        assert held == list(range(p))  # home again


@pytest.mark.parametrize("p", [*range(1, 18), 24, 31, 32])
@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if "reduce" in kind or "fly" in kind])
def test_an_allreduce_sums_everything_once(kind, p):
    """Simulated on sets of who has contributed to each part of what is reduced.

    What arrives is added, or is the result and takes the place of what was there. In rings of g
    devices, with g parts, device i sends part i − r in the r-th round; before and after the tree
    between the nodes, that is the part which it has whole.
    """
    g = p if kind == "ring-allreduce" else min(p, 8) if kind.startswith("hier") else 1
    g = 1 if p % g else g
    held, ring_round = [[{i}] * g for i in range(p)], 0
    for this in schedule(kind, p, 1.0, preset("dgx-h100")):
        assert this.message_bytes == 1 / g
        before = [list(parts) for parts in held]
        for a, b in zip(this.source.tolist(), this.target.tolist(), strict=True):
            part = (a - ring_round) % g
            mine, theirs = before[b][part], before[a][part]
            assert not mine & theirs or mine <= theirs  # nothing counts twice
            held[b][part] = mine | theirs
        ring_round += int((this.source // g == this.target // g).all())
    assert held == [[set(range(p))] * g] * p


def test_a_ring_by_hand():
    """Four devices on two nodes: the slow link between the nodes times every step."""
    two = Topology("two", H100, (Level("near", 2, 1.0, 10.0), Level("far", 2, 5.0, 2.0)), 1.0)
    found = simulate(schedule("ring", 4, 20.0, two), 4, two)
    assert found.seconds == 3 * (5.0 + 20.0 / 2.0)
    assert found.rounds == 3
    assert found.sent_bytes.tolist() == [60.0] * 4


def test_a_tree_by_hand():
    """Up: 1 → 0 and 3 → 2 near, 2 → 0 far; and the same down."""
    two = Topology("two", H100, (Level("near", 2, 1.0, 10.0), Level("far", 2, 5.0, 2.0)), 1.0)
    rounds = list(schedule("tree-allreduce", 4, 20.0, two))
    sent = [[(int(a), int(b)) for a, b in zip(r.source, r.target, strict=True)] for r in rounds]
    assert sent == [[(1, 0), (3, 2)], [(2, 0)], [(0, 2)], [(0, 1), (2, 3)]]
    assert simulate(rounds, 4, two).seconds == 2 * (3.0 + 15.0)


def test_devices_wait_only_for_their_partners():
    """A fast pair is done while a slow one is not; what follows on the fast pair waits for none."""
    two = Topology("two", H100, (Level("near", 2, 1.0, 10.0), Level("far", 4, 5.0, 1.0)), 1.0)
    fast = Round(np.array([0]), np.array([1]), 10.0)
    slow = Round(np.array([2]), np.array([4]), 10.0)
    assert simulate([slow], 8, two).seconds == 15.0
    assert simulate([slow, fast, fast], 8, two).seconds == 15.0
    assert simulate([slow, fast, Round(np.array([1]), np.array([2]), 10.0)], 8, two).seconds == 30.0


def test_a_wait_is_passed_on_before_repeated_rounds_are_skipped():
    """Device 1 is late; what 1 → 2 → 3 send twice reaches 3 late only the second time."""
    one = Topology("one", H100, (Level("link", 4, 1.0, 10.0),), 1.0)
    late = Round(np.array([0]), np.array([1]), 100.0)  # until 11
    chain = Round(np.array([1, 2]), np.array([2, 3]), 10.0)  # 2 s; the second, until 15
    last = Round(np.array([3]), np.array([0]), 10.0)
    assert simulate([late, chain, chain, last], 4, one).seconds == 17.0
    assert simulate([late, *[chain] * 50, last], 4, one).seconds == 11.0 + 50 * 2 + 2


def test_links_are_shared():
    """Four devices of a node that send at once over two links take turns in pairs."""
    first = np.arange(4)
    for links, turns in ((None, 1), (4, 1), (2, 2), (1, 4)):
        near, far = Level("near", 4, 1.0, 1e9), Level("far", 2, 1.0, 10.0, links=links)
        topology = Topology("t", H100, (near, far), 1.0)
        out = Round(first, first + 4, 100.0)
        assert message_seconds(out, topology).tolist() == [1.0 + turns * 10.0] * 4
        # One sender does not share, and what arrives does not slow what leaves.
        assert message_seconds(Round(first[:1], first[:1] + 4, 100.0), topology) == 11.0
        both = Round(np.array([0, 4]), np.array([4, 0]), 100.0)
        assert message_seconds(both, topology).tolist() == [11.0, 11.0]


def test_a_switch_gives_each_device_one_link_and_a_mesh_one_for_each_pair():
    to_all = Round(np.zeros(3, int), np.arange(1, 4), 10.0)
    for wiring, seconds in (("switch", 1.0 + 3.0), ("mesh", 1.0 + 1.0)):
        topology = Topology("t", H100, (Level("l", 4, 1.0, 10.0, wiring=wiring),), 1.0)
        assert message_seconds(to_all, topology).tolist() == [seconds] * 3


@pytest.mark.parametrize("sides", [(4,), (4, 6), (2, 4, 4), (16, 16, 16)])
def test_torus_path(sides):
    """Successive devices are neighbours, and so are the last and the first."""
    n = int(np.prod(sides))
    at = torus_coordinates(np.arange(n), sides)
    assert len({tuple(c) for c in at.T}) == n
    step = np.abs(np.roll(at, -1, axis=1) - at)
    step = np.minimum(step, np.array(sides)[:, None] - step)
    assert (step.sum(axis=0) == 1).all()


def test_torus_hops():
    """A message takes the shorter way around, hop by hop; crossing messages share links."""
    ring = Topology("r", H100, (Level("l", 8, 1.0, 10.0, wiring=(8,)),), 1.0)
    distance = message_seconds(Round(np.zeros(7, int), np.arange(1, 8), 0.0), ring)
    assert distance.tolist() == [1.0, 2.0, 3.0, 4.0, 3.0, 2.0, 1.0]
    # 0 → 2 and 1 → 3 share the link from 1 to 2.
    shared = message_seconds(Round(np.array([0, 1]), np.array([2, 3]), 10.0), ring)
    assert shared.tolist() == [2.0 + 2.0, 2.0 + 2.0]


def test_thousands_of_devices():
    """4,096 devices: 12 rounds of a butterfly, 8,190 of a ring's Allreduce."""
    topology = preset("dgx-h100")
    for kind, rounds in (("butterfly", 12), ("tree-allreduce", 24), ("ring-allreduce", 8190)):
        found = simulate(schedule(kind, 4096, 8320.0, topology), 4096, topology)
        seconds, *_ = FORMULAS[kind](Formulas(4096, 8320.0, topology))
        assert found.rounds == rounds == collective_rounds(kind, 4096, topology.node_size)
        assert found.seconds == pytest.approx(seconds)
        assert collective_seconds(kind, 4096, 8320.0, topology) == pytest.approx(seconds)


@given(
    kind=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(2, 64),
    message_bytes=st.floats(1, 1e9),
    factor=st.floats(1, 100),
    name=st.sampled_from(sorted(PRESETS)),
)
def test_monotone(kind, p, message_bytes, factor, name):
    """More bytes, slower links or longer latencies never take less time."""
    topology = preset(name)

    def seconds(topology, message_bytes):
        return collective_seconds(kind, p, message_bytes, topology)

    def with_levels(**scale):
        return replace(
            topology,
            levels=tuple(
                replace(x, **{k: getattr(x, k) * f for k, f in scale.items()})
                for x in topology.levels
            ),
        )

    base = seconds(topology, message_bytes) * (1 - 1e-12)
    assert seconds(topology, message_bytes * factor) >= base
    assert seconds(with_levels(latency=factor), message_bytes) >= base
    assert seconds(with_levels(bandwidth=1 / factor), message_bytes) >= base


@given(
    kind=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(2, 64),
    message_bytes=st.floats(1, 1e9),
    unit=st.sampled_from([1e-3, 7.0, 1e6]),
)
def test_dimensions(kind, p, message_bytes, unit):
    """Measured in other units, a time is the same time: the formulas mix up no dimensions.

    Bytes only occur with bandwidths, and all times scale together.
    """
    seconds = collective_seconds(kind, p, message_bytes, THREE_LEVELS)
    in_other_bytes = replace(
        THREE_LEVELS,
        levels=tuple(replace(x, bandwidth=x.bandwidth * unit) for x in THREE_LEVELS.levels),
    )
    in_other_seconds = replace(
        THREE_LEVELS,
        levels=tuple(
            replace(x, bandwidth=x.bandwidth / unit, latency=x.latency * unit)
            for x in THREE_LEVELS.levels
        ),
    )
    assert collective_seconds(kind, p, message_bytes * unit, in_other_bytes) == pytest.approx(
        seconds
    )
    assert collective_seconds(kind, p, message_bytes, in_other_seconds) == pytest.approx(
        seconds * unit
    )


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    topology = preset("dgx-h100")
    with pytest.raises(ValueError, match=r"topology: expected one of dgx-h100, .*, got 'dgx'"):
        preset("dgx")
    with pytest.raises(ValueError, match=r"kind: expected one of ring, .* got 'star'"):
        schedule("star", 4, 1.0, topology)
    with pytest.raises(ValueError, match=r"kind: expected one of ring, .* got 'star'"):
        collective_seconds("star", 4, 1.0, topology)
    for p, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="p: "):
            collective_seconds("ring", p, 1.0, topology)
        with pytest.raises(error, match="p: "):
            schedule("ring", p, 1.0, topology)
    with pytest.raises(ValueError, match="at most 4096 devices, got 5000"):
        simulate([], 5000, topology)
    for field, value in (
        ("latency", 0.0),
        ("latency", -1e-6),
        ("bandwidth", 0),
        ("bandwidth", float("inf")),
        ("bandwidth", float("nan")),
        ("size", 0),
        ("links", 0),
    ):
        with pytest.raises(ValueError, match=f"{field}: expected"):
            replace(topology.levels[0], **{field: value})
    with pytest.raises(TypeError, match="bandwidth: expected a number, got '450'"):
        Level("NVLink", 8, 1e-6, "450")
    with pytest.raises(ValueError, match="wiring: expected"):
        Level("l", 8, 1e-6, 1e9, wiring="star")
    with pytest.raises(ValueError, match="does not hold 9 units"):
        Level("l", 9, 1e-6, 1e9, wiring=(2, 4))
    with pytest.raises(ValueError, match="levels: expected at least one"):
        Topology("t", H100, (), 1e-6)
    with pytest.raises(ValueError, match="only the innermost"):
        Topology("t", H100, (Level("a", 2, 1, 1), Level("b", 2, 1, 1, wiring="mesh")), 1e-6)
    with pytest.raises(ValueError, match="memory_bandwidth: expected"):
        Device("d", 1e9, 0.0, 1e12)


def test_presets_are_what_they_are_named_for():
    """The numbers of the data sheets that the sources print as well (v1 §6)."""
    dgx = preset("dgx-h100")
    nvlink, infiniband = dgx.levels
    assert 2 * nvlink.bandwidth == 900e9  # 900 GB/s, both directions together
    assert infiniband.bandwidth * 8 == 400e9  # 400 Gb/s
    assert dgx.node_size * infiniband.bandwidth * 8 == 3.2e12  # "3.2 Tbps node injection"
    for name, topology in PRESETS.items():
        assert topology.name == name
        assert topology.capacity >= 1024
