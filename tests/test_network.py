"""Collectives on a topology: the simulation by hand, and the closed forms against it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn.cost.closed_forms import (
    FORMULAS,
    collective_rounds,
    collective_seconds,
    collective_sent_bytes,
)
from treeattn.cost.network import (
    SCHEDULES,
    Round,
    message_seconds,
    schedule,
    simulate,
    torus_coordinates,
)
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
# The H200's links are the H100's.
HIERARCHIES = [
    *(t for t in PRESETS.values() if t.has_closed_forms() and t.name != "dgx-h200"),
    THREE_LEVELS,
]


@pytest.mark.parametrize("topology", HIERARCHIES, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_closed_forms_are_the_simulation(kind, topology):
    """Times, rounds and bytes, for every number of devices up to 64, filling nodes or not."""
    for p in range(2, 65):
        for message_bytes in (8320, 1e8):
            found = simulate(schedule(kind, p, message_bytes, topology), p, topology)
            assert found.seconds == pytest.approx(FORMULAS[kind](p, message_bytes, topology))
            g = topology.node_size
            assert found.rounds == collective_rounds(kind, p, g)
            assert found.sent_bytes.max() == pytest.approx(
                collective_sent_bytes(kind, p, message_bytes, g)
            )


def test_collective_seconds_simulates_where_no_formula_holds():
    torus = preset("tpu-v5p")
    six = replace(torus, levels=(Level("six to a node", 6, 1e-6, 1e9), Level("all", 8, 1e-5, 1e8)))
    near, far = preset("ethernet").levels
    three_ports = replace(torus, levels=(near, replace(far, links=3)))
    for topology in (torus, six, three_ports):
        assert not topology.has_closed_forms()
        for kind in SCHEDULES:
            for p in (2, 7, 12, 40):
                expected = simulate(schedule(kind, p, 1e6, topology), p, topology).seconds
                assert collective_seconds(kind, p, 1e6, topology) == pytest.approx(expected)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("p", [*range(1, 18), 24, 31, 32])
def test_everybody_gets_everything(kind, p):
    """Each schedule spreads what it must: simulated on sets of who has contributed.

    An Allreduce by parts is followed part by part: part c is what ends up whole on rank c.
    """
    topology = preset("dgx-h100")
    if kind in ("ring", "round-trip", "all-gather"):
        held = [{i} for i in range(p)]  # what it holds now; in a ring it is passed on
        seen = [{i} for i in range(p)]
        for this in schedule(kind, p, 1, topology):
            before = [set(x) for x in held]
            for a, b in zip(this.source, this.target, strict=True):
                held[b] = before[a]
                seen[b] |= before[a]
        assert seen == [set(range(p))] * p
        if kind == "round-trip" and p > 1:
            assert held == [{i} for i in range(p)]
    elif kind in ("tree-allreduce", "butterfly"):
        seen = [{i} for i in range(p)]
        for this in schedule(kind, p, 1, topology):
            before = [set(x) for x in seen]
            for a, b in zip(this.source, this.target, strict=True):
                if kind == "butterfly" and len(this.source) == 2 ** (p.bit_length() - 1):
                    assert not seen[b] & before[a] or p == 1  # nothing counts twice
                seen[b] |= before[a]
        assert seen == [set(range(p))] * p
    else:  # a chain around the ring adds up each part: all of its edges carry p − 1 parts, twice
        sent = simulate(schedule(kind, p, 1.0, topology), p, topology).sent_bytes
        assert sent.sum() >= 2 * (p - 1) - 1e-9  # no Allreduce sends less in all


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
        assert found.rounds == rounds
        assert found.seconds == pytest.approx(FORMULAS[kind](4096, 8320.0, topology))


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
