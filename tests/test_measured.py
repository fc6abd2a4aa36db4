"""Measured collectives: their fits, their file, their measuring, and the command line."""

import functools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measured_times import times_of

from treeattn.cost import (
    MODELS,
    Plan,
    advise,
    collective_seconds,
    collectives,
    every_nth,
    merge_messages,
    preset,
)
from treeattn.cost.__main__ import main
from treeattn.cost.calibration import (
    all_groups,
    calibrate,
    collective_program,
    group_mesh,
    measured_seconds,
)
from treeattn.cost.formulas import Workload
from treeattn.cost.groups import groups as groups_of
from treeattn.cost.priced import network_text
from treeattn.measured import (
    KINDS,
    VARIABLE,
    CollectiveTimes,
    Fit,
    Group,
    find_measured,
    fit_line,
    fit_ranges,
    read_measured,
    write_measured,
)

EIGHT = jax.devices()[:8]


# ------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize(
    ("latency", "per_byte"), [(12e-6, 1e-10), (3e-3, 0.0), (0.0, 2e-9), (1e-7, 4e-12)]
)
def test_a_line_is_found_again(latency, per_byte):
    times = {size: latency + size * per_byte for size in (256, 4_096, 65_536, 1 << 20)}
    assert fit_line(times) == pytest.approx((latency, per_byte), rel=1e-6, abs=1e-18)


@pytest.mark.parametrize(
    "seconds", [(9.0, 4.0, 3.0, 1.0), (1.0, 4.0, 30.0, 300.0), (5.0, 5.5, 4.8, 7.0)]
)
def test_a_line_has_no_negative_part_and_none_is_better(seconds):
    """Against a grid of lines."""
    sizes = np.array([1.0, 2.0, 10.0, 50.0])
    latency, per_byte = fit_line(dict(zip((1, 2, 10, 50), seconds, strict=True)))
    assert latency >= 0 and per_byte >= 0

    def error(a, b):
        return (((a + b * sizes) / np.array(seconds) - 1) ** 2).sum()

    grid = np.linspace(0, 10, 101)
    assert error(latency, per_byte) <= min(error(a, b) for a in grid for b in grid) + 1e-12


def test_ranges_have_lines_of_their_own():
    """Two slopes that part at 1,000 bytes, where both have a size."""
    times = {n: 1e-6 * (10 + n / 100) for n in (10, 100, 1_000)}
    times |= {n: 1e-6 * n / 50 for n in (1_000, 4_000, 9_000)}
    first, last = fit_ranges(times, (1_000,))
    assert last == (math.inf, pytest.approx(0.0, abs=1e-15), pytest.approx(2e-8))
    assert first[0] == 1_000 and first.latency > 9e-6


def test_bad_times():
    with pytest.raises(ValueError, match=r"times: expected two sizes at least, got \[8\]"):
        fit_line({8: 1.0})
    with pytest.raises(ValueError, match=r"times: expected finite seconds above 0, got \[1.0, 0"):
        fit_line({8: 1.0, 16: 0.0})
    with pytest.raises(ValueError, match="times: expected two sizes at least"):
        fit_ranges({8: 1.0, 16: 1.0}, (4, 8))


# ------------------------------------------------------------------------------------- the file


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "times.json"
    times = times_of({"all-reduce": (5e-6, 1e-11)})
    two = [Fit(1024.0, 1e-6, 1e-9), Fit(math.inf, 2e-6, 1e-10)]
    times = replace(times, fits={**times.fits, ("all-to-all", Group(2, 4)): two})
    write_measured(times, path)
    assert read_measured(path) == times
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]
    write_measured(times_of({}), path)  # another time, and another file of that name
    assert read_measured(str(path)) == times_of({})


