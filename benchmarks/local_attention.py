"""One query against a long cache on a CPU: `treeattn.attention` beside PyTorch and `jax.nn`.

python benchmarks/local_attention.py               8k to 64k keys, about 3 minutes
python benchmarks/local_attention.py --write       also benchmarks/results/local_attention.md
python benchmarks/local_attention.py exact         "exact" beside "blockwise", under two minutes
python benchmarks/local_attention.py exact --write also benchmarks/results/exact.md

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
# The exact sums' products of digits: digits of a score's factors, of a value, of a weight; keys of
# a block, at most and at least, scores at a time; queries from which 8-bit products are formed.
SCORE_DIGITS = 3
VALUE_DIGITS = {"float32": 4, "bfloat16": 3}
LEVELS = 6
BLOCK = 512
LEAST = 128
SCORES = 1 << 20
FEW = 64
EXACT = "blockwise", "exact"  # the implementations of the other table, the plain one first
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


def exact_row(name: str, n: int, dtype: str, queries: int, rounds: int) -> str:
    """A line of the other table: one query, or a block of a prompt's, by both implementations."""
    heads, kv_heads, d = SHAPES[name]
    rng = np.random.default_rng(0)
    shapes = (1, queries, heads, d), (1, n, kv_heads, d), (1, n, kv_heads, d)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    runs = {x: jax.jit(functools.partial(treeattn.attention, implementation=x)) for x in EXACT}
    wall = {x: [] for x in EXACT}
    cores = {x: [] for x in EXACT}
    for turn in range(rounds + 1):  # the first compiles
        for implementation, run in runs.items():
            start = time.perf_counter()
            start_cores = time.process_time()
            jax.block_until_ready(run(*arrays))
            if turn:
                cores[implementation].append(1e3 * (time.process_time() - start_cores))
                wall[implementation].append(1e3 * (time.perf_counter() - start))
    cells = [f"{queries} on {n // 1024}k keys, {name}, {dtype}"]
    for times in (wall, cores):
        plain, whole = (statistics.median(times[x]) for x in EXACT)
        cells += [f"{plain:.1f}", f"{whole:.1f}", f"{whole / plain:.1f}"]
    products = products_alone(queries * heads // kv_heads, kv_heads, d, n, dtype)
    cells.append(f"{products:.1f}, {products / whole:.0%}")
    return "| " + " | ".join(cells) + " |"


def products_alone(rows: int, kv_heads: int, d: int, n: int, dtype: str) -> float:
    """Processor milliseconds of nothing but the products of digits, of `rows` queries a key head.

    Those of a block of keys, as treeattn/kernel/{exactly,digit_products}.py form them, times the
    blocks.
    """
    size = min(max(SCORES // (rows * kv_heads), LEAST), BLOCK)
    few = rows <= FEW
    product = functools.partial(jnp.einsum, preferred_element_type="float32" if few else "int32")
    pairs = []
    for j in range(SCORE_DIGITS):
        left = jnp.ones((kv_heads, rows * (SCORE_DIGITS - j), d))
        keys = jnp.ones((kv_heads, size, d))
        if left.shape[1] < size:  # XLA:CPU transposes the second factor
            left, keys = keys, left
        pairs.append((functools.partial(jnp.einsum, "kmd,knd->kmn"), left, keys))
    for j in range(VALUE_DIGITS[dtype]):
        count = (LEVELS - j) if few else 1
        left = jnp.ones((kv_heads, rows * count, size), "float32" if few else "int8")
        weigh = functools.partial(product, "krn,knd->krd")
        one = (weigh, left, jnp.ones((kv_heads, size, d), left.dtype))
        pairs += [one] * (1 if few else LEVELS - j)
    took = 0.0
    for f, left, right in pairs:
        run = jax.jit(f)
        times = []
        for _ in range(9):
            start = time.process_time()
            jax.block_until_ready(run(left, right))
            times.append(time.process_time() - start)
        took += 1e3 * statistics.median(times)
    return took * -(-n // size)


def exact_lines(rounds: int) -> list[str]:
    """The table of "exact" beside "blockwise"; 256 queries see fewer keys, in fewer rounds."""
    head = ["queries", *(f"{x}, ms" for x in EXACT), "ratio"]
    head += [*(f"{x}, processor ms" for x in EXACT), "ratio", "products of digits alone"]
    lines = [
        f"The implementations {EXACT[0]!r} and {EXACT[1]!r} in turn, medians. 256 queries see all "
        f"keys. Last, nothing but the products of digits: processor ms, and their share of "
        f"those of {EXACT[1]!r}. {machine()}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    cases = [(x, t, l) for l in (1, 256) for x in ("GQA-4", "SmolLM2") for t in DTYPES]
    for name, dtype, queries in tqdm(cases, unit="case"):
        alone = queries == 1
        keys = KEYS[name][0] if alone else 1 << 12
        some = rounds if alone else -(-rounds // 5)
        lines.append(exact_row(name, keys, dtype, queries, some))
    return lines


def report(lines: list[str], write: bool, name: str) -> None:
    print("\n".join(lines))
    if write:
        path = Path(__file__).parent / "results" / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", default="others", choices=("others", "exact"))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    if args.table == "exact":
        report(exact_lines(args.rounds), args.write, "exact.md")
        return
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
    report(lines, args.write, "local_attention.md")


if __name__ == "__main__":
    main()
