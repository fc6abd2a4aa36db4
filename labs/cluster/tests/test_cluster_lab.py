"""A small cluster that is measured once, clusters that break, and no traces of any afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from labs.cluster import network

REPOSITORY = Path(__file__).parents[3]
MARK = "TREEATTN_CLUSTER_TEST"  # in the environment of all processes that a test starts
KEYS, RATE = 512, 8e6
MOST_SECONDS = 300

why_not = network.why_not()
needs_namespaces = pytest.mark.skipif(bool(why_not), reason=why_not)


def start(*options: str, mark: str = "", **environment: str) -> subprocess.Popen:
    """Starts `python -m labs.cluster`, with fast compilations."""
    flags = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu", MARK: mark}
    return subprocess.Popen(
        [sys.executable, "-m", "labs.cluster", *options],
        cwd=REPOSITORY,
        env={**os.environ, **flags, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=MOST_SECONDS)
    return process.returncode, output, errors


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment, except zombies."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A row for each method of two nodes with two ranks each, over very slow uplinks."""
    file = tmp_path_factory.mktemp("cluster") / "rows.json"
    links = "--intra 400mbit --inter 8mbit --delay 0 --per-node 2"
    methods = "ring,tree,butterfly,hierarchical,gather"
    command = f"{links} --keys {KEYS} --method {methods} --json {file}"
    status, output, errors = finish(start(*command.split()))
    assert status == 0, errors
    found = {row["method"]: row for row in json.loads(file.read_text())}
    assert set(found) == set(methods.split(","))
    assert all(method in output for method in found)
    return found


@needs_namespaces
def test_answers_are_dense_attention(rows):
    assert all(row["error"] < 1e-6 for row in rows.values())


@needs_namespaces
def test_sockets_send_what_the_program_says_and_144_bytes_a_message(rows):
    for row in rows.values():
        expected = row["said"] + 144 * row["messages"]
        sent = {row["bytes"][f"s{rank}"] for rank in range(4)}
        assert sent == {expected}, row["method"]
    assert [rows[x]["messages"] for x in ("tree", "ring", "butterfly")] == [3 * 4 * 3, 2 * 3, 2]


@needs_namespaces
def test_links_carry_what_the_sockets_send_and_headers(rows):
    for row in rows.values():
        for rank in range(4):
            assert row["bytes"][f"s{rank}"] < row["bytes"][f"r{rank}"]
    ring = rows["ring"]
    assert max(ring["bytes"].values()) < 1.1 * ring["said"]


@needs_namespaces
def test_a_ring_takes_as_long_as_its_slowest_link_needs(rows):
    """Three steps, each with the keys and values of a rank: 2 · 4 B · 4 heads of 128.

    The shortest time counts, because other programs may keep the processors busy.
    """
    ideal = 3 * (KEYS // 4 * 4096) * 8 / RATE
    assert 0.95 * ideal < rows["ring"]["least"] < 1.3 * ideal


@needs_namespaces
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_everything_within_seconds(kind):
    mark = uuid.uuid4().hex
    process = start("--per-node", "2", mark=mark)
    until = time.monotonic() + 60
    while len(marked(mark)) < 8 and time.monotonic() < until:  # four ranks have been forked
        time.sleep(0.1)
    links = network.run("ip link")
    assert len(marked(mark)) >= 8
    process.send_signal(kind)
    process.wait(5)
    until = time.monotonic() + 5
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert marked(mark) == []
    assert "node0" not in links  # the links are only inside


@needs_namespaces
def test_four_hold_a_cache_that_one_may_not():
    """A cache of 512 MiB, and a limit of 640 MiB of data for each process.

    Python, JAX and the decoding need memory, too.
    """
    limit = "--data-limit 640 --keys 131072 --method tree --intra 0 --inter 0 --delay 0"
    together = start(*limit.split(), "--per-node", "2")
    status, output, errors = finish(together)
    assert status == 0, errors
    assert float(output.split()[-6].replace(",", "")) < 1e-6, output
    status, output, errors = finish(start(*limit.split(), "--nodes", "1", "--per-node", "1"))
    assert status != 0 and "tree  " not in output
    assert (
        "Unable to allocate" in errors or "RESOURCE_EXHAUSTED" in errors or "MemoryError" in errors
    )


def test_plain_checks_the_answers_and_prints_no_times():
    options = "--plain --nodes 1 --per-node 2 --keys 256 --method ring,butterfly"
    status, output, errors = finish(start(*options.split()))
    assert status == 0, errors
    names, *lines = output.splitlines()
    assert names.split()[-2:] == ["bytes", "said"] and "ms" not in names
    assert len(lines) == 2
    assert all(float(line.split()[2]) < 1e-6 for line in lines)


def test_a_missing_tool_is_named():
    process = start("--keys", "512", PATH="/nowhere")
    status, output, errors = finish(process)
    assert status == 1 and output == ""
    assert "labs.cluster: the command 'unshare' is missing" in errors and "--plain" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--method chain",
            "--method: expected some of ring, tree, butterfly, gather, hierarchical",
        ),
        ("--keys 1001", "--keys: expected multiples of 8, the number of ranks, got 1001"),
        ("--inter fast", "argument --inter: "),
    ],
)
def test_what_cannot_be_run_is_refused(options, message):
    status, _, errors = finish(start("--plain", *options.split()))
    assert status != 0 and message in errors


def test_numbers_with_units():
    for text, number in {"400mbit": 4e8, "1.5gbit": 1.5e9, "5ms": 5e-3, "2s": 2, "0": 0}.items():
        assert network.parse(text) == pytest.approx(number)
    for text in ("mbit", "5 ms", "-1mbit", "5parsec", ""):
        with pytest.raises(ValueError):
            network.parse(text)
