"""How to shard the cache of a model on a cluster, and what the advice rests on.

python -m labs.cost --model llama-3.1-8b --topology dgx-h100 --nodes 2 --context 1000000
python -m labs.cost --calibrate times.json    measures collectives on the devices at hand
python -m labs.cost --model deepseek-v3 --nodes 2 --context 128000 --weight-dtype float8
"""

import argparse
import sys
from collections.abc import Sequence

from labs.cost.advice import advise, least_devices
from labs.cost.calibration import CalibrateAction, measured_table
from labs.cost.formulas import STORED_BYTES, Workload
from labs.cost.models import MODELS
from labs.cost.priced import network_text
from labs.cost.report import advice_table, bytes_text
from labs.cost.sharding import HEADROOM, Step
from labs.cost.topology import PRESETS, Topology, corners, preset
from labs.cost.whole_steps import advice_over_measured
from treeattn.idea.arrays import integer
from treeattn.measured import VARIABLE, CollectiveTimes, find_measured


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: parse the arguments, print the advice. Returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack "×"
    try:
        topology = preset(args.topology)
        p = args.nodes * topology.node_size if args.devices is None else args.devices
        topology.check_devices(p)
        integer("context", args.context, 1)
        integer("batch", args.batch, 1)
        times = find_measured(args.measured)
        topology = topology if times is None else topology.as_measured(times)
        dtypes = {"weight_dtype": args.weight_dtype, "cache_dtype": args.cache_dtype}
        print(_advice(args.model, args.batch, args.context, p, topology, dtypes))
        if times is not None:
            print(f"\n{_measured_advice(args.model, args.batch, times)}")
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labs.cost",
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
        help="a file of --calibrate, whose times count in place of the network's where it has the "
        f"group of devices (default: ${VARIABLE})",
    )
    parser.add_argument("--model", default="llama-3.1-8b", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--topology", default="dgx-h100", help=f"one of {', '.join(PRESETS)}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=int, default=1, help="full nodes, or rows of a torus")
    size.add_argument("--devices", type=int, help="devices, which need not fill their nodes")
    parser.add_argument("--context", type=int, required=True, help="keys of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    for what in ("weight", "cache"):
        parser.add_argument(
            f"--{what}-dtype",
            default="bfloat16",
            choices=list(STORED_BYTES),
            help=f"of the {what}s' numbers (default bfloat16); scales are not counted",
        )
    return parser


def _measured_advice(name: str, batch: int, times: CollectiveTimes) -> str:
    """What a layer's collectives take by a file of measured ones, all heads on every device."""
    model = MODELS[name]
    w = Workload(
        1,
        batch=batch,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        latent=model.latent,
    )
    return measured_table(times, w, model.width)


def _advice(
    name: str, batch: int, context: int, p: int, topology: Topology, dtypes: dict[str, str]
) -> str:
    """What to do, the table of plans, what is best by other constants, and what it rests on."""
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    model = MODELS[name]
    found = {
        corner: advise(model, batch, context, p, there, **dtypes)
        for corner, there in corners(topology).items()
    }
    usual = next(corner for corner, there in corners(topology).items() if there == topology)
    best = found[usual][0]
    what = f"{name}, batch {batch}, {context:,} keys each, on {p} × {topology.device.name}"
    lines = [f"{what} ({topology.name})", ""]
    if best.fits:
        lines.append(_do(best, p))
    else:
        lines += _nothing_fits(best, name, batch, context, topology, dtypes)
    lines += network_text(best.plan, topology, p)
    lines += ["", advice_table(found[usual]), ""]
    width = max(map(len, found))
    for corner, (first, *_) in found.items():
        text = f"{first.plan.family} ({first.plan}), {1e3 * first.seconds:.1f} ms"
        lines.append(f"by {corner:<{width}}: {text if first.fits else 'nothing fits'}")
    found = advice_over_measured()
    ratios = ", ".join(f"{ratio:.2f} ({p})" for p, ratio in found.items())
    sending = "by the network's model" if topology.measured is None else "as told above"
    return "\n".join(lines) + (
        f"\n\nReading is at the data sheet's bandwidth, sending {sending}; nothing overlaps.\n"
        "Held out, published steps of Llama 3 405B (notebook 06), calculated so,\nare "
        f"{ratios} of the time that they took on so many H100s.\nPlans closer than "
        "a fifth are not told apart. Measure the first two."
    )


def _do(best: Step, p: int) -> str:
    """The advice in a line: the plan, its devices, and what to do with the others."""
    plan = best.plan
    text = f"do: {plan} ({plan.family}), {1e3 * best.seconds:.2f} ms a token"
    if plan.devices == p:
        return text
    replicas, idle = divmod(p, plan.devices)
    text += f", on {plan.devices} of the {p}"
    if replicas > 1:
        text += f": run {replicas} replicas, each with sequences of its own"
    return text + (f"; {idle} {'is' if idle == 1 else 'are'} left over" if idle else "")


def _nothing_fits(
    best: Step, name: str, batch: int, context: int, topology: Topology, dtypes: dict[str, str]
) -> list[str]:
    """What would: more devices, or a cache and weights of a byte a number."""
    room = f"{1 - HEADROOM:.0%} of {bytes_text(topology.device.memory_bytes)}"
    lines = [f"nothing fits: {bytes_text(best.memory_bytes)} on each device, of {room}"]
    smaller = {what: "float8" for what in dtypes}
    cache_only = {**dtypes, "cache_dtype": "float8"}
    for text, tried in (
        ("as asked", dtypes),
        ("with a cache of 8 bits", cache_only),
        ("with cache and weights of 8 bits", smaller),
    ):
        n = least_devices(MODELS[name], batch, context, topology, **tried)
        where = "more than the network joins" if n is None else f"{n} devices"
        if text == "as asked" or tried != dtypes:
            lines.append(f"  {text}: {where}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
