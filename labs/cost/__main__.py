"""How to shard the cache of a model on a cluster, and the grounds of the advice.

python -m labs.cost --model llama-3.1-8b --nodes 2 --context 1M
python -m labs.cost --model deepseek-v3 --nodes 2 --context 128k --weight-dtype float8
python -m labs.cost --model path/to/config.json --devices 4 --batch 16 --context 32k
"""

import argparse
import re
from collections.abc import Sequence

from labs.cost.advice import advice_table, advise, best_of_each, least_devices
from labs.cost.models import MODELS, Model, find_model
from labs.cost.observed import observed_steps, over_measured
from labs.cost.steps import CORNERS, REPAIRED, Step
from labs.cost.topology import PRESETS, preset
from labs.cost.workload import STORED_BYTES

NEAR = 1.2  # forecasts of held-out steps are off by up to 13 %; a fifth leaves a margin
UNITS = {"": 1, "k": 10**3, "m": 10**6}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, and print the advice."""
    parser = _parser()
    args = parser.parse_args(arguments)
    topology = preset(args.topology)
    p = args.devices or args.nodes * topology.node_size
    if p > topology.capacity:
        parser.error(f"{args.topology} joins {topology.capacity} devices, got {p}")
    case = args.model, args.batch, args.context, p, topology
    dtypes = {"weight_dtype": args.weight_dtype, "cache_dtype": args.cache_dtype}
    found = {corner: advise(*case, rates, **dtypes) for corner, rates in CORNERS.items()}
    steps = found["as repaired"]
    what = f"{args.model.name}, batch {args.batch}, {args.context:,} keys each"
    print(f"{what}, on {p} × {topology.device.name} ({topology.name})\n")
    if steps[0].fits:
        _print_advice(steps, args.model, p)
    else:
        least = least_devices(args.model, args.batch, args.context, topology, **dtypes)
        print(f"nothing fits: {steps[0].memory_bytes / 1e9:,.0f} GB on each device; ", end="")
        print(f"{least} devices would do" if least else "more devices than the network joins")
    print(f"\n{advice_table(steps)}\n")
    for corner, (first, *_) in found.items():
        text = f"{first.plan}, on {first.plan.devices}: {1e3 * first.seconds:.1f} ms"
        print(f"{corner:<12}  {text if first.fits else 'nothing fits'}")
    rows = [row for row in observed_steps() if row["kind"] == "step"]
    ratios = [f"{over_measured(REPAIRED, row):.2f} on {row['devices']}" for row in rows]
    print(
        "\nNothing overlaps in it. Published steps of Llama 3 405B on H100s, calculated so, are "
        f"\n{', '.join(ratios)} of the measured times; the first was fitted to.\n"
        "Plans closer than a fifth are not told apart. Measure the first two."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labs.cost",
        description="How to shard a model's cache on a cluster: whole decode steps, calculated "
        "from data sheets, a library's table, and constants that published steps repaired.",
    )
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("--model", type=_model, default="llama-3.1-8b", help=f"{known}, or a config.json")
    add("--topology", choices=PRESETS, default="dgx-h100")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=_count, default=1, help="full nodes (default 1)")
    size.add_argument("--devices", type=_count, help="devices, which need not fill their nodes")
    add("--context", type=_count, required=True, help="keys of each sequence: 128k")
    add("--batch", type=_count, default=1, help="sequences (default 1)")
    for what in ("weight", "cache"):
        add(f"--{what}-dtype", choices=list(STORED_BYTES), default="bfloat16")
    return parser


def _count(text: str) -> int:
    """ "128k" -> 128000, "1M" -> 1000000, "1.5M", "4096"; from 1 on."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.lower())
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
        raise argparse.ArgumentTypeError(str(error)) from None


def _print_advice(steps: list[Step], model: Model, p: int) -> None:
    """Print the plan, its devices, a use for the others, and how many plans are as good."""
    best = steps[0]
    plan = best.plan
    text = f"do: {plan}, {1e3 * best.seconds:.1f} ms a token"
    replicas, idle = divmod(p, plan.devices)
    if plan.devices < p:
        text += f", on {plan.devices} of the {p}"
    if replicas > 1:
        text += f": run {replicas} replicas, each with sequences of its own"
    print(f"{text}; {idle} left over" if idle else text)
    if plan.heads > model.kv_heads:
        copies = plan.heads // model.kv_heads
        print(f"(each key head on {copies} devices: engines run that, tree_decode does not)")
    near = [step for step in best_of_each(steps) if step.seconds <= NEAR * best.seconds]
    if more := sum(step.fits for step in near) - 1:
        print(f"within a fifth of it, so not told apart: the {more} below it")


if __name__ == "__main__":
    main()
