"""One query against a long cache on a CPU: `treeattn.attention` beside PyTorch and `jax.nn`.

python benchmarks/local_attention.py               16k and 64k keys, about 2 minutes
python benchmarks/local_attention.py --write       also benchmarks/results/local_attention.md

16 heads of 128 in the layout (batch, keys, heads, head_dim), one call of each contestant in
turn, many times over; the table gives each one's median, and the bandwidth of the fastest
calls, which other work on the machine disturbs least. PyTorch is optional.
"""

import argparse
import datetime
import functools
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import treeattn

try:
    import torch
except ImportError:
    torch = None

HEADS, DIM = 16, 128
TORCH = "PyTorch SDPA"
OURS = "treeattn"


def read_everything(parts: list[np.ndarray], pool: ThreadPoolExecutor) -> None:
    """Each core takes the maximum of its part: as fast as NumPy reads memory."""
    list(pool.map(np.max, parts))


def contestants(n: int, kv_heads: int, dtype: str, pool: ThreadPoolExecutor) -> dict:
    """Name -> a call without arguments that returns when its result is there."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 1, HEADS, DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, n, kv_heads, DIM)).astype(np.float32)
    jq, jk, jv = (jnp.asarray(x, dtype) for x in (q, k, v))
    ours = jax.jit(treeattn.attention)
    theirs = jax.jit(functools.partial(jax.nn.dot_product_attention, return_residual=True))
    calls = {
        OURS: lambda: jax.block_until_ready(ours(jq, jk, jv)),
        "jax.nn with residual": lambda: jax.block_until_ready(theirs(jq, jk, jv)),
    }
    if torch is not None:
        tq, tk, tv = (
            torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2) for x in (q, k, v)
        )
        sdpa = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, enable_gqa=kv_heads != HEADS
        )
        ck, cv = tk.contiguous(), tv.contiguous()
        calls[TORCH] = lambda: sdpa(tq, tk, tv)
        calls[f"{TORCH}, (b, h, n, d)"] = lambda: sdpa(tq, ck, cv)
    words = jk.nbytes * 2 // 4
    parts = np.array_split(np.ones(words, np.float32), os.cpu_count())
    calls["reading it all"] = lambda: read_everything(parts, pool)
    return calls


def time_in_turn(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, one of each in turn; the first two rounds warm up."""
    times = {name: [] for name in calls}
    slow = set()
    for turn in range(rounds + 2):
        for name, call in calls.items():
            if name in slow and turn % 5:  # the one that takes seconds, every fifth round
                continue
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            if turn >= 2:
                times[name].append(1e3 * took)
            elif turn == 1 and took > 0.3:
                slow.add(name)
    return times


def machine() -> str:
    packages = ["jax", "numpy"] + (["torch"] if torch is not None else [])
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}"
    )


def row(name: str, times: dict[str, list[float]], gigabytes: float) -> str:
    """A line of the table: milliseconds, and the ratios that matter."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours, best, limit = medians[OURS], min(times[OURS]), min(times["reading it all"])
    cells = [name, *(f"{t:.1f}" for t in medians.values())]
    cells.append(f"{medians[TORCH] / ours:.2f}" if TORCH in medians else "–")
    cells.append(f"{medians['jax.nn with residual'] / ours:.0f}")
    cells.append(f"{limit / best:.0%} of {gigabytes / limit * 1e3:.0f} GB/s")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=[16 * 1024, 64 * 1024])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    lines = [f"One query, {HEADS} heads of {DIM}; milliseconds, medians in turn. {machine()}.", ""]
    if torch is None:
        print("PyTorch is not installed: its columns are left out")
    pool = ThreadPoolExecutor(os.cpu_count())
    cases = [(n, kv, t) for n in args.keys for kv in (16, 4) for t in ("float32", "bfloat16")]
    for n, kv_heads, dtype in tqdm(cases, unit="case"):
        times = time_in_turn(contestants(n, kv_heads, dtype, pool), args.rounds)
        if len(lines) == 2:
            head = ["keys", *times, f"speed against {TORCH}", "against jax.nn", "bandwidth"]
            lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        gigabytes = 2 * n * kv_heads * DIM * jnp.dtype(dtype).itemsize / 1e9
        kind = "MHA" if kv_heads == HEADS else f"GQA-{kv_heads}"
        lines.append(row(f"{n // 1024}k, {kind}, {dtype}", times, gigabytes))
    print("\n".join(lines))
    if args.write:
        path = Path(__file__).parent / "results" / "local_attention.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
