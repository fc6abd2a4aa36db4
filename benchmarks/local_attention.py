"""One query against a long cache on a CPU: `treeattn.attention` beside PyTorch and `jax.nn`.

python benchmarks/local_attention.py               8k to 64k keys, about 3 minutes
python benchmarks/local_attention.py --write       also benchmarks/results/local_attention.md

16 heads of 128, on as many key heads and on 4, and the packaged Llama's 9 heads of 64 on 3, in the
layout (batch, keys, heads, head_dim). One call of each contestant in turn, many times over; the
table gives each one's median, and the bandwidth of the fastest calls, which other work on the
machine disturbs least. PyTorch is optional.
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

SHAPES = {  # heads, key heads, head_dim
    "MHA": (16, 16, 128),
    "GQA-4": (16, 4, 128),
    "SmolLM2": (9, 3, 64),
}
KEYS = {"MHA": (1 << 14, 1 << 16), "GQA-4": (1 << 14, 1 << 16), "SmolLM2": (1 << 13, 1 << 16)}
DTYPES = "float32", "bfloat16"
TORCH = "PyTorch SDPA"
OURS = "treeattn"


def read_everything(parts: list[np.ndarray], pool: ThreadPoolExecutor) -> None:
    """Each core takes the maximum of its part: as fast as NumPy reads memory."""
    list(pool.map(np.max, parts))


def contestants(n: int, shape: tuple, dtype: str, pool: ThreadPoolExecutor) -> dict:
    """Name -> a call without arguments that returns when its result is there."""
    rng = np.random.default_rng(0)
    heads, kv_heads, d = shape
    q = rng.normal(size=(1, 1, heads, d)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, n, kv_heads, d)).astype(np.float32)
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
            torch.nn.functional.scaled_dot_product_attention, enable_gqa=kv_heads != heads
        )
        ck = tk.contiguous()
        cv = tv.contiguous()
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
    ours = medians[OURS]
    best = min(times[OURS])
    limit = min(times["reading it all"])
    cells = [name, *(f"{t:.1f}" for t in medians.values())]
    cells.append(f"{medians[TORCH] / ours:.2f}" if TORCH in medians else "–")
    cells.append(f"{medians['jax.nn with residual'] / ours:.0f}")
    cells.append(f"{limit / best:.0%} of {gigabytes / limit * 1e3:.0f} GB/s")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    shapes = "16 heads of 128, SmolLM2 9 heads of 64 on 3"
    lines = [f"One query, {shapes}; milliseconds, medians in turn. {machine()}.", ""]
    if torch is None:
        print("PyTorch is not installed: its columns are left out")
    pool = ThreadPoolExecutor(os.cpu_count())
    cases = [(x, n, t) for x in SHAPES for n in KEYS[x] for t in DTYPES]
    for name, n, dtype in tqdm(cases, unit="case"):
        times = time_in_turn(contestants(n, SHAPES[name], dtype, pool), args.rounds)
        if len(lines) == 2:
            head = ["keys", *times, f"speed against {TORCH}", "against jax.nn", "bandwidth"]
            lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        _, kv_heads, d = SHAPES[name]
        gigabytes = 2 * n * kv_heads * d * jnp.dtype(dtype).itemsize / 1e9
        lines.append(row(f"{n // 1024}k, {name}, {dtype}", times, gigabytes))
    print("\n".join(lines))
    if args.write:
        path = Path(__file__).parent / "results" / "local_attention.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