def test_seconds_of_the_nearest_group_and_range():
    fits = {
        ("all-reduce", Group(2, 1)): [Fit(100.0, 1.0, 0.0), Fit(math.inf, 2.0, 1.0)],
        ("all-reduce", Group(2, 8)): [Fit(math.inf, 7.0, 0.0)],
    }
    times = CollectiveTimes("cpu", 16, "2026-01-01", {}, fits)
    assert times.groups == [Group(2, 1), Group(2, 8)]
    assert times.seconds("all-reduce", 100, 2) == 1.0
    assert times.seconds("all-reduce", 101, 2) == 103.0
    assert [times.seconds("all-reduce", 8, 2, stride) for stride in (2, 4, 16)] == [1.0, 7.0, 7.0]
    assert times.seconds("all-gather", 100, 1) == 0.0
    with pytest.raises(ValueError, match=r"devices: all-reduce was measured among \[2\] devices, "):
        times.seconds("all-reduce", 8, 4)
    with pytest.raises(ValueError, match=r"kind: expected one of all-reduce, .* got 'broadcast'"):
        times.seconds("broadcast", 8, 2)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_file_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # as good as none
    assert find_measured() is None
    for bad in (3, {}, ["times.json"], b"times.json"):
        with pytest.raises(TypeError, match="measured: expected CollectiveTimes, the path of a"):
            find_measured(bad)
    with pytest.raises(ValueError, match="measured: "):
        find_measured("")


def test_bad_files_are_refused_by_name(tmp_path):
    path = tmp_path / "times.json"
    with pytest.raises(ValueError, match=r"measured: cannot read .*times\.json: No such file"):
        read_measured(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"measured: .*times\.json is no JSON file"):
        read_measured(path)
    write_measured(times_of({}), path)
    good = json.loads(path.read_text())
    row = good["fits"][0]
    line = row["ranges"][0]
    for changes, message in (
        ({"format": "another"}, "should have the format .* got 'another'"),
        ({"fits": []}, "has no fits, or"),
        ({"fits": [{}]}, "cannot be read: KeyError"),
        ({"count": None}, "cannot be read: TypeError"),
        ({"mesh": "2x4"}, "cannot be read: .*expected no keys but format, .*, got mesh"),
        ({"fits": [row | {"axis": "kv"}]}, "no keys but kind, devices, stride, ranges, got axis"),
        ({"fits": [row | {"ranges": [line | {"least": 0}]}]}, "no keys but most, .*, got least"),
        ({"fits": [row, row]}, "has no fits, or several of one kind and group"),
        ({"fits": [row | {"kind": "psum"}]}, "cannot be read: .*kind: expected one of"),
        ({"fits": [row | {"devices": 1}]}, "cannot be read: .*group: expected two devices"),
        ({"fits": [row | {"ranges": []}]}, "cannot be read: .*ranges: expected ends"),
        ({"fits": [row | {"ranges": [line | {"most": 8}]}]}, "ranges: expected ends that grow"),
        ({"fits": [row | {"ranges": [line | {"latency": -1}]}]}, "ranges: expected times of 0"),
    ):
        path.write_text(json.dumps(good | changes))
        with pytest.raises(ValueError, match=rf"measured: .*times\.json.*{message}"):
            read_measured(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"should have the format .* got None"):
        read_measured(path)


# ------------------------------------------------------------------------------------- measuring


