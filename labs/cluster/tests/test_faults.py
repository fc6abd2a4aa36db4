"""No rank hangs after a fault: the other ranks end with a message, or go on."""

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labs.cluster import network
from labs.cluster.cluster import Cluster, Failed

REPOSITORY = Path(__file__).parents[3]
TABLE = REPOSITORY / "labs" / "cluster" / "results" / "faults.md"

why_not = network.why_not()


def lines(text: str) -> list[list[str]]:
    """The cells of a table's lines, without its head."""
    table = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not), reason=why_not)
def test_nothing_hangs():
    """The faults are those of the stored table. Ranks end in half a minute, with a reason."""
    command = [sys.executable, "-m", "labs.cluster.tests.faults", "--print"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    stored = lines(TABLE.read_text(encoding="utf-8"))
    found = lines(done.stdout)
    assert [x[0] for x in found] == [x[0] for x in stored]
    for what, after, printed in found:
        assert (after == "all go on") == what.endswith("for 1 s"), (what, after)
        if after != "all go on":
            assert float(after.split()[-2]) < 30, (what, after)
            assert printed != "nothing", what


def test_a_rank_that_ends_after_its_answer_is_noticed():
    """Rank 0 is silent, as if it was paused; rank 1 answers and ends."""
    start = multiprocessing.get_context("spawn")
    ours, theirs = zip(start.Pipe(), start.Pipe(), strict=True)
    cluster = Cluster.__new__(Cluster)
    cluster.p, cluster.connections, cluster.printed = 2, ours, "printed by rank {}".format
    cluster.processes = [
        start.Process(target=time.sleep, args=[60]),
        start.Process(target=theirs[1].send, args=["an answer"]),
    ]
    for process in cluster.processes:
        process.start()
    with pytest.raises(Failed, match="rank 1 ended: printed by rank 1"):
        cluster.answers(within=30)
    cluster.processes[0].kill()
