"""Packing 64 beams of 32×16 with the mask: jitted `treeattn.pack` against a trie in plain Python.

python benchmarks/prefix_tree.py            about 10 seconds
python benchmarks/prefix_tree.py --rounds 40
"""

import argparse
import datetime
import os
import platform
import statistics
import time
from importlib.metadata import version

import jax
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


def machine() -> str:
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, jax {jax.__version__} on "
        f"{jax.devices()[0].platform}, numpy {np.__version__}, treeattn {version('treeattn')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timings of each, taken in turn")
    args = parser.parse_args()
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