def test_groups_of_eight():
    found = [(2, 1), (2, 4), (4, 1), (4, 2), (8, 1)]
    assert all_groups(8) == found
    assert all_groups(6) == [(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)]
    for group in ((3, 1), (1, 1), (4, 4), (2, 0)):
        with pytest.raises(ValueError, match="groups: 8 devices do not fall into groups like"):
            group_mesh(EIGHT, Group(*group))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_is_that_collective_among_those_devices(kind):
    """One in the compiled program, of the bytes it is told; 0 and 2 are neighbours in a group."""
    mesh = group_mesh(EIGHT, Group(4, 2))
    program = collective_program(kind, mesh).lower(jax.ShapeDtypeStruct((8, 64), jnp.float32))
    compiled = program.compile()
    (found,) = collectives(compiled)
    assert (found.kind, found.count, found.operand_bytes) == (kind, 1, 4 * 64)
    lines = compiled.as_text().splitlines()
    (line,) = (x for x in lines if f"{kind}(" in x or f"{kind}-start(" in x)
    written = groups_of(line)
    if kind == "collective-permute":
        assert [0, 2] in written and [6, 0] in written
    else:
        assert written == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_calibrating_eight_devices(tmp_path):
    path = tmp_path / "times.json"
    told = []
    some = {"groups": [(2, 4), (8, 1)], "sizes": (256, 4_096, 65_536), "ends": (4_096,)}
    times = calibrate(path, EIGHT, repeats=2, tell=told.append, **some)
    assert read_measured(path) == times
    assert times.groups == [(2, 4), (8, 1)] and len(times.fits) == 2 * len(KINDS)
    assert (times.count, times.versions["jax"]) == (8, jax.__version__)
    assert len(told) == 2 and told[1].startswith("8 devices, every 1: an Allreduce from ")
    for kind in KINDS:
        assert 0 < times.seconds(kind, 8_192, 8) < 60


def test_bad_calibrations(tmp_path):
    with pytest.raises(
        ValueError, match="devices: expected two at least to measure between, got 1"
    ):
        calibrate(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"path: there is no folder .*nowhere"):
        calibrate(tmp_path / "nowhere" / "times.json")
    with pytest.raises(ValueError, match="repeats: "):
        calibrate(repeats=0)


def test_a_merge_by_what_was_measured():
    """Two Allreduces of 8 devices; three rounds of a butterfly."""
    times = times_of({"all-reduce": (1.0, 1.0), "collective-permute": (10.0, 0.0)})
    w = Workload(1024)
    joined = merge_messages("tree-joined", w, 8)
    assert measured_seconds(times, joined, Group(8)) == 2 * 1.0 + 8_320
    assert measured_seconds(times, merge_messages("butterfly", w, 8), Group(8)) == 30.0
    with pytest.raises(ValueError, match=r"messages: expected collectives among .* got 'one-shot'"):
        measured_seconds(times, merge_messages("one-shot", w, 8), Group(8))


# ------------------------------------------------------------------------------------- advice

DGX = preset("dgx-h100")
QUICK = dict.fromkeys(KINDS, (1e-6, 1e-12))


def test_a_measured_group_counts_as_measured():
    """Kind by kind, as the measured bytes say; among other groups the description stays."""
    lines = dict(zip(KINDS, [(n * 1e-3, n * 1e-9) for n in (2, 3, 5, 7, 11)], strict=True))
    there = DGX.as_measured(times_of(lines))
    line = {
        "allreduce": 2,
        "all-gather": 3,
        "reduce-scatter": 5,
        "all-to-all": 7,
        "butterfly": 3 * 11,  # rounds among 8
        "ring": 7 * 11,
    }
    for kind, n in line.items():
        expected = n * (1e-3 + 1e-9 * 4096)
        assert collective_seconds(kind, 8, 4096, there) == pytest.approx(expected)
        assert collective_seconds(kind, 16, 4096, there) == collective_seconds(kind, 16, 4096, DGX)
    assert collective_seconds("allreduce", 1, 4096, there) == 0
    with pytest.raises(ValueError, match="kind: one-shot reads other devices' memory"):
        collective_seconds("one-shot", 8, 4096, there)
    # Two nodes of four: the neighbours' groups, and every fourth device's.
    four = replace(DGX, levels=(replace(DGX.levels[0], size=4), *DGX.levels[1:]))
    parts = ((5, 4096), (2, 1024), (3, 1024))
    expected = sum(n * (1e-3 + 1e-9 * size) for n, size in parts)
    found = collective_seconds("hierarchical-allreduce", 8, 4096, four.as_measured(times_of(lines)))
    assert found == pytest.approx(expected)
    # Every fourth of eight devices; not every other one, which were not measured.
    far = replace(times_of({}), fits={("all-reduce", Group(2, 4)): [Fit(math.inf, 9.0, 0.0)]})
    apart = [every_nth(DGX.as_measured(far), stride) for stride in (4, 2)]
    assert [collective_seconds("allreduce", 2, 8, x) == 9.0 for x in apart] == [True, False]


