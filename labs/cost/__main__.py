"""How to shard the cache of a model on a cluster, and what the advice rests on.

python -m labs.cost --model llama-3.1-8b --nodes 2 --context 1M
python -m labs.cost --model deepseek-v3 --nodes 2 --context 128k --weight-dtype float8
python -m labs.cost --model path/to/config.json --devices 4 --batch 16 --context 32k
"""

import argparse
import re
import sys
from collections.abc import Sequence

from labs.cost.advice import advice_table, advise, best_of_each, bytes_text, least_devices
from labs.cost.models import MODELS, Model, find_model
from labs.cost.observed import observed_steps, over_measured
from labs.cost.steps import CORNERS, HEADROOM, REPAIRED, Step
from labs.cost.topology import PRESETS, Topology, preset
from labs.cost.workload import STORED_BYTES

NEAR = 1.2  # a fifth: as far as forecasts of held-out steps may be off, and some
UNITS = {"": 1, "k": 10**3, "m": 10**6}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: parse the arguments, print the advice. Returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack "×"
    topology = preset(args.topology)
    flag = "--nodes" if args.devices is None else "--devices"
    p = args.nodes * topology.node_size if args.devices is None else args.devices
    if p > topology.capacity:
        parser.error(f"argument {flag}: {args.topology} joins {topology.capacity}, got {p} devices")
    dtypes = {"weight_dtype": args.weight_dtype, "cache_dtype": args.cache_dtype}
    print(_advice(args.model, args.batch, args.context, p, topology, dtypes))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labs.cost",
        description="How to shard a model's cache on a cluster: whole decode steps, calculated "
        "from data sheets, a library's table, and constants that published steps repaired.",
    )
    known = ", ".join(MODELS)
    parser.add_argument(
        "--model", type=_model, default="llama-3.1-8b", help=f"{known}, or a config.json"
    )
    parser.add_argument("--topology", choices=PRESETS, default="dgx-h100")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=_count, default=1, help="full nodes (default 1)")
    size.add_argument("--devices", type=_count, help="devices, which need not fill their nodes")
    parser.add_argument("--context", type=_count, required=True, help="keys of each sequence: 128k")
    parser.add_argument("--batch", type=_count, default=1, help="sequences (default 1)")
    for what in ("weight", "cache"):
        parser.add_argument(
            f"--{what}-dtype",
            default="bfloat16",
            choices=list(STORED_BYTES),
            help=f"of the {what}s' numbers (default bfloat16); scales are not counted",
        )
    return parser


def _count(text: str) -> int:
    """ "128k" -> 128000, "1M" -> 1000000, "1.5M", "4096"; from 1 on."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    number = float(found[1]) * UNITS[found[2]] if found else 0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 on, such as 8, 128k or 1M, got {text!r}"
        )
    return int(number)


def _model(text: str) -> Model:
    try:
        return find_model(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("model: ")) from None


def _advice(
    model: Model, batch: int, context: int, p: int, topology: Topology, dtypes: dict[str, str]
) -> str:
    """What to do, the table of plans, what is best by other constants, and what it rests on."""
    found = {
        corner: advise(model, batch, context, p, topology, rates, **dtypes)
        for corner, rates in CORNERS.items()
    }
    steps = found["as repaired"]
    what = f"{model.name}, batch {batch}, {context:,} keys each, on {p} × {topology.device.name}"
    lines = [f"{what} ({topology.name})", ""]
    if steps[0].fits:
        lines += _do(steps, model, p)
    else:
        lines += _nothing_fits(steps[0], model, batch, context, topology, dtypes)
    lines += ["", advice_table(steps), ""]
    width = max(map(len, found))
    for corner, (first, *_) in found.items():
        text = f"{first.plan}, on {first.plan.devices}: {1e3 * first.seconds:.1f} ms"
        lines.append(f"{corner:<{width}}  {text if first.fits else 'nothing fits'}")
    rows = [row for row in observed_steps() if row["kind"] == "step"]
    ratios = [f"{over_measured(REPAIRED, row):.2f} on {row['devices']}" for row in rows]
    return "\n".join(lines) + (
        "\n\nNothing overlaps in it. Published steps of Llama 3 405B on H100s, calculated so, are "
        f"\n{', '.join(ratios)} of the measured times; the first was fitted to.\n"
        "Plans closer than a fifth are not told apart. Measure the first two."
    )


def _do(steps: list[Step], model: Model, p: int) -> list[str]:
    """The advice: the plan, its devices, what to do with the others, and what is as good."""
    best = steps[0]
    plan = best.plan
    text = f"do: {plan}, {1e3 * best.seconds:.1f} ms a token"
    if plan.devices < p:
        replicas, idle = divmod(p, plan.devices)
        text += f", on {plan.devices} of the {p}"
        if replicas > 1:
            text += f": run {replicas} replicas, each with sequences of its own"
        text += f"; {idle} {'is' if idle == 1 else 'are'} left over" if idle else ""
    lines = [text]
    if plan.heads > model.kv_heads:
        copies = plan.heads // model.kv_heads
        lines.append(f"(each key head on {copies} devices: engines run that, tree_decode does not)")
    near = [step for step in best_of_each(steps) if step.seconds <= NEAR * best.seconds]
    if more := len([step for step in near if step.fits]) - 1:
        lines.append(f"within a fifth of it, so not told apart: the {more} below it")
    return lines


def _nothing_fits(
    best: Step, model: Model, batch: int, context: int, topology: Topology, dtypes: dict[str, str]
) -> list[str]:
    """What would: more devices, or a cache and weights of a byte a number."""
    room = f"{1 - HEADROOM:.0%} of {bytes_text(topology.device.memory_bytes)}"
    lines = [f"nothing fits: {bytes_text(best.memory_bytes)} on each device, of {room}"]
    for text, tried in (
        ("as asked", dtypes),
        ("with a cache of 8 bits", {**dtypes, "cache_dtype": "float8"}),
        ("with cache and weights of 8 bits", {what: "float8" for what in dtypes}),
    ):
        n = least_devices(model, batch, context, topology, **tried)
        where = "more than the network joins" if n is None else f"{n} devices"
        if text == "as asked" or tried != dtypes:
            lines.append(f"  {text}: {where}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
