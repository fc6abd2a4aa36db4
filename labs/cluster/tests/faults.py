"""python -m labs.cluster.tests.faults [--print]: breaks a cluster while it decodes.

Writes the results into results/faults.md, or prints them.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
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
    "node 1's uplink is cut for 4 s": lambda c: cut("up1", mend_after=4),
}
PHRASES = r"Gloo [a-z ]+ failed|Connection [a-z]+|unhealthy|DEADLINE_EXCEEDED|Terminating process"


def cut(link: str, mend_after: float | None = None) -> None:
    network.run(f"ip link set dev {link} down")
    if mend_after:
        time.sleep(mend_after)
        network.run(f"ip link set dev {link} up")


def fault(name: str, within: float = 45.0) -> tuple[list[float], set[str]]:
    """(seconds from the fault to each surviving rank's end, the phrases that they printed).

    No seconds if the ranks still decode after `within` seconds.
    """
    from labs.cluster.cluster import Cluster, Failed

    victim = re.match(r"rank (\d).* is", name)
    others = set(range(4)) - ({int(victim[1])} if victim else set())
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


def table() -> str:
    lines = ["# When something breaks", ""]
    lines += [f"Measured {where_and_when()}, on 2 × 2 ranks, with a heartbeat of 10 s.", ""]
    lines += ["| what happens | the others end after | what they print |", "|---|---|---|"]
    for name in FAULTS:
        seconds, said = fault(name)
        after = f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else "all go on"
        lines.append(f"| {name} | {after} | {', '.join(sorted(said)) or 'nothing'} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    network.enter(1200.0)
    if "--print" in sys.argv:
        print(table())
    else:
        FILE.write_text(table(), encoding="utf-8")