def test_measured_times_reverse_the_advice():
    """Short contexts on eight GPUs: their heads, unless Allreduces take a millisecond; then the
    sequence, with all weights everywhere. Long ones: by the merge whose collectives are fast."""
    model = MODELS["llama-3.1-8b"]
    described = advise(model, 1, 8_000, 8, DGX)[0]
    assert described.plan.family == "heads"
    slow = DGX.as_measured(times_of(QUICK | {"all-reduce": (1e-3, 0.0)}))
    best = advise(model, 1, 8_000, 8, slow)[0]
    assert str(best.plan) == "8× sequence, gather, weights everywhere"
    merges = []
    for kind in ("all-to-all", "all-gather", "collective-permute"):
        lines = {"all-reduce": (1e-5, 0.0), "all-gather": (1e-5, 0.0), kind: (1e-9, 0.0)}
        steps = advise(model, 1, 1_000_000, 8, DGX.as_measured(times_of(lines)))
        merges.append(next(x.plan.merge for x in steps if x.plan.family == "sequence"))
    assert merges == ["a2a", "gather", "butterfly"]
    assert all(x.plan.merge != "one-shot" for x in steps)


def test_the_advice_names_its_network(tmp_path, capsys):
    """Measured groups, and those of which the file has none; without a file not a word of it."""
    path = tmp_path / "times.json"
    write_measured(times_of(QUICK | {"all-reduce": (1e-3, 0.0)}), path)

    def lines(*more):
        assert main(["--context", "1000000", *more]) == 0
        return capsys.readouterr().out.split("ms  ")[0].splitlines()[2:]

    plain = lines()
    assert len(plain) == 2 and "8× heads" in plain[0]
    do, *network, _ = lines("--measured", str(path))
    assert "8× sequence" in do and "weights everywhere" in do
    assert network[0].startswith("network: as measured on 8 × cpu on 2026-01-01 (jax ")
    assert "as dgx-h100 is described among groups of devices that were not" in network[1]
    assert network[-1] == "  of this plan: merges among 8 measured"
    there = DGX.as_measured(read_measured(path))
    plan = Plan(1, 8, 2, "gather", True, 2)
    assert network_text(plan, there, 16)[-2:] == [
        "  of this plan: merges among 2, every 8, described; Allreduces among 8 measured",
        "  measured and described times do not compare: calibrate on all 16 devices",
    ]
    assert network_text(plan, DGX, 16) == []


def test_the_command_line_calibrates_and_advises(tmp_path, capsys, monkeypatch):
    """It writes a file and ends; the advice prints its merges, and refuses another file by name."""
    path = tmp_path / "times.json"
    few = functools.partial(
        calibrate, devices=EIGHT, groups=[(8, 1)], sizes=(256, 4_096), ends=(), repeats=1
    )
    monkeypatch.setattr("treeattn.cost.calibration.calibrate", few)
    with pytest.raises(SystemExit) as ended:
        main(["--calibrate", str(path)])
    assert ended.value.code == 0 and read_measured(path).groups == [(8, 1)]
    write_measured(times_of({"all-to-all": (3e-6, 0.0)}), path)
    capsys.readouterr()
    assert main(["--context", "8000", "--measured", str(path)]) == 0
    advice, _, table = capsys.readouterr().out.partition("\nmeasured on 8 × cpu on 2026-01-01")
    assert "network: as measured on 8 × cpu on 2026-01-01 (jax " in advice
    assert "sending as told above" in advice and "the network's model" not in advice
    assert table.count("helix") == 1 + 5 and "8 devices, every 1" in table
    nowhere = str(tmp_path / "no" / "times.json")
    for bad in (["--context", "8000", "--measured", nowhere], ["--calibrate", nowhere]):
        with pytest.raises(SystemExit) as ended:
            main(bad)
        assert ended.value.code == 2 and "no" in capsys.readouterr().err
