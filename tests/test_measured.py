"""Measured collectives: their fits, their file, their measuring, and what method="auto" takes."""

import functools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention

from treeattn import kv_mesh, tree_decode
from treeattn.cost import collectives, merge_messages
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
from treeattn.devices.auto import StateSize, collectives_of, fastest_method
from treeattn.measured import (
    KINDS,
    VARIABLE,
    CollectiveTimes,
    Fit,
    Group,
    fit_line,
    fit_ranges,
    read_measured,
    write_measured,
)

EIGHT = jax.devices()[:8]


def times_of(lines: dict, groups=((2, 1), (2, 4), (4, 1), (4, 2), (8, 1))) -> CollectiveTimes:
    """Of each kind (latency, seconds per byte) for groups of eight devices; the others are slow."""
    slow = (1.0, 0.0)
    fits = {
        (kind, Group(*group)): [Fit(math.inf, *lines.get(kind, slow))]
        for kind in KINDS
        for group in groups
    }
    return CollectiveTimes("cpu", 8, "2026-01-01", {"jax": jax.__version__}, fits)


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
        ({"fits": []}, "has no fits"),
        ({"fits": [{}]}, "cannot be read: KeyError"),
        ({"count": None}, "cannot be read: TypeError"),
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
    _, _, table = capsys.readouterr().out.partition("measured on 8 × cpu on 2026-01-01")
    assert table.count("helix") == 1 + 5 and "8 devices, every 1" in table
    nowhere = str(tmp_path / "no" / "times.json")
    for bad in (["--context", "8000", "--measured", nowhere], ["--calibrate", nowhere]):
        with pytest.raises(SystemExit) as ended:
            main(bad)
        assert ended.value.code == 2 and "no" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- auto

FLAT = kv_mesh(EIGHT)
NODES = kv_mesh(EIGHT, nodes=2)
B, L, H, KV, D = 2, 1, 8, 2, 16


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(7)
    shapes = ((B, L, H, D), (B, 64, KV, D), (B, 64, KV, D))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "methods"),
    [
        (FLAT, ("allreduce", "butterfly", "gather", "reduce_scatter", "all_to_all")),
        (NODES, ("allreduce", "reduce_scatter", "hierarchical")),
    ],
    ids=["flat", "nodes"],
)
@pytest.mark.parametrize("wire", [None, "float32", "bfloat16"])
def test_what_auto_counts_is_what_is_compiled(mesh, methods, wire):
    """Kinds and bytes of every method's collectives, 16-bit inputs, whole and scattered."""
    q, k, v = arrays(jnp.bfloat16)
    groups = [Group(8)] if mesh is FLAT else [Group(2, 4), Group(4)]
    item = None if wire is None else jnp.dtype(wire).itemsize
    size = StateSize(B * L, H, D, item=4, out_item=2, wire=item)
    for method in methods:
        if wire == "bfloat16" and method not in ("butterfly", "gather", "all_to_all"):
            continue  # a CPU adds up 16 bits as 32
        for scatter in (False, True):
            if scatter and method in ("allreduce", "butterfly", "gather"):
                continue
            decode = jax.jit(
                lambda q, k, v, m=method, s=scatter: tree_decode(
                    q, k, v, mesh=mesh, axis=mesh.axis_names, method=m, scatter=s, wire=wire
                )
            )
            found = collectives(decode.lower(q, k, v).compile())
            seen = [(x.kind, x.operand_bytes) for x in found for _ in range(x.count)]
            counted = collectives_of(method, size, groups, Group(8), scatter=scatter)
            assert sorted(seen) == sorted((x.kind, x.size) for x in counted), (method, scatter)


FAST = (1e-6, 1e-12)


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        ({"all-reduce": FAST}, {}, "allreduce"),
        ({"collective-permute": FAST}, {}, "butterfly"),
        ({"all-gather": FAST}, {}, "gather"),
        ({"all-gather": FAST, "all-to-all": (1e-9, 0.0)}, {}, "all_to_all"),
        ({"all-to-all": FAST}, {"scatter": True}, "all_to_all"),
        ({"all-reduce": FAST, "reduce-scatter": FAST}, {"scatter": True}, "reduce_scatter"),
        ({"all-gather": FAST, "all-reduce": (1e-9, 0.0)}, {"block": 8}, "gather"),
    ],
)
def test_auto_takes_what_is_fastest(lines, options, expected, monkeypatch):
    """By invented times, and the result is dense attention's; from an argument or the variable."""
    taken = []

    def spy(*args, **kwargs):
        taken.append(fastest_method(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr("treeattn.devices.decode.fastest_method", spy)
    q, k, v = arrays()
    out = tree_decode(
        q, k, v, mesh=FLAT, axis="kv", method="auto", measured=times_of(lines), **options
    )
    assert taken == [expected]
    np.testing.assert_allclose(out, dense_attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_auto_over_nodes_and_with_other_axes():
    """Groups as the mesh has them: neighbours are near, nodes four apart; rows and heads divide."""
    from treeattn.devices.layout import Layout
    from treeattn.kernel.inputs import check_inputs

    inputs = check_inputs(*arrays(), None, None, None, None)
    near_only = times_of({"all-reduce": FAST, "all-gather": FAST})
    fits = dict(near_only.fits)
    fits["all-reduce", Group(2, 4)] = [Fit(math.inf, 1.0, 0.0)]  # between nodes
    fits["all-gather", Group(2, 4)] = [Fit(math.inf, 1e-3, 0.0)]
    times = replace(near_only, fits=fits)
    layout = Layout(NODES, ("node", "device"))
    assert fastest_method(times, inputs, layout) == "gather"
    mesh = kv_mesh(EIGHT, batch=2)
    assert fastest_method(near_only, inputs, Layout(mesh, ("kv",), batch=("batch",))) == "gather"
    with pytest.raises(ValueError, match=r"devices: .* was measured among \[8\] devices, got 4"):
        few = times_of({}, groups=((8, 1),))
        fastest_method(few, inputs, Layout(mesh, ("kv",), batch=("batch",)))


def test_auto_without_times_and_by_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    q, k, v = arrays()
    decode = jax.jit(lambda q, k, v: tree_decode(q, k, v, mesh=FLAT, axis="kv", method="auto"))
    found = [x.kind for x in collectives(decode.lower(q, k, v).compile())]
    assert found == ["all-reduce"] * 2
    path = tmp_path / "times.json"
    write_measured(times_of({"all-gather": FAST}), path)
    monkeypatch.setenv(VARIABLE, str(path))
    decode = jax.jit(lambda q, k, v: tree_decode(q, k, v, mesh=FLAT, axis="kv", method="auto"))
    assert [x.kind for x in collectives(decode.lower(q, k, v).compile())] == ["all-gather"]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no.json"))
    with pytest.raises(ValueError, match=r"measured: cannot read .*no\.json"):
        tree_decode(q, k, v, mesh=FLAT, axis="kv", method="auto")
    with pytest.raises(ValueError, match="method: expected one of"):
        tree_decode(q, k, v, mesh=FLAT, axis="kv", method="best")
