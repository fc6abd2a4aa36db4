"""Packing 64 beams of 32×16 with the mask: jitted `treeattn.pack` against a trie in plain Python.

python benchmarks/prefix_tree.py            about 10 seconds
python benchmarks/prefix_tree.py --rounds 40
python benchmarks/prefix_tree.py intervals  rows packed, attention and its gradient: 20 seconds
python benchmarks/prefix_tree.py intervals --write     also benchmarks/results/intervals.md
"""

import argparse
import datetime
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import treeattn

BATCH = 64
ROWS = 32
WIDTH = 16


def plain_pack(beam: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `treeattn.pack` returns, by a dictionary of edges and walks to the root.

    The only NumPy in it: the results are written into arrays, a mask row copied from the parent's.
    """
    trees = []
    for rows in beam.tolist():
        child = {}
        tokens = []
        parents = []
        offsets = []
        paths = []
        for row in rows:
            node = -1
            path = []
            for offset, token in enumerate(row):
                edge = node, token
                node = child.get(edge)
                if node is None:
                    node = child[edge] = len(tokens)
                    tokens.append(token)
                    parents.append(edge[0])
                    offsets.append(offset)
                path.append(node)
            paths.append(path)
        trees.append((tokens, parents, offsets, paths))
    size = max(len(tokens) for tokens, *_ in trees)
    packed = np.zeros((len(beam), size), beam.dtype)
    mask = np.zeros((len(beam), size, size), bool)
    position = np.zeros((len(beam), size), np.int32)
    unpack_map = np.zeros(beam.shape, np.int32)
    for b, (tokens, parents, offsets, paths) in enumerate(trees):
        packed[b, : len(tokens)] = tokens
        position[b, : len(tokens)] = offsets
        unpack_map[b] = paths
        for i, parent in enumerate(parents):
            if parent >= 0:
                mask[b, i] = mask[b, parent]
            mask[b, i, i] = True
    return packed, mask, position, unpack_map


def branching_beams(shared: float, rng: np.random.Generator) -> np.ndarray:
    """Beams whose candidates repeat, on average, the first `shared` of an earlier candidate."""
    beam = rng.integers(0, 50_000, (BATCH, ROWS, WIDTH), np.int32)
    for b, m in np.ndindex(BATCH, ROWS):
        if m and shared:
            same = min(WIDTH - 1, rng.binomial(WIDTH, shared))
            beam[b, m, :same] = beam[b, rng.integers(0, m), :same]
    return beam


def seconds(run, *args) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - began


def trees_of(n: int) -> dict[str, np.ndarray]:
    """Name -> where each node's subtree ends, of n nodes in depth-first order."""
    node = np.arange(n)
    prompt = n // 4
    answer = (n - prompt) // 8
    of_answers = prompt + ((node - prompt) // answer + 1) * answer
    return {
        "one text": np.full(n, n),
        "a prompt, 8 answers": np.where(node < prompt, n, np.minimum(of_answers, n)),
        "8 texts": (node // (n // 8) + 1) * (n // 8),
    }


def packing_line(rng: np.random.Generator) -> str:
    """The tokens a second of `pack_rows`: 1,024 rows of 768 tokens, on 64 prompts of 512."""
    prompts = rng.integers(0, 50_000, (64, 512))
    rows = [np.append(prompts[i % 64], rng.integers(0, 50_000, 256)).tolist() for i in range(1024)]
    tokens = sum(map(len, rows))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        trees = treeattn.pack_rows(rows, max_tokens=8192)
        times.append(time.perf_counter() - began)
    rate = tokens / statistics.median(times) / 1e6
    nodes = sum(len(tree.tokens) for tree in trees)
    return (
        f"`pack_rows`: {tokens:,} tokens of lists in {nodes:,} nodes, {rate:.0f} million a second."
    )


def interval_lines(rounds: int, n: int = 4096) -> list[str]:
    """A table of times of attention by intervals and of its gradient, beside causal attention."""
    rng = np.random.default_rng(0)
    shapes = (1, n, 9, 64), (1, n, 3, 64), (1, n, 3, 64)
    arrays = [jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes]

    def loss(q, k, v, options):
        return (treeattn.attention(q, k, v, **options) ** 2).sum()

    def pair(**options):  # attention, and it with its gradient
        forward = jax.jit(lambda *x: treeattn.attention(*x, **options))
        both = jax.jit(jax.value_and_grad(lambda *x: loss(*x, options), (0, 1, 2)))
        jax.block_until_ready((forward(*arrays), both(*arrays)))
        return forward, both

    calls = {name: pair(ends=ends[None]) for name, ends in trees_of(n).items()}
    calls["one text by `causal`"] = pair(causal=True)
    times = {name: ([], []) for name in calls}
    for _ in range(rounds):
        for name, functions in calls.items():
            for run, of_run in zip(functions, times[name], strict=True):
                of_run.append(seconds(run, *arrays))
    lines = [
        f"{n:,} tokens, 9 heads of 64 on 3, float32; milliseconds, medians of {rounds} in turn.",
        "",
        "| | blocks visited | attention | with its gradient | gradient / attention |",
        "|---|---|---|---|---|",
    ]
    for name, (forward, both) in times.items():
        ends = trees_of(n).get(name)
        visited = "" if ends is None else treeattn.blocks_by_device(ends, np.arange(n), 1).sum()
        ratio = statistics.median((b - a) / a for a, b in zip(forward, both, strict=True))
        a, b = (1000 * statistics.median(x) for x in (forward, both))
        lines.append(f"| {name} | {visited} | {a:.0f} | {b:.0f} | {ratio:.1f} |")
    return [*lines, "", packing_line(rng)]


def machine() -> str:
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, jax {jax.__version__} on "
        f"{jax.devices()[0].platform}, numpy {np.__version__}, treeattn {version('treeattn')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", default="beams", choices=("beams", "intervals"))
    parser.add_argument("--rounds", type=int, default=20, help="timings of each, taken in turn")
    parser.add_argument("--write", action="store_true", help="intervals also into results")
    args = parser.parse_args()
    if args.table == "intervals":
        lines = [*interval_lines(args.rounds), "", machine() + "."]
        print(*lines, sep="\n")
        if args.write:
            path = Path(__file__).parent / "results" / "intervals.md"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    compare_packing(args.rounds)


def compare_packing(rounds: int) -> None:
    print(f"{rounds} rounds of 4 kinds of beams; about {rounds * 0.4:.0f} s")
    print(machine())
    print(f"{BATCH} beams of {ROWS}×{WIDTH}; ms, the best and the median of {rounds} rounds\n")
    print("                        plain trie      numpy pack     jitted pack    trie / jitted")
    print("shared  nodes (most)   best  median    best  median    best  median    best  median")
    pack = jax.jit(treeattn.pack)
    rng = np.random.default_rng(0)
    for shared in (0.0, 0.3, 0.6, 0.9):
        beam = branching_beams(shared, rng)
        on_device = jax.device_put(beam)
        plain = plain_pack(beam)
        jitted = pack(on_device)
        size = plain[0].shape[1]
        for a, b in zip(plain, jitted, strict=True):  # the same nodes, before any timing
            cut = (slice(None), *[slice(size)] * (b.ndim - 1)) if b.shape != a.shape else ...
            np.testing.assert_array_equal(a, np.asarray(b)[cut])
        times = [
            (seconds(plain_pack, beam), seconds(treeattn.pack, beam), seconds(pack, on_device))
            for _ in range(rounds)
        ]
        columns = list(zip(*times, strict=True))
        best = [1000 * min(column) for column in columns]
        median = [1000 * statistics.median(column) for column in columns]
        ratios = best[0] / best[2], statistics.median(t[0] / t[2] for t in times)
        nodes = np.mean(np.asarray(jitted.attention_mask).diagonal(axis1=1, axis2=2).sum(axis=1))
        pairs = "".join(f"{x:9.1f}{y:7.1f}" for x, y in zip(best, median, strict=True))
        print(f"{shared:5.0%} {nodes:6.0f} ({size:3}) {pairs} {ratios[0]:7.1f}×{ratios[1]:6.1f}×")
    memory = pack.lower(on_device).compile().memory_analysis()
    mask = BATCH * (ROWS * WIDTH) ** 2
    print(f"\ntemporary memory {memory.temp_size_in_bytes / mask:.3f} of the mask's {mask:,} bytes")


if __name__ == "__main__":
    main()
