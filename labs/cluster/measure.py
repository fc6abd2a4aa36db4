"""python -m labs.cluster.measure: times and bytes of all methods, into results/times.json."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

FILE = Path(__file__).parent / "results" / "times.json"
# The links of nodes with eight H100s, 4,000 times as slow: NVLink's 450 GB/s, InfiniBand's 50 GB/s
# for each GPU, and 5 µs from node to node.
SLOW_MOTION = "--intra 900mbit --inter 100mbit --delay 20ms"
THREE = "--method ring,tree,butterfly"
ALL = f"{THREE},hierarchical,gather"
RUNS = (
    f"{SLOW_MOTION} {ALL} --keys 512",
    f"{SLOW_MOTION} {THREE} --keys 2048,8192,32768",
    f"{SLOW_MOTION} {ALL} --keys 1024 --per-node 2",
    f"{SLOW_MOTION} {ALL} --keys 2048 --nodes 4 --per-node 2",
    f"--intra 400mbit --inter 50mbit --delay 10ms {ALL} --keys 1024",
    "--intra 50mbit --inter 50mbit --delay 0 --method ring --keys 2048,4096",
    "--intra 800mbit --inter 50mbit --delay 0 --method ring --keys 2048,4096",
)


def where_and_when() -> str:
    return f"{time.strftime('%d %B %Y')}, {os.cpu_count()} cores, Linux {os.uname().release}"


def main() -> None:
    rows = []
    new = FILE.with_name("new.json")
    for options in RUNS:
        command = [sys.executable, "-m", "labs.cluster", *options.split(), "--json", str(new)]
        subprocess.run(command, check=True)
        rows += json.loads(new.read_text())
    new.unlink()
    FILE.write_text(json.dumps({"measured": where_and_when(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
