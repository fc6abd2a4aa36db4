"""What the kernels do on a GPU: are they right, and how fast are they? One command, `make gpu`.

    python benchmarks/gpu.py                     all parts; under ten minutes
    python benchmarks/gpu.py correct local       only these
    python benchmarks/gpu.py --times 3           with three times as long for each part
    python benchmarks/gpu.py --smoke             the same end to end, small, on whatever there is
    python benchmarks/gpu.py --report FILE.json  the table and the figure of results, once more

It needs a JAX for CUDA, 0.8 or newer, and NumPy; what else treeattn imports may be missing. Each
part is a process of its own with a time limit of its own, and every line that it finds is written
at once: benchmarks/results/gpu-<name of the device>.json, with a table (.md) and, where matplotlib
is installed, a figure (.png) from it. What was predicted of an H200 before any was at hand
(benchmarks/results/gpu_predictions.json) stands beside what it measures. A part that cannot run, or
is stopped, says why; the programs compiled so far are kept, so that a second run comes further. The
exit status is 0, or 1 where a result is wrong, or 2 where all are right but a part failed or was
stopped.
"""

import argparse
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
# name -> (seconds, what it finds out); 595 seconds in all
PARTS = {
    "device": (30, "what there is, and how fast it copies and reads memory"),
    "correct": (160, "every implementation against float64"),
    "local": (105, "one query over 4k to 1M keys, by implementation"),
    "kernels": (30, "the same by the GPU's own clock, a kernel at a time"),
    "cluster": (60, "a merge within a cluster of thread blocks against a second kernel"),
    "tree": (30, "tree_decode over all devices against the kernel alone"),
    "packaged": (45, "tokens per second of the packaged model's shape"),
    "large": (60, "tokens per second of a random Llama of 8B, in bfloat16"),
    "verify": (75, "speculation: packed against unpacked, and steps of 1 to 64 tokens"),
}


def environment(name: str, smoke: bool) -> dict[str, str]:
    """Of a part: this one's, with the package within reach; on a GPU, programs are kept.

    CUDA graphs would hide from the profiler what they start.
    """
    path = os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(HERE.parent / "build" / "gpu-programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    own = {"PYTHONPATH": path}
    if name == "kernels" and not smoke:
        flags = os.environ.get("XLA_FLAGS", "")
        own["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    return ({} if smoke else kept) | os.environ | own


def run_part(name: str, smoke: bool, seconds: float, found) -> dict:
    """Run a part in a process; found(row) is called for each line as it comes.

    Returns {"status", "seconds"}: "done", or why it is not.
    """
    command = [sys.executable, str(HERE / "gpu_parts.py"), name, "--seconds", str(seconds - 5)]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *(["--smoke"] if smoke else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(name, smoke),
    )
    lines: queue.Queue = queue.Queue()
    errors: list[str] = []
    threads = [
        threading.Thread(target=lambda: [lines.put(line) for line in process.stdout], daemon=True),
        threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True),
    ]
    for thread in threads:
        thread.start()
    status = None
    while status is None:
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            if time.monotonic() - began > seconds:
                process.kill()
                status = f"stopped after {seconds:.0f} s"
            elif process.poll() is not None and not threads[0].is_alive() and lines.empty():
                status = "done" if process.returncode == 0 else failure(process, threads, errors)
        else:
            if line.startswith("{"):
                found(json.loads(line))
    process.wait()
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


def failure(process, threads, errors: list[str]) -> str:
    """Why a process ended as it did: the last line of what it said."""
    threads[1].join(timeout=5)
    said = [line.strip() for line in errors if line.strip() and not line.startswith("---")]
    errors_said = [line for line in said if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    last = (errors_said or said or [f"exit status {process.returncode}"])[-1]
    return f"could not run: {last[:300]}" if errors_said else last[:300]


def name_of(rows: list[dict]) -> str:
    """The device's name, as part of a file's."""
    kind = next((row["device"] for row in rows if "device" in row), "unknown")
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def write(results: dict, folder: Path) -> Path:
    """The results so far, and their table and figure."""
    path = folder / f"{name_of(results['parts'].get('device', {}).get('rows', []))}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when left out")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--times", type=float, default=1, metavar="N", help="as long for each part")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="a folder")
    parser.add_argument("--report", type=Path, metavar="FILE")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    import gpu_report

    if args.report:
        print(gpu_report.report(args.report))
        return 0
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {unknown[0]}")
    if importlib.util.find_spec("jax") is None:
        parser.error(f"{sys.executable} has no jax: say `make gpu PYTHON=...`")
    results: dict = {"smoke": args.smoke, "date": time.strftime("%Y-%m-%d"), "parts": {}}
    # What the device is called names the file: that part comes first, whatever is asked for.
    wanted = [name for name in PARTS if name == "device" or name in (args.parts or PARTS)]
    for name in wanted:
        limit, what = PARTS[name]
        limit *= args.times * (
            4 if args.smoke else 1
        )  # a rehearsal may be one of many tests on a small machine
        print(f"{name}: {what} (at most {limit:.0f} s)", flush=True)
        part = results["parts"][name] = {"status": "running", "rows": []}

        def found(row, part=part):
            part["rows"].append(row)
            if "device" in row or len(results["parts"]) > 1:
                write(results, args.results)
            said = gpu_report.headline(row) if "cannot run" in row else gpu_report.line(row)
            print("   ", said, flush=True)

        part |= run_part(name, args.smoke, limit, found)
        path = write(results, args.results)
        print(f"    {part['status']}, {part['seconds']} s", flush=True)
    print(gpu_report.report(path))
    return verdict(results["parts"])


def verdict(parts: dict) -> int:
    """The exit status, as the module's docstring has it; what is not as it should be is printed."""
    rows = [row for part in parts.values() for row in part["rows"]]
    wrong = [row for row in rows if row.get("ok") is False]
    if wrong:
        print(f"{len(wrong)} results are wrong")
    cut = [name for name, part in parts.items() if part["status"] != "done"]
    if cut:
        print(f"incomplete: {', '.join(cut)}; `--times N` gives each part N times as long")
    return 1 if wrong else 2 if cut else 0


if __name__ == "__main__":
    sys.exit(main())
