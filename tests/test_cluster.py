"""Simulated devices, meshes, and real processes: two of them, one raising, killed or absent."""

import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

import treeattn

HERE = Path(__file__).parent
WITHIN = 30.0  # seconds after a failure by which everybody must have ended


def start_rank(script: str, port: int, processes: int, rank: int, *more) -> subprocess.Popen:
    arguments = [f"127.0.0.1:{port}", str(processes), str(rank), *map(str, more)]
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def ranks():
    """Start two processes, or those present; whatever happens, they end with the test."""
    started = []

    def start(*what, present=(0, 1)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in present:
            started.append(start_rank("rank.py", port, 2, rank, *what))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen, line: str) -> None:
    for came in process.stdout:
        if came.strip() == line:
            return
    raise AssertionError(f"the process ended without printing {line!r}")


@pytest.mark.slow
def test_two_processes_decode_what_one_does(ranks):
    for process in ranks("decode"):
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
        assert "devices 4 close True" in output and "done" in output


# Process 0 is also the one that coordinates.
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_raising_rank_ends_every_rank(ranks, victim):
    processes = ranks("raise", victim)
    output, _ = processes[victim].communicate(timeout=180)
    assert processes[victim].returncode != 0 and "ArithmeticError: planted" in output
    assert_ends(processes[1 - victim])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_every_rank(ranks, victim):
    processes = ranks("wait", victim)
    read_until(processes[victim], "waiting")
    processes[victim].send_signal(signal.SIGKILL)
    assert_ends(processes[1 - victim])


def assert_ends(process: subprocess.Popen) -> None:
    """In time, unsuccessfully, and saying why."""
    output, _ = process.communicate(timeout=WITHIN)
    assert process.returncode != 0
    assert "done" not in output
    assert "rror" in output


# Without process 1, process 0 waits for it; without process 0, nobody coordinates.
@pytest.mark.slow
@pytest.mark.parametrize("present", [0, 1])
def test_a_rank_alone_is_ended_by_xla_and_nothing_is_raised(ranks, present):
    (process,) = ranks("try", present=[present])
    output, _ = process.communicate(timeout=WITHIN)
    assert process.returncode != 0
    assert "Terminating process" in output and "RegisterTask" in output
    assert "caught" not in output


def test_simulated_devices_are_what_was_asked_for():
    n = len(jax.devices())
    treeattn.simulate_devices(n)  # again, with the same number: nothing to change
    with pytest.raises(RuntimeError, match=rf"simulate_devices\({n + 1}\).*already started"):
        treeattn.simulate_devices(n + 1)


@pytest.mark.parametrize("n", [0, -3])
def test_simulating_no_devices_is_refused(n):
    with pytest.raises(ValueError, match="n: expected an integer of at least 1, got"):
        treeattn.simulate_devices(n)


@pytest.mark.parametrize("n", [2.0, "8", True, None])
def test_simulating_other_than_a_number_is_refused(n, unchecked):
    with pytest.raises(TypeError, match="n: expected an integer"):
        treeattn.simulate_devices(n)


def test_meshes():
    devices = jax.devices()
    assert treeattn.kv_mesh().shape == {"kv": len(devices)}
    assert treeattn.kv_mesh(devices[:6]).shape == {"kv": 6}
    mesh = treeattn.kv_mesh(devices[:6], nodes=2)
    assert mesh.shape == {"node": 2, "device": 3}
    assert list(mesh.devices[0]) == devices[:3]  # neighbours share a node


def test_meshes_with_rows_and_heads_before_the_keys():
    devices = jax.devices()[:8]
    mesh = treeattn.kv_mesh(devices, heads=2, batch=2)
    assert list(mesh.shape.items()) == [("batch", 2), ("heads", 2), ("kv", 2)]
    mesh = treeattn.kv_mesh(devices, heads=4, nodes=1)
    assert list(mesh.shape.items()) == [("heads", 4), ("node", 1), ("device", 2)]
    assert list(mesh.devices[1].flat) == devices[2:4]  # neighbours share the keys


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "nodes: 6 devices cannot be divided over 4 nodes", {"nodes": 4}),
        (ValueError, "nodes: expected an integer of at least 1, got 0", {"nodes": 0}),
        (TypeError, "nodes: expected an integer of at least 1, got 2.0", {"nodes": 2.0}),
        (ValueError, "heads: 3 devices cannot be divided over 2 heads", {"batch": 2, "heads": 2}),
        (TypeError, "batch: expected an integer", {"batch": "2"}),
        (TypeError, "devices: expected jax.devices", {"devices": [1, 2]}),
        (ValueError, "devices: expected at least one", {"devices": []}),
    ],
)
def test_what_makes_no_mesh_is_refused(error, message, options, unchecked):
    with pytest.raises(error, match=message):
        treeattn.kv_mesh(**{"devices": jax.devices()[:6]} | options)


def test_after_initialize_an_exception_is_printed_and_ends_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    treeattn.initialize("localhost:1", 2, 0)
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    sys.excepthook(ArithmeticError, ArithmeticError("planted"), None)
    assert codes == [1] and "ArithmeticError: planted" in capsys.readouterr().err


def test_exceptions_end_as_before_when_initialize_fails():
    before = sys.excepthook
    jax.devices()  # JAX has started: too late to join others
    with pytest.raises(RuntimeError, match="before any JAX calls"):
        treeattn.initialize("localhost:1", 2, 0)
    assert sys.excepthook is before


# What a name resolves to is asked of the system; these names are addresses.
@pytest.mark.parametrize(
    ("own_name", "coordinator", "warns"),
    [
        ("127.0.1.1", "192.0.2.1:1234", True),
        ("127.0.1.1", "[2001:db8::1]:1234", True),
        ("127.0.1.1", "127.0.0.1:1234", False),
        ("127.0.1.1", "localhost:1234", False),
        ("192.0.2.2", "192.0.2.1:1234", False),
        ("no such name", "192.0.2.1:1234", False),
        ("127.0.1.1", None, False),
    ],
)
def test_gloo_on_loopback_is_warned_of(own_name, coordinator, warns, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(socket, "gethostname", lambda: own_name)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        treeattn.initialize(coordinator, 2, 0)
    assert len(caught) == warns
    assert all("Connection refused" in str(warning.message) for warning in caught)
