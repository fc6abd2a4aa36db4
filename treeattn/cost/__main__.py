"""How to shard the cache of a model on a cluster, and what the advice rests on.

python -m treeattn.cost --model llama-3.1-8b --topology dgx-h100 --nodes 2 --context 1000000
python -m treeattn.cost --calibrate times.json    measures collectives on the devices at hand
"""

import argparse
import sys
from collections.abc import Sequence

from treeattn.cost.calibration import CalibrateAction, measured_table
from treeattn.cost.formulas import Workload
from treeattn.cost.report import advice_table
from treeattn.cost.sharding import MODELS, advise
from treeattn.cost.topology import CORNERS, PRESETS, preset
from treeattn.idea.arrays import integer
from treeattn.measured import VARIABLE, CollectiveTimes, find_measured


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: parse the arguments, print the advice. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m treeattn.cost",
        description="How to shard a model's cache on a cluster: whole decode steps, calculated "
        "from data sheets and a library's constants.",
    )
    parser.add_argument(
        "--calibrate",
        action=CalibrateAction,
        metavar="FILE",
        help="measure collectives on the devices of this process, write the file, and end",
    )
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help=f"a file of --calibrate, to be advised by as well (default: ${VARIABLE})",
    )
    parser.add_argument("--model", default="llama-3.1-8b", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--topology", default="dgx-h100", help=f"one of {', '.join(PRESETS)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=int, default=1, help="full nodes, or rows of a torus")
    size.add_argument("--devices", type=int, help="devices, which need not fill their nodes")
    parser.add_argument("--context", type=int, required=True, help="keys of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    args = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack "×"
    try:
        topology = preset(args.topology)
        p = args.nodes * topology.node_size if args.devices is None else args.devices
        topology.check_devices(p)
        integer("context", args.context, 1)
        integer("batch", args.batch, 1)
        times = find_measured(args.measured)
        print(_advice(args.model, args.batch, args.context, p, topology))
        if times is not None:
            print(f"\n{_measured_advice(args.model, args.batch, times)}")
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return 0


def _measured_advice(name: str, batch: int, times: CollectiveTimes) -> str:
    """What a layer's collectives take by a file of measured ones, all heads on every device."""
    model = MODELS[name]
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    return measured_table(times, Workload(1, batch=batch, **sizes), model.width)


def _advice(name: str, batch: int, context: int, p: int, topology) -> str:
    """The table of plans, what is best by each choice of constants, and what it rests on."""
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    steps = {x: advise(MODELS[name], batch, context, p, f(topology)) for x, f in CORNERS.items()}
    what = f"{name}, batch {batch}, {context:,} keys each, on {p} × {topology.device.name}"
    lines = [f"{what} ({topology.name})", "", advice_table(steps["NCCL 2.28"]), ""]
    for corner, (best, *_) in steps.items():
        found = f"{best.plan.family} ({best.plan}), {1e3 * best.seconds:.1f} ms"
        lines.append(f"by {corner:<9}: {found if best.fits else 'nothing fits'}")
    return "\n".join(lines) + (
        "\n\nReading is at the data sheet's bandwidth, sending by the network's model; nothing "
        "overlaps.\nPlans closer than a fifth are not told apart: times between nodes were "
        "measured at up to\ntwice the model's. Measure the first two."
    )


if __name__ == "__main__":
    sys.exit(main())
