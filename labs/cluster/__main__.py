"""Tree and ring decoding on a small cluster inside this machine: time, messages, bytes.

python -m labs.cluster --nodes 2 --per-node 4 --intra 400mbit --inter 50mbit --delay 5ms \
    --keys 1024 --method tree,ring,butterfly,hierarchical

It needs Linux with `ip`, `tc`, `ss` and `unshare`, and root or user namespaces.
"""

import argparse
import contextlib
import json
import signal
import sys

from labs.cluster import network

MOST_SECONDS = 1200
REPEATS = 5


def main() -> None:
    args = _parser().parse_args()
    if args.plain:
        signal.alarm(MOST_SECONDS)
    else:
        network.enter(MOST_SECONDS)
    rows = measure(args)
    print(_table(rows))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m labs.cluster")
    for name, default, kind, what in (
        ("nodes", 2, int, "groups of processes with fast links between them"),
        ("per-node", 4, int, "processes of each"),
        ("intra", "400mbit", network.parse, "rate of each link inside a node"),
        ("inter", "50mbit", network.parse, "rate of each node's uplink"),
        ("delay", "5ms", network.parse, "of each frame between nodes"),
        ("keys", "1024", str, "of the whole context; several, with commas"),
        ("method", "tree,ring,butterfly,hierarchical", str, "with commas; also gather"),
        ("data-limit", 0, int, "MiB of data that a process may have"),
        ("json", None, str, "a file to write the rows to"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} ({default})")
    plain = "over loopback, without namespaces: checks the answers, and prints no times"
    parser.add_argument("--plain", action="store_true", help=plain)
    return parser


def measure(args: argparse.Namespace) -> list[dict]:
    """A row for each number of keys and method."""
    from labs.cluster.cluster import Cluster, say  # imports JAX, so only inside
    from labs.cluster.rank import METHODS

    methods, lengths = args.method.split(","), [int(x) for x in args.keys.split(",")]
    if not set(methods) <= set(METHODS):
        sys.exit(f"--method: expected some of {', '.join(METHODS)}, got {args.method}")
    p = args.nodes * args.per_node
    if any(keys % p for keys in lengths):
        sys.exit(f"--keys: expected multiples of {p}, the number of ranks, got {args.keys}")
    links = {name: getattr(args, name) for name in ("intra", "inter", "delay")}
    net = None if args.plain else network.Network(args.nodes, args.per_node, **links)
    rows = []
    limit = args.data_limit * 2**20
    with contextlib.closing(Cluster(args.nodes, args.per_node, net, limit)) as cluster:
        for keys in lengths:
            say(f"{p} processes make {keys:,} keys, and compile")
            cluster.prepare(keys, methods)
            expected = cluster.expected()
            for method in methods:
                say(f"decoding by {method}")
                rows.append(cluster.measure(method, REPEATS, expected) | links)
    return rows


def _table(rows: list[dict]) -> str:
    """A line for each row; no times on loopback, where bytes cost nothing and rings look fast."""
    names = "method", "keys", "error", "messages", "bytes said", "on sockets", "up node 0", "ms"
    lines = []
    for row in rows:
        cells = [row["method"], f"{row['keys']:,}", f"{row['error']:.0e}"]
        cells += [f"{row['messages']:,}", f"{row['said']:,}"]
        if row["bytes"]:
            sockets, uplink = (row["bytes"][name] for name in ("s0", "up0"))
            cells += [f"{sockets:,.0f}", f"{uplink:,.0f}", f"{1e3 * row['seconds']:,.1f}"]
        lines.append(cells)
    lines.insert(0, names[: len(lines[0])])
    return "\n".join(f"{name:14}" + "".join(f"{x:>12}" for x in cells) for name, *cells in lines)


if __name__ == "__main__":
    main()
