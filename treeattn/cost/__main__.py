"""The strategies side by side, and what limits each.

python -m treeattn.cost --topology dgx-h100 --nodes 16 --context 5120000
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from treeattn.cost.formulas import DTYPE_BYTES, Workload
from treeattn.cost.report import cost_table
from treeattn.cost.strategies import compare
from treeattn.cost.topology import PRESETS, preset


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
        w = Workload(**{field.name: getattr(args, field.name) for field in fields(Workload)})
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
    faster = f"{costs[0].seconds / best.seconds:.3g} times as fast as the ring"
    print(f"\nfastest: {best.strategy}, {faster}; limited by {best.limit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
