"""python -m labs.cluster.tests.faults [--print]: breaks a cluster while it decodes.

Writes the results into results/faults.md. With --print it prints them, and three clusters run at a
time, because most of a fault's time is waiting.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from labs.cluster import network
from labs.cluster.measure import where_and_when

FILE = Path(__file__).parents[1] / "results" / "faults.md"
# The faults of a cluster of 2 × 2 ranks while it decodes.
FAULTS: dict[str, Callable] = {
    "rank 3 is killed": lambda c: c.processes[3].kill(),
    "rank 0, the coordinator, is killed": lambda c: c.processes[0].kill(),
    "rank 3 is paused": lambda c: os.kill(c.processes[3].pid, signal.SIGSTOP),
    "rank 0, the coordinator, is paused": lambda c: os.kill(c.processes[0].pid, signal.SIGSTOP),
    "rank 3's link is cut": lambda c: cut("r3"),
    "rank 0's link is cut, the coordinator's": lambda c: cut("r0"),
    "node 1's uplink is cut": lambda c: cut("up1"),
    # Not longer: TCP doubles the time between its tries, so what is sent during a cut may arrive
    # as long after it as it lasted. A heartbeat that is 5 s late ends the cluster, and one of eight
    # cuts of 4 s did.
    "node 1's uplink is cut for 1 s": lambda c: cut("up1", mend_after=1),
}
SECONDS = 45.0  # the others have so long to end
GOES_ON = 20.0  # of a cut that is mended: the other cuts end a cluster within 13 s
PHRASES = r"Gloo [a-z ]+ failed|Connection [a-z]+|unhealthy|DEADLINE_EXCEEDED|Terminating process"


def cut(link: str, mend_after: float | None = None) -> None:
    network.run(f"ip link set dev {link} down")
    if mend_after:
        time.sleep(mend_after)
        network.run(f"ip link set dev {link} up")


def fault(name: str) -> tuple[list[float], set[str]]:
    """(seconds from the fault to each surviving rank's end, the phrases that they printed).

    No seconds if the ranks still decode after `SECONDS`, or `GOES_ON`.
    """
    from labs.cluster.cluster import Cluster, Failed

    victim = re.match(r"rank (\d).* is", name)
    others = set(range(4)) - ({int(victim[1])} if victim else set())
    within = GOES_ON if name.endswith("for 1 s") else SECONDS
    ends = {}
    links = network.Network(2, 2, 80e6, 20e6, 0.0)
    with contextlib.closing(Cluster(2, 2, links)) as cluster:
        cluster.prepare(256, ["ring"])
        threading.Timer(2, FAULTS[name], [cluster]).start()
        began = time.monotonic() + 2
        try:
            while time.monotonic() < began + within:
                cluster.decode("ring", within=within)
        except Failed:
            while not others <= set(ends) and time.monotonic() < began + within:
                for rank, process in enumerate(cluster.processes):
                    if process.exitcode is not None:
                        ends.setdefault(rank, time.monotonic() - began)
                time.sleep(0.05)
        printed = " ".join(map(cluster.printed, others))
    return [ends[rank] for rank in others & set(ends)], set(re.findall(PHRASES, printed))


def table(at_once: int) -> str:
    lines = ["# When something breaks", ""]
    lines += [f"Measured {where_and_when()}, on 2 × 2 ranks, with a heartbeat of 10 s.", ""]
    lines += ["| what happens | the others end after | what they print |", "|---|---|---|"]
    with ProcessPoolExecutor(at_once, get_context("fork")) as pool:
        for name, (seconds, said) in zip(FAULTS, pool.map(fault, FAULTS), strict=True):
            after = f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else "all go on"
            lines.append(f"| {name} | {after} | {', '.join(sorted(said)) or 'nothing'} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    network.enter(1200.0)
    if "--print" in sys.argv:
        print(table(at_once=3))
    else:
        FILE.write_text(table(at_once=1), encoding="utf-8")
