"""Simulated devices, meshes, and real processes: two of them, one raising or killed."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import treeattn

TESTS = Path(__file__).parent
WITHIN = 30.0  # seconds after a failure by which everybody must have ended


@pytest.fixture
def ranks():
    """Start two processes; whatever happens, they end with the test."""
    started = []

    def start(*what):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        for rank in range(2):
            words = (TESTS / "rank.py", f"127.0.0.1:{port}", 2, rank, *what)
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append(process)
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def ends(process: subprocess.Popen) -> str:
    """What it prints; it ends in time, unsuccessfully, and says why."""
    output, _ = process.communicate(timeout=WITHIN)
    assert process.returncode != 0 and "done" not in output and "rror" in output
    return output


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
    ends(processes[1 - victim])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_every_rank(ranks, victim):
    processes = ranks("wait", victim)
    assert "waiting\n" in iter(processes[victim].stdout.readline, "")
    processes[victim].send_signal(signal.SIGKILL)
    ends(processes[1 - victim])


def test_simulated_devices_are_what_was_asked_for():
    n = len(jax.devices())
    treeattn.simulate_devices(n)  # again, with the same number: nothing to change
    for other in (n - 1, n + 1):
        with pytest.raises(RuntimeError, match=rf"simulate_devices\({other}\).*already started"):
            treeattn.simulate_devices(other)


def test_meshes():
    """Neighbours share a node, and the keys of one part of the heads."""
    devices = jax.devices()
    assert treeattn.kv_mesh().shape == {"kv": len(devices)}
    for n, options, shape in (
        (6, {}, {"kv": 6}),
        (6, {"nodes": 2}, {"node": 2, "device": 3}),
        (8, {"heads": 2, "batch": 2}, {"batch": 2, "heads": 2, "kv": 2}),
        (8, {"heads": 4, "nodes": 1}, {"heads": 4, "node": 1, "device": 2}),
    ):
        mesh = treeattn.kv_mesh(devices[:n], **options)
        assert list(mesh.shape.items()) == list(shape.items())
        assert [*mesh.devices.flat] == devices[:n]


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


# What a name resolves to is asked of the system; most of these names are addresses.
@pytest.mark.parametrize(
    ("address", "given", "bound"),
    [
        ("127.0.0.1:1234", {}, "127.0.0.1:1234"),
        ("localhost:1234", {}, "localhost:1234"),
        ("[::1]:1234", {}, "[::1]:1234"),
        ("192.0.2.1:1234", {}, None),
        ("[2001:db8::1]:1234", {}, None),
        ("no such name:1234", {}, None),
        (None, {}, None),
        ("localhost:1234", {"coordinator_bind_address": "[::]:1234"}, "[::]:1234"),
    ],
)
def test_a_coordinator_on_loopback_listens_there_alone(address, given, bound, monkeypatch):
    """Whether the address is an argument, or the environment's, which JAX reads."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    passed = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: passed.append(options))
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    treeattn.initialize(address, 2, 0, **given)
    if address is not None:
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    treeattn.initialize(None, 2, 0, initialization_timeout=7, **given)
    assert passed[1]["initialization_timeout"] == 7
    assert [options.get("coordinator_bind_address") for options in passed] == [bound] * 2
