"""Bytes, rounds, memory and time of decoding with a sharded cache: counted, and calculated.

Modules that each stand on their own, under one name:

- `compiled`: the collectives and the memory of a compiled program, as they are
- `formulas`: what is attended to (`Workload`), and the papers' formulas (v1 eq. 29-35, v2 8-14)
- `topology`: devices, links, and presets with their sources
- `network` and `closed_forms`: the time of a collective, simulated and by formula
- `strategies`: what rings, trees and butterflies send, hold and take on a topology

As a program it prints the strategies side by side, and what limits each:

    python -m treeattn.cost --topology dgx-h100 --nodes 16 --context 5120000
"""

import argparse
import sys
from collections.abc import Sequence

from treeattn.closed_forms import collective_rounds, collective_seconds, collective_sent_bytes
from treeattn.compiled import Collective, Memory, collectives, memory
from treeattn.formulas import (
    DTYPE_BYTES,
    Number,
    Workload,
    mem_ring,
    mem_tree,
    numel_kv,
    numel_state,
    v_allreduce,
    v_ring,
    v_tree,
)
from treeattn.network import SCHEDULES, Round, Simulated, schedule, simulate
from treeattn.strategies import (
    STRATEGIES,
    Cost,
    attend_seconds,
    compare,
    decode_cost,
)
from treeattn.topology import PRESETS, Device, Level, Topology, preset

__all__ = [
    "DTYPE_BYTES",
    "PRESETS",
    "SCHEDULES",
    "STRATEGIES",
    "Collective",
    "Cost",
    "Device",
    "Level",
    "Memory",
    "Round",
    "Simulated",
    "Topology",
    "Workload",
    "attend_seconds",
    "collective_rounds",
    "collective_seconds",
    "collective_sent_bytes",
    "collectives",
    "compare",
    "cost_table",
    "decode_cost",
    "mem_ring",
    "mem_tree",
    "memory",
    "numel_kv",
    "numel_state",
    "preset",
    "schedule",
    "simulate",
    "v_allreduce",
    "v_ring",
    "v_tree",
]


def cost_table(costs: Sequence[Cost]) -> str:
    """The costs as lines of text: time and its parts, what is sent and held, what limits."""
    fastest = min(c.seconds for c in costs)
    rows = [
        ("strategy", "time", "×", "attend", "latency", "links", "sent", "held", "limited by"),
        *(
            (
                c.strategy,
                seconds_text(c.seconds),
                f"{c.seconds / fastest:.3g}",
                seconds_text(c.compute_seconds),
                seconds_text(c.latency_seconds),
                seconds_text(c.volume_seconds),
                bytes_text(c.sent_bytes),
                bytes_text(c.memory_bytes),
                c.limit,
            )
            for c in costs
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *middle, limit in rows:
        middle = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *middle, limit]))
    return "\n".join(lines)


def seconds_text(seconds: Number) -> str:
    """Three digits and a unit: 0.000195 -> "195 µs"."""
    return _scaled(seconds, (("s", 1), ("ms", 1e-3), ("µs", 1e-6)))


def bytes_text(count: Number) -> str:
    """Three digits and a decimal unit: 655360000 -> "655 MB"."""
    return _scaled(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))


def _scaled(value: Number, units: tuple[tuple[str, Number], ...]) -> str:
    name, size = next((unit for unit in units if value >= 0.9995 * unit[1]), units[-1])
    return f"{float(f'{value / size:.3g}'):g} {name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: parse the arguments, print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m treeattn.cost",
        description="What each way of decoding with a sharded cache takes: lower bounds from "
        "data sheets, not measurements.",
    )
    parser.add_argument("--topology", default="dgx-h100", help=f"one of {', '.join(PRESETS)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=int, help="full nodes (default 1), or rows of a torus")
    size.add_argument("--devices", type=int, help="devices, which need not fill their nodes")
    parser.add_argument("--context", type=int, required=True, help="keys in the cache")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16, help="query heads (default 16)")
    parser.add_argument("--kv-heads", type=int, help="key heads (default: as many)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1, help="new tokens at once")
    parser.add_argument("--dtype", default="bfloat16", help=f"one of {', '.join(DTYPE_BYTES)}")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="rings send while they attend")
    args = parser.parse_args(arguments)
    try:
        topology = preset(args.topology)
        nodes = 1 if args.nodes is None else args.nodes
        p = nodes * topology.node_size if args.devices is None else args.devices
        w = Workload(
            args.context,
            batch=args.batch,
            heads=args.heads,
            kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            queries=args.queries,
            dtype=args.dtype,
            layers=args.layers,
        )
        costs = compare(w, p, topology, overlap=args.overlap)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(
        f"{p} × {topology.device.name} ({topology.name}), {w.context:,} keys: {w.chunk(p):,} a "
        f"device; {w.heads} heads of {w.head_dim} on {w.kv_heads} key heads, {w.dtype}, "
        f"batch {w.batch}, {w.layers} layer{'s' if w.layers > 1 else ''}\n"
    )
    print(cost_table(costs))
    best = min(costs, key=lambda c: c.seconds)
    ring = costs[0]
    print(
        f"\nfastest: {best.strategy}, {ring.seconds / best.seconds:.3g} times as fast as the ring; "
        f"limited by {best.limit}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
