"""What the kernels do on a GPU: are they right, and how fast are they? One command, `make gpu`.

    python -m labs.kernels.gpu                     all parts; under ten minutes
    python -m labs.kernels.gpu correct local       only these
    python -m labs.kernels.gpu --times 3           with three times as long for each part
    python -m labs.kernels.gpu --smoke             the same end to end, small, on whatever there is

It needs a JAX for CUDA, NumPy and jaxtyping. Each part is a process of its own with a time limit of
its own, and every line that it finds is written at once: labs/kernels/results/gpu-<device>.json,
with a table (.md). Beside what an H100 or H200 measures stands what was predicted before any was at
hand. A part that cannot run, or is stopped, says why. The exit status is 0, or 1 where a result is
wrong, or 2 where all are right but a part failed or was stopped.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# name -> (seconds, what it finds out)
PARTS = {
    "device": (60, "what there is, and how fast it reads memory"),
    "correct": (240, "every kernel against float64"),
    "local": (150, "one query over 4k to 1M keys, by kernel"),
    "cluster": (70, "a merge within a cluster of thread blocks against a second kernel"),
}
# Bytes a second that a kernel reads from a long cache: an estimate, not a measurement.
BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}
START = 2.0, 2.7  # more µs for each of a call's two kernels, from and to, by estimate


def predicted(row: dict, device: str) -> dict:
    """The row, with split-K's predicted time on this device beside the measured time."""
    name = next((name for name in BANDWIDTH if name in device), None)
    if name is None or row.get("kernel") != "split-K" or row.get("dtype") != "bfloat16":
        return row
    if "µs" not in row or "bytes" not in row:
        return row
    read = 1e6 * row["bytes"] / BANDWIDTH[name]
    return row | {"µs predicted": f"{read + 2 * START[0]:.0f} to {1.05 * read + 2 * START[1]:.0f}"}


def environment(smoke: bool) -> dict[str, str]:
    """The environment of a part's process: this process's, with the repository importable."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    own = {} if smoke else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return own | os.environ | {"PYTHONPATH": path}


def run_part(name: str, smoke: bool, limit: float, found) -> dict:
    """Run a part in a process for at most `limit` seconds, and call found(row) for each line.

    Returns {"status", "seconds"}. The status is "done" or the reason why the part ended.
    """
    command = [sys.executable, "-m", "labs.kernels.gpu_parts", name, "--seconds", str(limit - 5)]
    command += ["--smoke"] * smoke
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(smoke)
        )
        clock = threading.Timer(limit, process.kill)
        clock.start()
        for line in process.stdout:
            if line.startswith("{"):
                found(json.loads(line))
        process.wait()
        clock.cancel()
        errors.seek(0)
        seconds = time.monotonic() - began
        if process.returncode == 0:
            status = "done"
        elif seconds >= limit:
            status = f"stopped after {limit:.0f} s"
        else:
            status = failure(process.returncode, errors.readlines())
    return {"status": status, "seconds": round(seconds, 1)}


def failure(code: int, errors: list[str]) -> str:
    """Why a process failed: the last exception in its stderr, or the last line."""
    said = [line.strip() for line in errors if line.strip() and not line.startswith("---")]
    raised = [line for line in said if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    last = (raised or said or [f"exit status {code}"])[-1][:300]
    return f"could not run: {last}" if raised else last


def table(rows: list[dict]) -> list[str]:
    """A Markdown table, with a column for each field of any row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[str(row.get(name, "")) for name in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in cells] + [""]


def report(results: dict) -> str:
    """The page of results."""
    device = device_of(results)
    lines = [f"# {device}, {results['date']}", ""]
    lines += ["A rehearsal with small sizes: its times say nothing.", ""] * results["smoke"]
    for name, part in results["parts"].items():
        lines += [f"## {name}", "", f"{part['status']}, {part.get('seconds', 0)} s.", ""]
        rows = [predicted(row, device) for row in part["rows"]]
        if name == "correct":
            asked = sum("ok" in row for row in rows)
            right = sum(row.get("ok", False) for row in rows)
            lines += [f"{right} of {asked} agree with float64.", ""]
            rows = [row for row in rows if not row.get("ok")]  # wrong or not run
        for what in dict.fromkeys(row.get("what") for row in rows):
            lines += table([row for row in rows if row.get("what") == what])
    return "\n".join(lines)


def device_of(results: dict) -> str:
    rows = results["parts"].get("device", {}).get("rows", [])
    return next((row["device"] for row in rows if "device" in row), "unknown")


def write(results: dict, folder: Path) -> Path:
    """The results so far, and their page."""
    name = re.sub(r"[^a-z0-9]+", "-", device_of(results).lower()).strip("-")
    path = folder / f"gpu-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(report(results), encoding="utf-8")
    return path


def verdict(parts: dict) -> int:
    """The exit status, as in the module's docstring. Prints the parts and rows that failed."""
    rows = [row for part in parts.values() for row in part["rows"]]
    wrong = [row for row in rows if row.get("ok") is False]
    if wrong:
        print(f"{len(wrong)} results are wrong")
    cut = [name for name, part in parts.items() if part["status"] != "done"]
    if cut:
        print(f"incomplete: {', '.join(cut)}; `--times N` gives each part N times as long")
    return 1 if wrong else 2 if cut else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all when left out")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--times", type=float, default=1, metavar="N", help="as long for each part")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="a folder")
    args = parser.parse_args()
    results: dict = {"smoke": args.smoke, "date": time.strftime("%Y-%m-%d"), "parts": {}}
    # The part "device" always runs first, because the device's name is the file's name.
    for name in [x for x in PARTS if x == "device" or x in (args.parts or PARTS)]:
        limit, what = PARTS[name]
        limit *= args.times * (4 if args.smoke else 1)  # a rehearsal may be on a small machine
        print(f"{name}: {what} (at most {limit:.0f} s)", flush=True)
        part = results["parts"][name] = {"status": "running", "rows": []}

        def found(row, part=part):
            part["rows"].append(row)
            write(results, args.results)
            row = predicted(row, device_of(results))
            print("   ", ", ".join(f"{k} {x}" for k, x in row.items() if x != ""), flush=True)

        part |= run_part(name, args.smoke, limit, found)
        path = write(results, args.results)
        print(f"    {part['status']}, {part['seconds']} s", flush=True)
    print(f"written: {path}, {path.with_suffix('.md').name}")
    return verdict(results["parts"])


if __name__ == "__main__":
    sys.exit(main())
