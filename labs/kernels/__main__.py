"""Tree decoding in one kernel, on eight simulated TPUs, right and with planted mistakes.

    python -m labs.kernels                      runs the kernels: about a minute
    python -m labs.kernels --compile v5e:2x4    compiles them for TPUs that are not there
    python -m labs.kernels --store              runs and compiles all, and writes results/

It needs JAX 0.12 or newer; to compile, also libtpu. `make tpu` sets up both, and runs this.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from labs.kernels import described_tpus, races
from labs.kernels.tpu_decode import missing
from treeattn import simulate_devices

RESULTS = Path(__file__).parent / "results"


def plans() -> Iterator[tuple[str, list[dict]]]:
    """Each plan and its two runs, printed as soon as they are known."""
    print("Eight simulated TPUs; each inbox has one slot. Left: copies run as late as they may.")
    print("Right: copies run at once, and one device is late.")
    print(f"{'plan':28} {'error':>15}  {'race':>9}  counters end at 0", flush=True)
    for name in ("right", *races.MISTAKES):
        rows = [races.run(races.planted(name), *schedule) for schedule in races.SCHEDULES]
        print(name.ljust(28), plan_line(rows), flush=True)
        yield name, rows


def plan_line(rows: list[dict]) -> str:
    def words(field, width):
        found = ("stop" if x["stopped"] else ("no", "yes")[x[field]] for x in rows)
        return " ".join(word.rjust(width) for word in found)

    errors = " ".join(f"{x['error']:7.0e}" for x in rows)
    return f"{errors}  {words('race', 4)}  {words('counters', 8)}"


def chips(names) -> Iterator[dict]:
    """The rows of described_tpus.py for these chips, printed as soon as they are known."""
    for name in names:
        for row in described_tpus.table(name):
            cells = (f"{key} {x:,}" if isinstance(x, int) else x for key, x in row.items())
            print(", ".join(cells), flush=True)
            yield row


def store(file: str, **results) -> None:
    about = {"date": str(datetime.date.today())}
    about |= {package: version(package) for package in ("jax", "libtpu")}
    text = json.dumps({"about": about, **results}, indent=1, ensure_ascii=False)
    (RESULTS / file).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", metavar="CHIPS", help="for example v5e:2x4 or v5p:2x2x2")
    parser.add_argument("--store", action="store_true", help="write plans.json and chips.json")
    args = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"{reason}. `make tpu` installs it in an environment of its own.")
    simulate_devices(races.DEVICES)
    try:
        if args.compile or args.store:
            compiled = list(chips(described_tpus.CHIPS if args.store else [args.compile]))
        if not args.compile:
            run = dict(plans())
    except ImportError as error:
        sys.exit(str(error))
    if args.store:
        store("plans.json", plans=run)
        store("chips.json", chips=compiled)


if __name__ == "__main__":
    main()
