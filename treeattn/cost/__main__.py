"""Advice: how to shard the cache of a model on a cluster; or the strategies of one layer.

python -m treeattn.cost --model llama-3.1-8b --topology dgx-h100 --nodes 2 --context 1000000
python -m treeattn.cost --topology dgx-h100 --nodes 16 --context 5120000
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from treeattn.cost.formulas import DTYPE_BYTES, Workload
from treeattn.cost.report import advice_table, cost_table
from treeattn.cost.sharding import MODELS, advise, family
from treeattn.cost.strategies import compare
from treeattn.cost.topology import CORNERS, PRESETS, Topology, preset


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: parse the arguments, print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m treeattn.cost",
        description="How to shard a model's cache on a cluster (--model), or what each way of "
        "attending to one layer's takes: calculated from data sheets and a library's constants.",
    )
    parser.add_argument("--model", help=f"one of {', '.join(MODELS)}: advice for a whole step")
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
        topology.check_devices(p)
        if args.model is not None:
            print(_advice(args.model, w, p, topology))
            return 0
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


def _advice(name: str, w: Workload, p: int, topology: Topology) -> str:
    """The table of plans, what is best by each choice of constants, and what it rests on."""
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    if p & (p - 1):
        raise ValueError(f"devices: plans are for a power of two, got {p}")
    model, lines = MODELS[name], []
    for corner, change in CORNERS.items():
        steps = advise(model, w.batch, w.context, p, change(topology))
        if change(topology) == topology:
            lines.insert(0, f"{model.name}, batch {w.batch}, {w.context:,} keys each, on {p} × ")
            lines[0] += f"{topology.device.name} ({topology.name})\n\n{advice_table(steps)}\n"
        best = steps[0]
        what = f"{family(best.plan)} ({best.plan}), {1e3 * best.seconds:.1f} ms"
        lines.append(f"by {corner:<9}: {what if best.fits else 'nothing fits'}")
    return "\n".join(lines) + (
        "\n\nReading is at the data sheet's bandwidth, sending by the network's model; nothing "
        "overlaps.\nPlans closer than a fifth are not told apart: times between nodes were "
        "measured at up to\ntwice the model's. Measure the first two."
    )


if __name__ == "__main__":
    sys.exit(main())
